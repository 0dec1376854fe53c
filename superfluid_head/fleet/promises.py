"""Contexts that nodes are computing: what will be cached there before any report can say so.

A burst of agents that begin with one document is placed before the first of them has computed a block of it. The node that
was given the first one is as good as warm for the others: it computes the document once and shares it. So the names of a context
are kept from its placement until the node has reported after its first token, or the placement ended.

All chats of a fleet may begin alike, so contexts are not compared one by one. They form a tree, whose branches part where
contexts do and know the engines of what lies on them:

    a document, on n0 n1 n2 +- a question, on n0
                            +- a question, on n1 n2

Names are chained, so two contexts have the same first k blocks if the k-th names are equal, and bisection finds where one leaves
a branch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

# Where more than one branch for so many engines parts, all of them are looked up rather than each branch.
MANY = 8


@dataclass(slots=True)
class _Branch:
    """Blocks `start` to `end` of `chain`. Counted by engine: `engines` all contexts that have them, `ends` those that have no more."""

    chain: Sequence[bytes] = ()
    start: int = 0
    end: int = 0
    below: _Branch | None = field(default=None, repr=False, compare=False)
    engines: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    branches: dict[bytes, _Branch] = field(default_factory=dict)

    def shared(self, chain: Sequence[bytes]) -> int:
        """Count the leading blocks that `chain` shares with this branch, whose first it has."""
        places = range(self.start + 1, min(self.end, len(chain)))
        left = bisect_left(places, True, key=lambda place: self.chain[place] != chain[place])
        return self.start + 1 + left

    def split(self, place: int) -> _Branch:
        """Let this branch begin at `place`; returns the one before it, which is new."""
        assert self.below is not None, "the root has no blocks to split"
        before = _Branch(self.chain, self.start, place, self.below, dict(self.engines))
        before.branches[self.chain[place]] = self
        self.below.branches[self.chain[self.start]] = before
        self.start, self.below = place, before
        return before

    def leaving(self, towards: _Branch) -> Iterable[dict[str, int]]:
        """Tell the engines of what goes on elsewhere than `towards`, or at least these: where much parts, all that is here."""
        if len(self.branches) * MANY > len(self.engines):
            return (self.engines,)
        return (
            self.ends,
            *(each.engines for each in self.branches.values() if each is not towards),
        )

    def prune(self) -> None:
        """Remove this branch when nothing lies on it, and join it to its only one when nothing parts or ends here."""
        if self.below is None:
            return
        key = self.chain[self.start]
        if not self.engines:
            del self.below.branches[key]
        elif not self.ends and len(self.branches) == 1:
            (only,) = self.branches.values()
            only.start, only.below = self.start, self.below
            self.below.branches[key] = only


@dataclass(slots=True, eq=False)
class Promise:
    """One context on one engine, as it was when it was placed: at least one block.

    Follows the placement: at its first token the context is computed, and the engine's next report covers it.
    """

    engine: str
    book: Promises = field(repr=False)
    branch: _Branch | None = field(repr=False)

    def started(self) -> None:
        self.book.computed(self)

    def released(self) -> None:
        self.book.withdraw(self)


@dataclass(slots=True)
class Promises:
    """All that is being computed. Bounded by the sessions that are placed: each adds two branches at most."""

    _root: _Branch = field(default_factory=_Branch)
    _computed: dict[str, dict[Promise, None]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(self._root.engines.values())

    def add(self, engine: str, chain: Sequence[bytes]) -> Promise:
        """Expect the blocks that `chain` names now. Its owner may append to it."""
        branch, count = self._root, len(chain)
        branch.engines[engine] = branch.engines.get(engine, 0) + 1
        while branch.end < count:
            name = chain[branch.end]
            child = branch.branches.get(name)
            if child is None:
                child = branch.branches[name] = _Branch(chain, branch.end, count, branch)
            place = child.shared(chain)
            branch = child if place == child.end else child.split(place)
            branch.engines[engine] = branch.engines.get(engine, 0) + 1
        branch.ends[engine] = branch.ends.get(engine, 0) + 1
        return Promise(engine, self, branch)

    def computed(self, promise: Promise) -> None:
        """Keep a context no longer than to its engine's next report."""
        self._computed.setdefault(promise.engine, {})[promise] = None

    def reported(self, engine: str) -> None:
        """Note a report of `engine`: it covers what was computed by now."""
        for promise in list(self._computed.get(engine, ())):
            self.withdraw(promise)

    def withdraw(self, promise: Promise) -> None:
        """Forget a context. Harmless when that was done before."""
        engine = promise.engine
        computed = self._computed.get(engine, {})
        computed.pop(promise, None)
        if not computed:
            self._computed.pop(engine, None)
        branch, promise.branch = promise.branch, None
        if branch is not None:
            _count_down(branch.ends, engine)
        while branch is not None:
            _count_down(branch.engines, engine)
            below = branch.below
            branch.prune()
            branch = below

    def depths(self, chain: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of `chain` are being computed on each engine, at most; those with none are left out."""
        found: dict[str, int] = {}
        branch, place = self._root, 0
        while place < len(chain):
            child = branch.branches.get(chain[place])
            if child is None:
                break
            if place:
                for engines in branch.leaving(child):
                    found.update(dict.fromkeys(engines, place))
            branch, place = child, child.shared(chain)
            if place < child.end:
                break
        if place:
            found.update(dict.fromkeys(branch.engines, place))
        return found


def _count_down(counts: dict[str, int], engine: str) -> None:
    counts[engine] -= 1
    if not counts[engine]:
        del counts[engine]
