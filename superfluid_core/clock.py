"""The only reader of time.

Everything else takes `now_ns` as an argument. Two clocks matter: the monotonic one for intervals,
and CLOCK_BOOTTIME, which keeps counting through a suspend, for lease stamps (fleet.md 5).
Pure modules may name the `Clock` protocol, never `SystemClock`.
"""

from __future__ import annotations

import time
from typing import Protocol

MS = 1_000_000
SECOND = 1_000_000_000


class Clock(Protocol):
    """Integer nanoseconds of a monotonic clock, of a suspend-proof one, and wall seconds."""

    def now_ns(self) -> int: ...

    def boot_ns(self) -> int: ...

    def wall_s(self) -> int: ...


def epoch_offset_ns(clock: Clock) -> int:
    """Return what makes `now_ns` wall time, for what leaves the program with both: good until the wall clock is set."""
    return time.time_ns() - clock.now_ns()


class SystemClock:
    """The machine's clocks. The first is read dozens of times a request: it is the system's own call."""

    now_ns = staticmethod(time.monotonic_ns)

    def boot_ns(self) -> int:
        boottime = getattr(time, "CLOCK_BOOTTIME", None)
        return time.monotonic_ns() if boottime is None else time.clock_gettime_ns(boottime)

    def wall_s(self) -> int:
        return int(time.time())
