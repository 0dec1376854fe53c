"""What the parent has counted, where every worker can read it: a page of memory that they share since they were forked.

The parent alone writes, whole numbers of eight bytes, so a reader sees an old figure or a new one and nothing between. It outlives any
worker; a worker that was started again reads the same as one that never ended.
"""

from __future__ import annotations

import mmap

DIED, HUNG = "died", "hung"
CAUSES = (DIED, HUNG)
"""Why a worker ended that nobody had told to."""


class Board:
    """How often workers ended unasked, by cause."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._ends = memoryview(self._page).cast("Q")

    def count(self, cause: str) -> None:
        """Count an end; the parent's alone."""
        self._ends[CAUSES.index(cause)] += 1

    def ends(self) -> dict[str, int]:
        return {cause: self._ends[n] for n, cause in enumerate(CAUSES)}
