"""Runs one of our programs under a clock that can be turned: SIGUSR1 moves the wall clock, SIGUSR2 the one that counts through suspends.

python fake_clock.py -- /path/to/superfluid-noded ARGUMENTS

The wall clock goes a day ahead, then a day back, and so on; CLOCK_BOOTTIME jumps ahead by 15 s, as after a suspend.
"""

from __future__ import annotations

import importlib
import itertools
import signal
import sys
import time
from types import FrameType
from typing import Any

DAY_S = 86_400
SUSPEND_NS = 15_000_000_000


def main() -> None:
    command = sys.argv[sys.argv.index("--") + 1 :]
    clock: Any = importlib.import_module("superfluid_core.clock").SystemClock
    real_time, real_boot_ns = time.time, clock.boot_ns
    turned = {"wall_s": 0, "boot_ns": 0}
    days = itertools.cycle((DAY_S, -DAY_S))

    def turn_wall(number: int, frame: FrameType | None) -> None:
        turned["wall_s"] = next(days)

    def suspend(number: int, frame: FrameType | None) -> None:
        turned["boot_ns"] += SUSPEND_NS

    time.time = lambda: real_time() + turned["wall_s"]
    clock.boot_ns = lambda self: real_boot_ns(self) + turned["boot_ns"]
    signal.signal(signal.SIGUSR1, turn_wall)
    signal.signal(signal.SIGUSR2, suspend)
    is_node = command[0].endswith("superfluid-noded")
    program = importlib.import_module("superfluid_noded.cli" if is_node else "superfluid_head.cli")
    sys.argv = command
    program.main()


if __name__ == "__main__":
    main()
