"""What the service supervisor (systemd) is told: how loading goes, that the node serves, that it drains, and that it lives.

The watchdog is fed while no engine hangs: the step that runs now may take what `Node.is_hung` grants it (decisions 8), an idle engine
owes nothing, and a node that still loads has no watchdog yet, only a start timeout, which is pushed ahead for as long as
loading may take. It reads no counter itself and never stops anything: who is not fed any more is ended from outside.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from superfluid_core.clock import MS, SECOND, Clock
from superfluid_core.notify import (
    READY,
    STOPPING,
    WATCHDOG,
    extend,
    notify,
    status,
    watchdog_interval_ms,
)
from superfluid_noded.config import Surroundings

LOAD_MS_MAX = 2 * 3_600_000
"""From then on a load counts as stuck: the start timeout is pushed ahead no further."""
LOAD_EXTEND_MS = 30_000
STOP_MARGIN_MS = 15_000
"""Beyond the grace: closing links and engine, and the process's own end."""


class Supervisor:
    """Every method is a no-op where nobody listens."""

    def __init__(self, around: Surroundings, clock: Clock) -> None:
        self._around = around
        self._clock = clock
        self._began_ns = clock.now_ns()
        self._serving = "serving"

    def _tell(self, *states: str) -> None:
        notify("\n".join(states), self._around.notify_socket)

    def loading(self, model: str) -> None:
        """Say that the model still loads, and ask for time to do so. To be repeated well within `LOAD_EXTEND_MS`."""
        elapsed_ns = self._clock.now_ns() - self._began_ns
        words = status(f"loading {model} for {elapsed_ns // SECOND} s")
        if elapsed_ns < LOAD_MS_MAX * MS:
            self._tell(words, extend(LOAD_EXTEND_MS))
        else:
            self._tell(words)

    def ready(self, names: str, where: str) -> None:
        self._serving = f"serving {names} on {where}"
        self._tell(READY, status(self._serving))

    def draining(self, sessions: int, grace_ms: int) -> None:
        """Say that the node stops, and ask for the whole grace, whatever the unit's stop timeout is."""
        self._serving = f"draining {sessions} sessions"
        self._tell(STOPPING, extend(grace_ms + STOP_MARGIN_MS), status(self._serving))

    async def feed(self, is_hung: Callable[[], bool], sessions: Callable[[], int]) -> None:
        """Feed the watchdog until cancelled, if there is one: twice within its timeout while no engine hangs."""
        around = self._around
        interval_ms = watchdog_interval_ms(around.watchdog_usec, around.watchdog_pid, os.getpid())
        while interval_ms is not None:
            if is_hung():
                self._tell(status("the engine hangs; waiting for its step to end"))
            else:
                self._tell(WATCHDOG, status(f"{self._serving}, {sessions()} sessions live"))
            await asyncio.sleep(interval_ms / 1e3)
