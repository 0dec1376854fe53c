"""Percentiles of a stream of numbers in bounded memory: exact while they are few, then within 1 %.

The first values are kept as they are; beyond that they are counted in buckets whose width grows with the value (64 per
power of two). Percentiles are the nearest rank.
"""

from __future__ import annotations

import math

EXACT_MAX = 4_096
_BITS = 6


def _bucket(value: int) -> int:
    """Give buckets their order: the power of two, then the next six bits."""
    if value < 1 << _BITS:
        return max(0, value)
    shift = value.bit_length() - 1 - _BITS
    return ((shift + 1) << _BITS) + (value >> shift) - (1 << _BITS)


def _middle(bucket: int) -> int:
    if bucket < 1 << _BITS:
        return bucket
    shift = (bucket >> _BITS) - 1
    low = ((bucket & ((1 << _BITS) - 1)) + (1 << _BITS)) << shift
    return low + (1 << shift) // 2


class Distribution:
    """Whole numbers, mostly nanoseconds."""

    __slots__ = ("_buckets", "_values", "count", "largest", "smallest", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self.smallest = 0
        self.largest = 0
        self._values: list[int] | None = []
        self._buckets: dict[int, int] = {}

    def add(self, value: int, times: int = 1) -> None:
        if not self.count or value < self.smallest:
            self.smallest = value
        if value > self.largest:
            self.largest = value
        self.count += times
        self.total += value * times
        if self._values is None:
            self._count(value, times)
        elif len(self._values) + times <= EXACT_MAX:
            self._values.extend([value] * times)
        else:
            for each in self._values:
                self._count(each, 1)
            self._values = None
            self._count(value, times)

    def merge(self, other: Distribution) -> None:
        """Add all that `other` has seen."""
        if other._values is not None:
            for value in other._values:
                self.add(value)
            return
        for bucket, times in sorted(other._buckets.items()):
            self.add(_middle(bucket), times)
        self.total += other.total - sum(_middle(b) * n for b, n in other._buckets.items())
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)

    @property
    def is_exact(self) -> bool:
        return self._values is not None

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> int:
        """Return the nearest rank; 0 when nothing was added."""
        if not self.count:
            return 0
        rank = max(1, math.ceil(self.count * percent / 100))
        if self._values is not None:
            return sorted(self._values)[rank - 1]
        seen = 0
        for bucket, times in sorted(self._buckets.items()):
            seen += times
            if seen >= rank:
                return min(max(_middle(bucket), self.smallest), self.largest)
        return self.largest

    def _count(self, value: int, times: int) -> None:
        bucket = _bucket(value)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + times
