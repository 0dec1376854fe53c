"""When Python's cyclic collector runs: while nobody is being served, where that can be helped.

A full collection looks at every object that has lived for a while, and everything waits for it: with two hundred streams it took
a head 50 to 130 ms, which is a pause in every one of them. So whatever lives when a process is ready is left out for good, young
objects are looked at in portions of a few milliseconds as ever, and a full collection waits for a moment without work. Under work
that never ends it is put off until so much has been made that its pause is the lesser evil.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

YOUNG_MAX = 2_000
"""Objects more made than freed until the youngest are looked at."""
MIDDLE_EVERY = 5
"""How many such looks until those that outlived them are looked at too: a portion."""
NEVER = 1_000_000_000
PORTIONS_IDLE = 2
PORTIONS_MAX = 100
"""Portions, each of up to YOUNG_MAX * MIDDLE_EVERY objects, until a full collection: in a quiet moment, and at any."""
LOOK_S = 1.0


class Collector:
    """Owns the collector's thresholds in a process that serves. `is_idle` says whether nobody is being served."""

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        self._is_idle = is_idle
        self._before = gc.get_threshold()
        self.collections = 0

    def begin(self) -> None:
        """Leave everything that lives now out of all collections to come; those go on from here."""
        gc.freeze()
        gc.set_threshold(YOUNG_MAX, MIDDLE_EVERY, NEVER)
        gc.enable()

    async def run(self) -> None:
        """Look every second whether a full collection is due; until cancelled, when all is as it was before `begin`."""
        was_idle = False
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                is_idle = self._is_idle()
                self.look(is_idle=is_idle and was_idle)
                was_idle = is_idle
        finally:
            gc.set_threshold(*self._before)
            gc.unfreeze()

    def look(self, *, is_idle: bool) -> None:
        """Collect fully if that is due."""
        portions = gc.get_count()[2]
        if portions >= (PORTIONS_IDLE if is_idle else PORTIONS_MAX):
            gc.collect()
            self.collections += 1
