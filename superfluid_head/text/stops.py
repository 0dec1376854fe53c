"""Where a text ends: stop strings matched across pieces, with the least possible hold-back.

Pure; knows text only, no tokens. Positions are characters of the whole text of one choice. The result depends on the
text alone, never on how it was cut into pieces: the match with the earliest *start* wins, ties go to the stop listed
first. So a complete match waits while a better one can still come true; at the end of the text it stands.

    text      a a a a [ held ........ ]
    released ---------^               ^--- length
"""

from __future__ import annotations

from typing import NamedTuple


class Match(NamedTuple):
    """A stop string found at `start`..`end` of the text; `order` is its place in the list."""

    start: int
    end: int
    order: int


class StopMatcher:
    """State of one choice: the held suffix of the text. `push` and `finish` mutate it."""

    __slots__ = ("_best", "_floor", "_held", "_longest", "_released", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = stops
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self._released = 0
        self._floor = 0
        self._best: Match | None = None

    @property
    def released(self) -> int:
        """How many leading characters can no longer belong to a stop string."""
        return self._released

    def push(self, text: str, *, armed: bool = True) -> Match | None:
        """Take more text and release what is certain; returns the match once it is final.

        A match that ends in text pushed with `armed` false does not count (min_tokens). After a match nothing more
        may be pushed.
        """
        self._held += text
        length = self._released + len(self._held)
        if not armed:
            self._floor = length
        if not self._stops:
            self._release(length)
            return None
        best = self._find()
        rival = self._rival(best)
        if best is not None and rival is None:
            self._release(best.start)
            return best
        self._best = best
        if rival is not None:
            self._release(rival)
        elif best is None:
            self._release(length)
        return None

    def finish(self) -> Match | None:
        """Complete the text: a match that waited stands, everything else is released."""
        best = self._best
        self._release(self._released + len(self._held) if best is None else best.start)
        return best

    def _release(self, position: int) -> None:
        self._held = self._held[position - self._released :]
        self._released = position

    def _find(self) -> Match | None:
        """Find the best complete match in the held text that ends beyond the floor."""
        best: Match | None = None
        for index, stop in enumerate(self._stops):
            first = max(0, self._floor + 1 - self._released - len(stop))
            at = self._held.find(stop, first)
            if at >= 0:
                start = self._released + at
                if best is None or start < best.start:
                    best = Match(start, start + len(stop), index)
        return best

    def _rival(self, best: Match | None) -> int | None:
        """Find the earliest position where a stop that would beat `best` may still come true."""
        held = self._held
        first = max(0, len(held) - self._longest + 1)
        last = len(held) if best is None else best.start - self._released + 1
        for at in range(first, last):
            for index, stop in enumerate(self._stops):
                size = len(held) - at
                if size >= len(stop) or not stop.startswith(held[at:]):
                    continue
                start = self._released + at
                if best is None or (start, index) < (best.start, best.order):
                    return start
        return None
