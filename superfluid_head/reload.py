"""SIGHUP: reads `--fleet` again, files and all, and gives the fleet the new list; a wrong one leaves the old in force.

Owns the signal's handler and nothing of the fleet. The file is read beside the event loop; signals that come meanwhile are
one more reading. A head without `--fleet` has nothing to read and says so: the signal never ends it.
"""

from __future__ import annotations

import asyncio
import logging
import signal

from superfluid_core.errors import ConfigError
from superfluid_core.logs import log
from superfluid_head.config import HeadConfig, read_fleet
from superfluid_head.fleet.fleet import Fleet

_logger = logging.getLogger(__name__)


class Reloader:
    """Waits for SIGHUP. It is heard from the moment this is made, and never after `run` has ended."""

    def __init__(self, config: HeadConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._wanted = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._wanted.set)

    async def run(self) -> None:
        """Read again whenever told, until cancelled."""
        try:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                await self._reload()
        finally:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)

    async def _reload(self) -> None:
        if not self._config.fleet_texts:
            log(_logger, "info", "nothing to read again: this head has no --fleet")
            return
        try:
            nodes = await asyncio.to_thread(
                read_fleet, self._config.fleet_texts, is_judged=self._config.is_fleet_judged
            )
        except ConfigError as error:
            log(_logger, "error", "the list of nodes stays as it was", reason=error.message)
            return
        self._fleet.reload(nodes)
