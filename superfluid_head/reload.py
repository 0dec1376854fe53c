"""SIGHUP: reads again what may change while a head runs: `--fleet`, keys and certificate; what is wrong leaves the old in force.

Owns the signal's handler and the order; what is read, and what becomes of it, is others'. Files are read beside the event loop, and
what was read takes effect on it, at once; signals that come meanwhile are one more reading. Each thing stands by itself: a wrong
policy does not keep the new nodes out. A head that has nothing to read again says so: the signal never ends it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from superfluid_core.errors import ConfigError
from superfluid_core.logs import log
from superfluid_head.config import HeadConfig, read_fleet
from superfluid_head.fleet.fleet import Fleet

T = TypeVar("T")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reread(Generic[T]):
    """Something that is read again: `read` runs in a thread and raises ConfigError, `take` gets what it found."""

    what: str
    read: Callable[[], T]
    take: Callable[[T], object]

    async def again(self) -> None:
        try:
            self.take(await asyncio.to_thread(self.read))
        except ConfigError as error:
            log(_logger, "error", f"the {self.what} stay as they were", reason=error.message)
            return
        log(_logger, "info", f"the {self.what} were read again")


class Reloader:
    """Waits for SIGHUP. It is heard from the moment this is made, and never after `run` has ended."""

    def __init__(
        self, config: HeadConfig, fleet: Fleet, others: Sequence[Reread[Any]] = ()
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._others = others
        self._wanted = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._wanted.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # a worker's has waited

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
        for each in self._others:
            await each.again()
        if self._config.fleet_texts:
            await self._reload_fleet()
        elif not self._others:
            log(_logger, "info", "nothing to read again: this head has no --fleet")

    async def _reload_fleet(self) -> None:
        try:
            nodes = await asyncio.to_thread(
                read_fleet, self._config.fleet_texts, is_judged=self._config.is_fleet_judged
            )
        except ConfigError as error:
            log(_logger, "error", "the list of nodes stays as it was", reason=error.message)
            return
        self._fleet.reload(nodes)
