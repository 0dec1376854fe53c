"""Nodes that can take a request, kept so that the best one is found without looking at all of them.

A shelf holds positions (places in the fleet's order) and answers one question: which have the least score, and which are
as good as that (`TIE`). Three kinds, one a policy. Sessions in progress and turns are plain ordered structures. Seconds are

    backlog + uncached * per_prompt + output * per_output

whose order depends on the request, so no single order will do. Nodes with nearly equal rates share a bin, sorted by
backlog: no node of a bin beats its least backlog under its least rates, so most bins are ruled out by one comparison and
the rest are read only up to where nothing better can follow. Nodes with equal figures, such as idle ones, are one entry.
Bounds are computed in the order of operations of the scores themselves: rounding keeps them below.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from math import log2
from typing import NamedTuple, Protocol

from superfluid_core.placement.estimate import Figures

TIE = 1e-6
# Bins are a sixteenth of an octave wide in either rate: 4 %.
BINS_PER_OCTAVE = 16
NO_RATE = -(1 << 20)


class Query(NamedTuple):
    """What of a request and of the fleet decides scores."""

    uncached: int
    output: int
    turn: int
    nodes: int


class Entry(NamedTuple):
    """What a shelf is told of a node."""

    position: int
    figures: Figures
    in_progress: int


@dataclass(slots=True)
class Found:
    """The best so far, and everything that was as good when it was seen."""

    least: float = float("inf")
    limit: float = float("inf")
    rows: list[tuple[float, list[int]]] = field(default_factory=list)

    def offer(self, score: float, positions: list[int]) -> None:
        if score > self.limit:
            return
        if score < self.least:
            self.least = score
            self.limit = score + TIE * max(1.0, score)
        self.rows.append((score, positions))

    def ties(self, hits: set[int]) -> list[int]:
        """Positions with the best score, in order; those in `hits` count by their own row only (of one position)."""
        best = [positions for score, positions in self.rows if score <= self.limit]
        if len(best) == 1:
            (only,) = best
            return only if not hits or len(only) == 1 else [p for p in only if p not in hits]
        merged: set[int] = set()
        for positions in best:
            merged.update(positions)
        return sorted(merged)


class Shelf(Protocol):
    """Adding and removing take the same entry."""

    def __len__(self) -> int: ...

    def add(self, entry: Entry) -> None: ...

    def remove(self, entry: Entry) -> None: ...

    def search(self, query: Query, found: Found) -> None:
        """Offer the best of this shelf, and all that ties with it."""


class _Bin:
    """Nodes of nearly the same rates, sorted by backlog. `per_*` are lower bounds of what is here, `least` is the first backlog."""

    __slots__ = ("groups", "key", "least", "order", "per_output", "per_prompt")

    def __init__(self, key: tuple[int, int], part: Figures) -> None:
        self.key = key
        self.least = part.backlog
        self.order: list[Figures] = []
        self.groups: dict[Figures, list[int]] = {}
        self.per_prompt = part.per_prompt
        self.per_output = part.per_output

    def add(self, part: Figures, position: int) -> None:
        group = self.groups.get(part)
        if group is not None:
            insort(group, position)
            return
        self.groups[part] = [position]
        insort(self.order, part)
        backlog, per_prompt, _, _, per_output = part
        if backlog < self.least:
            self.least = backlog
        if per_prompt < self.per_prompt:
            self.per_prompt = per_prompt
        if per_output < self.per_output:
            self.per_output = per_output

    def remove(self, part: Figures, position: int) -> None:
        group = self.groups[part]
        del group[bisect_left(group, position)]
        if not group:
            del self.groups[part]
            del self.order[bisect_left(self.order, part)]
            if self.order:
                self.least = self.order[0][0]


class SecondsShelf:
    """For load-aware."""

    def __init__(self) -> None:
        self._bins: dict[tuple[int, int], _Bin] = {}
        # who lies where, by position
        self._places: dict[int, _Bin] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, entry: Entry) -> None:
        position, part, _ = entry
        key = _bin_key(part)
        found = self._bins.get(key)
        if found is None:
            found = self._bins[key] = _Bin(key, part)
        found.add(part, position)
        self._places[position] = found

    def remove(self, entry: Entry) -> None:
        found = self._places.pop(entry.position)
        found.remove(entry.figures, entry.position)
        if not found.order:
            del self._bins[found.key]

    def search(self, query: Query, found: Found) -> None:
        uncached, output, _, _ = query
        bins = list(self._bins.values())
        bounds = [
            each.least + uncached * each.per_prompt + output * each.per_output for each in bins
        ]
        first = bounds.index(min(bounds))
        _scan(bins[first], uncached, output, found)
        limit = found.limit
        for place in [place for place, bound in enumerate(bounds) if bound <= limit]:
            if place != first and bounds[place] <= found.limit:
                _scan(bins[place], uncached, output, found)


def _bin_key(part: Figures) -> tuple[int, int]:
    per_output = part.per_output
    return (
        int(BINS_PER_OCTAVE * log2(part.per_prompt)),
        int(BINS_PER_OCTAVE * log2(per_output)) if per_output > 0.0 else NO_RATE,
    )


def _scan(found_in: _Bin, uncached: int, output: int, found: Found) -> None:
    # Every part here is `Figures.seconds`, written out: this is the one hot loop of placement.
    prompt_least = uncached * found_in.per_prompt
    output_least = output * found_in.per_output
    limit = found.limit
    for part in found_in.order:
        if part[0] + prompt_least + output_least > limit:
            return
        score = part[0] + uncached * part[1] + output * part[4]
        if score <= limit:
            found.offer(score, found_in.groups[part])
            limit = found.limit


class SessionsShelf:
    """For least-loaded: positions by the number of sessions in progress."""

    def __init__(self) -> None:
        self._groups: dict[int, list[int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, entry: Entry) -> None:
        insort(self._groups.setdefault(entry.in_progress, []), entry.position)
        self._count += 1

    def remove(self, entry: Entry) -> None:
        group = self._groups[entry.in_progress]
        del group[bisect_left(group, entry.position)]
        if not group:
            del self._groups[entry.in_progress]
        self._count -= 1

    def search(self, query: Query, found: Found) -> None:
        del query
        least = min(self._groups)
        found.offer(float(least), self._groups[least])


class TurnShelf:
    """For round-robin: positions in order; the score is the distance from the node whose turn it is."""

    def __init__(self) -> None:
        self._positions: list[int] = []

    def __len__(self) -> int:
        return len(self._positions)

    def add(self, entry: Entry) -> None:
        insort(self._positions, entry.position)

    def remove(self, entry: Entry) -> None:
        del self._positions[bisect_left(self._positions, entry.position)]

    def search(self, query: Query, found: Found) -> None:
        turn = query.turn % query.nodes
        place = bisect_left(self._positions, turn)
        position = self._positions[place if place < len(self._positions) else 0]
        found.offer(float((position - turn) % query.nodes), [position])
