"""The links to one node: which carries what. State and its upkeep; who dials and what is heard is `node.py`'s.

    current   takes new sessions; `--fleet-conns-per-node` of them stand, and sessions spread over them
    worn      current, but old or used enough to be replaced: a fresh link is on its way (make before break)
    retired   a fresh link took its place: its sessions finish there, or go on over another link after a grace; then it closes

One current link is the primary: figures, questions and reports of cached blocks travel on it. Reports are only believed from
a link that was followed from its first one (`is_warm`); a link that was promoted because the primary broke is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from superfluid_head.fleet.standing import Slot, Standing


class Links:
    """All links of one node that stand, oldest first."""

    def __init__(self) -> None:
        self.primary: Standing | None = None
        self._all: list[Standing] = []

    def __iter__(self) -> Iterator[Standing]:
        return iter(tuple(self._all))

    def __len__(self) -> int:
        return len(self._all)

    @property
    def current(self) -> list[Standing]:
        return [standing for standing in self._all if standing.retired_ns is None]

    @property
    def fresh(self) -> list[Standing]:
        """The current ones that nobody wants to replace."""
        return [standing for standing in self.current if not standing.is_worn]

    @property
    def is_warm(self) -> bool:
        """Whether a link that will last carries reports that are believed."""
        primary = self.primary
        return primary is not None and primary.is_warm and not primary.is_worn

    def add(self, standing: Standing, *, has_reports: bool) -> None:
        """Take a link in. It becomes the primary if there is none, or none whose reports will last."""
        standing.is_warm = has_reports and not self.is_warm
        if standing.is_warm or self.primary is None:
            self.primary = standing
        self._all.append(standing)

    def remove(self, standing: Standing) -> None:
        """Take it out; another current one becomes the primary if this was it."""
        if standing in self._all:
            self._all.remove(standing)
        if self.primary is standing:
            self.primary = next(iter(self.current), None)

    def find(self, number: int) -> Standing | None:
        return next((standing for standing in self._all if standing.number == number), None)

    def choose(self, slots: Iterable[Slot]) -> Standing | None:
        """Pick the current link with the fewest sessions: a fresh one that is heard before any other."""
        current = self.current
        if len(current) < 2:
            return current[0] if current else None
        counts = dict.fromkeys((standing.number for standing in current), 0)
        for slot in slots:
            if slot.link in counts:
                counts[slot.link] += 1
        return min(current, key=lambda s: (s.is_suspect, s.is_worn, counts[s.number], s.number))
