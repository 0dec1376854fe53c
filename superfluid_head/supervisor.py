"""What the service supervisor (systemd) is told: that the head loads, serves, drains, and that its event loop turns.

A head has no engine that could hang: whoever can run this feeds the watchdog. Tokenizers are read and fetched, and a node of one's own is
awaited, before it serves; meanwhile the start timeout is pushed ahead, up to a bound. The status line says how the fleet stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from superfluid_core.notify import (
    READY,
    STOPPING,
    WATCHDOG,
    extend,
    notify,
    status,
    watchdog_interval_ms,
)
from superfluid_head.config import Surroundings
from superfluid_head.fleet.fleet import Fleet

LOAD_TELL_MS = 10_000
LOAD_EXTEND_MS = 30_000
LOAD_TOLD_MAX = 2 * 3_600_000 // LOAD_TELL_MS
"""Two hours: then a load counts as stuck, and the start timeout is pushed ahead no further."""
STOP_MARGIN_MS = 15_000
"""Beyond the drain: errors for what is cut, closing links, the process's own end."""


class Supervisor:
    """Every method is a no-op where nobody listens."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._is_ready = asyncio.Event()

    def _tell(self, *states: str) -> None:
        notify("\n".join(states), self._around.notify_socket)

    async def load(self) -> None:
        """Ask for more time again and again, until the head is ready."""
        for _ in range(LOAD_TOLD_MAX):
            self._tell(status("loading"), extend(LOAD_EXTEND_MS))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOAD_TELL_MS / 1e3):
                    await self._is_ready.wait()
                    return

    def ready(self) -> None:
        self._is_ready.set()
        self._tell(READY, status("serving"))

    def draining(self, in_flight: int, drain_ms: int) -> None:
        """Say that the head stops, and ask for the whole drain, whatever the unit's stop timeout is."""
        words = status(f"draining {in_flight} in flight")
        self._tell(STOPPING, extend(drain_ms + STOP_MARGIN_MS), words)

    async def feed(self, fleet: Fleet, in_flight: Callable[[], int]) -> None:
        """Feed the watchdog until cancelled, if there is one: twice within its timeout."""
        around = self._around
        interval_ms = watchdog_interval_ms(around.watchdog_usec, around.watchdog_pid, os.getpid())
        while interval_ms is not None:
            self._tell(WATCHDOG, status(standing(fleet, in_flight())))
            await asyncio.sleep(interval_ms / 1e3)


def standing(fleet: Fleet, in_flight: int) -> str:
    """Say in a line how the fleet stands."""
    nodes = fleet.health().nodes
    models = len(fleet.models())
    served = "1 model" if models == 1 else f"{models} models"
    up = sum(node.is_up for node in nodes)
    return f"serving {served}; {up} of {len(nodes)} nodes up; {in_flight} in flight"
