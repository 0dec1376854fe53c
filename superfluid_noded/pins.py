"""Which cached prefix blocks heads want kept, for how long, and within which share of the pool. Pure.

A pin is a wish of one head for one block name until a time; a block stays pinned while any head wishes so. Only blocks that
are in the cache can be pinned, and never more than the budget: what is beyond it is refused and counted, the front of a
prefix first served. Eviction may still take a pinned block when nothing else is left; such a pin is found void when the
budget is next needed, or when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

MS_NS = 1_000_000
TTL_MS_MAX = 7 * 86_400_000
_SLACK = 64


class Cache(Protocol):
    """What a scheduler does for pins."""

    def pin_prefix(self, name: bytes, *, pinned: bool) -> bool: ...

    def prefix_names(self) -> list[bytes]: ...


class Pins:
    """All pins of one scheduler's cache. `budget` is the most blocks; times are monotonic nanoseconds."""

    def __init__(self, cache: Cache, budget: int) -> None:
        self.budget = budget
        self.refused = 0
        self._cache = cache
        self._wishes: dict[bytes, dict[str, int]] = {}
        self._count = 0
        self._ends: list[tuple[int, str, bytes]] = []

    @property
    def blocks(self) -> int:
        return len(self._wishes)

    def pin(self, head: str, names: Sequence[bytes], ttl_ms: int, now_ns: int) -> int:
        """Keep these blocks for `ttl_ms`; returns how many are. A chain ends at its first block that is not here."""
        self.expire(now_ns)
        until_ns = now_ns + min(ttl_ms, TTL_MS_MAX) * MS_NS
        for count, name in enumerate(names):
            if not self._keep(head, name, until_ns):
                self.refused += len(names) - count
                return count
        return len(names)

    def unpin(self, head: str, names: Sequence[bytes]) -> None:
        """Forget the wishes of `head` for these blocks."""
        for name in names:
            self._drop(head, name)

    def expire(self, now_ns: int) -> None:
        """Let go of what has been kept for long enough."""
        while self._ends and self._ends[0][0] <= now_ns:
            until_ns, head, name = heappop(self._ends)
            if self._wishes.get(name, {}).get(head) == until_ns:
                self._drop(head, name)

    def seconds_to_next_end(self, now_ns: int) -> int:
        """Whole seconds until a pin ends; 0 when there is none."""
        return 0 if not self._ends else max(1, -(-(self._ends[0][0] - now_ns) // (1000 * MS_NS)))

    def _keep(self, head: str, name: bytes, until_ns: int) -> bool:
        known = self._wishes.get(name)
        if known is None:
            if len(self._wishes) >= self.budget:
                self._forget_evicted()
            if len(self._wishes) >= self.budget:
                return False
        if not self._cache.pin_prefix(name, pinned=True):
            self._forget(name)
            return False
        heads = self._wishes.setdefault(name, {})
        self._count += head not in heads
        heads[head] = until_ns
        heappush(self._ends, (until_ns, head, name))
        if len(self._ends) > 2 * self._count + _SLACK:
            self._ends = [
                (end_ns, who, which)
                for which, heads in self._wishes.items()
                for who, end_ns in heads.items()
            ]
            heapify(self._ends)
        return True

    def _drop(self, head: str, name: bytes) -> None:
        heads = self._wishes.get(name)
        if heads is None or heads.pop(head, None) is None:
            return
        self._count -= 1
        if not heads:
            del self._wishes[name]
            self._cache.pin_prefix(name, pinned=False)

    def _forget_evicted(self) -> None:
        """Make room by what memory pressure has taken meanwhile; rare, so a full look is affordable."""
        here = set(self._cache.prefix_names())
        for name in [name for name in self._wishes if name not in here]:
            self._forget(name)

    def _forget(self, name: bytes) -> None:
        self._count -= len(self._wishes.pop(name, ()))


def pins_figures(pins: Pins, now_ns: int) -> dict[str, int]:
    """Tell of one cache's pins what heads want to know."""
    return {
        "blocks": pins.blocks,
        "budget_blocks": pins.budget,
        "refused_blocks": pins.refused,
        "seconds_to_next_end": pins.seconds_to_next_end(now_ns),
    }
