"""How a thread works beside the event loop: a little, then a pause four times as long.

The loop lets go of the interpreter with every write to a socket. A thread that waits for it then takes it, once for each write, so
fifty streams are late by all that the thread has to do. While the thread pauses nobody waits, and the loop is late by one step.
"""

from __future__ import annotations

import threading

from superfluid_core.clock import MS, SECOND, SystemClock

WORK_NS = 2 * MS
PAUSES_PER_WORK = 4
PAUSE_S_MAX = 0.02


class Pace:
    """The pace of one piece of work. `rest` is called between its steps."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._never = threading.Event()
        self._began_ns = self._clock.now_ns()

    def rest(self) -> None:
        """Pause, if there was enough work for one."""
        worked_ns = self._clock.now_ns() - self._began_ns
        if worked_ns < WORK_NS:
            return
        self._never.wait(min(PAUSE_S_MAX, PAUSES_PER_WORK * worked_ns / SECOND))
        self._began_ns = self._clock.now_ns()


class Unpaced(Pace):
    """Work that is done at once."""

    def rest(self) -> None:
        return
