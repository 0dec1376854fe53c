"""Counts in buckets, for what is observed with every token: no lock, no label look-up, half a microsecond.

Owns the counts and nothing of names, labels or text: whoever exports them (head and node, each in its `metrics`) reads
`cumulative()` at scrape time. One thread only: observing and reading both happen on the event loop. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """How often a value was at most each bound. `total` is the sum of all values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Pair each bound, as the text format spells it, with how many values were at most that."""
        names = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return [(name, float(n)) for name, n in zip(names, accumulate(self.counts), strict=True)]
