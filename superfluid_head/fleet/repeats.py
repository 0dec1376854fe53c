"""What several workers tell of one thing: a node that comes up comes up for each of them. Pure.

Owns which events are about what all see, and when two workers mean the same: the same words, almost at the same time, and not both
by one worker, which means a second thing when it says so again. The nth time that one of them says so is the nth time of the others.
What is about a request happened at one worker alone. Bounded: the last REPEATS_KEPT_MAX things are remembered.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from superfluid_head.fleet.chronicle import EVENTS_KEPT_MAX, FleetEvent

APART_S_MAX = 15
"""Each worker hears a silent node, and reaches one that came back, when its own turn comes."""
REPEATS_KEPT_MAX = 2 * EVENTS_KEPT_MAX

_OF_ONE_READER = "missed"

Words = tuple[object, ...]


@dataclass(slots=True, eq=False)
class _Thing:
    """One thing that happened, and who has told it."""

    words: Words
    at_s: int
    workers: set[int]


class Repeats:
    """What one reader has been told, by all workers."""

    def __init__(self) -> None:
        self._things: dict[Words, list[_Thing]] = {}
        self._order: deque[_Thing] = deque()

    def is_one(self, event: FleetEvent, worker: int) -> bool:
        """Say whether another worker has told this, and remember that this one has."""
        if "request" in event.fields or event.kind == _OF_ONE_READER:
            return False
        words = (event.kind, *sorted(event.fields.items()))
        told = self._things.setdefault(words, [])
        for thing in told:
            if worker not in thing.workers and abs(event.at_s - thing.at_s) <= APART_S_MAX:
                thing.workers.add(worker)
                return True
        thing = _Thing(words, event.at_s, {worker})
        told.append(thing)
        self._order.append(thing)
        if len(self._order) > REPEATS_KEPT_MAX:
            self._forget(self._order.popleft())
        return False

    def _forget(self, thing: _Thing) -> None:
        told = self._things[thing.words]
        told.remove(thing)
        if not told:
            del self._things[thing.words]
