"""Contexts that nodes are computing: what will be cached there before any report can say so.

A burst of agents that begin with one document is placed before the first of them has computed a block of it. The node that
was given the first one is as good as warm for the others: it computes the document once and shares it. So the names of a context
are kept from its placement until the node has reported after its first token, or the placement ended.

Names are chained, so two contexts have the same first k blocks if the k-th names are equal, and bisection finds the last of them.
Only contexts with the same first block are compared, and of those on one engine only the latest few.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

COMPARED_MAX = 4


@dataclass(slots=True, eq=False)
class Promise:
    """One context on one engine. `chain` are its blocks' names, at least one; whoever owns the list may append to it.

    Follows the placement: at its first token the context is computed, and the engine's next report covers it.
    """

    engine: str
    chain: Sequence[bytes]
    book: Promises = field(repr=False)

    def started(self) -> None:
        self.book.computed(self)

    def released(self) -> None:
        self.book.withdraw(self)


@dataclass(slots=True)
class Promises:
    """All that is being computed, by first block and by engine. Bounded by the sessions that are placed."""

    _by_first: dict[bytes, dict[str, dict[Promise, None]]] = field(default_factory=dict)
    _computed: dict[str, dict[Promise, None]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(len(each) for engines in self._by_first.values() for each in engines.values())

    def add(self, engine: str, chain: Sequence[bytes]) -> Promise:
        promise = Promise(engine, chain, self)
        engines = self._by_first.setdefault(chain[0], {})
        engines.setdefault(engine, {})[promise] = None
        return promise

    def computed(self, promise: Promise) -> None:
        """Keep a context no longer than to its engine's next report."""
        self._computed.setdefault(promise.engine, {})[promise] = None

    def reported(self, engine: str) -> None:
        """Note a report of `engine`: it covers what was computed by now."""
        for promise in list(self._computed.get(engine, ())):
            self.withdraw(promise)

    def withdraw(self, promise: Promise) -> None:
        """Forget a context. Harmless when that was done before."""
        first, engine = promise.chain[0], promise.engine
        computed = self._computed.get(engine, {})
        computed.pop(promise, None)
        if not computed:
            self._computed.pop(engine, None)
        engines = self._by_first.get(first, {})
        held = engines.get(engine, {})
        held.pop(promise, None)
        if not held:
            engines.pop(engine, None)
        if not engines:
            self._by_first.pop(first, None)

    def depths(self, chain: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of `chain` are being computed on each engine, at most; those with none are left out."""
        engines = self._by_first.get(chain[0], {}) if chain else {}
        return {
            engine: max(_common(each.chain, chain) for each in islice(reversed(held), COMPARED_MAX))
            for engine, held in engines.items()
        }


def _common(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    """Count the leading blocks that two contexts share."""
    longest = range(min(len(left), len(right)))
    return bisect_left(longest, True, key=lambda place: left[place] != right[place])
