"""The lanes that drew in the last step, in parallel: the next step is mostly the same, and most ids only make a context longer.

A step's ids are kept as one row and written into the records later, many rows at once: when a lane reaches its `due` or a stop
id, when it leaves, and when the tick ends. So a step costs next to nothing for each of its lanes.

    rows        ids of the steps since the last `write`; place i of each is of sessions[i], and void before it joined
    written[i]  the step up to which sessions[i] has them
    dues[i]     the step in which its context reaches `due`

With a plan in flight `context` and `computed` of a session here lag by the same rows: who reads them calls `write` first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from superfluid_core.scheduler.plan import Indices
from superfluid_core.scheduler.records import Phase, Session
from superfluid_core.session import SessionKey


class Column:
    """Owns what decoding sessions have drawn until it is written. `keys` and `_bases` are handed out, hence never changed in place."""

    __slots__ = (
        "_bases",
        "_dues",
        "_lanes",
        "_meters",
        "_next_due",
        "_rows",
        "_steps",
        "_stops",
        "_written",
        "keys",
        "lanes",
        "sessions",
    )

    def __init__(self) -> None:
        # the lanes of the last step as the engine named them, None when the next ones may be others
        self.lanes: Sequence[int] | None = None
        self.sessions: list[Session] = []
        self.keys: list[SessionKey] = []
        self._bases: list[int] = []
        self._lanes: list[int] = []
        self._rows: list[Sequence[int]] = []
        self._written: list[int] = []
        self._dues: list[int] = []
        # of each tenant here its meter and how many draw, by the meter's identity
        self._meters: dict[int, tuple[list[int], int]] = {}
        self._steps = 0
        self._next_due = 0
        self._stops: frozenset[int] = frozenset()

    @property
    def indices(self) -> Indices:
        """Output indices of the ids that were added last."""
        return Indices(self._bases, self._steps)

    def align(self, lanes: Sequence[int], here: Mapping[int, Session]) -> None:
        """Hold exactly those of `lanes` that are still here. `lanes` stays None when that is not all of them."""
        known = self._lanes
        count = len(known)
        wanted = list(lanes)
        if wanted[:count] != known or not here.keys() >= set(wanted[count:]):
            wanted = [lane for lane in lanes if lane in here]
            if wanted[:count] != known:
                self.write()
                self.clear()
        joining = wanted[len(self._lanes) :]
        if joining:
            self._join([here[lane] for lane in joining])
        self._lanes = wanted
        self.lanes = lanes if len(wanted) == len(lanes) else None

    def add(self, ids: Sequence[int]) -> list[tuple[Session, int]]:
        """Take the ids of a step, one a session; returns whose means more than a token. For those everything is written."""
        self._rows.append(ids)
        self._steps = steps = self._steps + 1
        for meter, count in self._meters.values():
            meter[1] += count
        stops = self._stops
        if stops and not stops.isdisjoint(ids):
            dues = zip(self._dues, self.sessions, ids, strict=True)
            places = [
                place
                for place, (due, session, token) in enumerate(dues)
                if due == steps or token in session.spec.stop_ids
            ]
        elif steps != self._next_due:
            return []
        else:
            places = _places(self._dues, steps)
        return [(self._write_one(place), ids[place]) for place in places]

    def judge(self, sessions: Sequence[tuple[Session, int]]) -> None:
        """Take the new `due` of those that `add` returned and that have not left."""
        steps = self._steps
        for session, _ in sessions:
            if session.phase is Phase.DECODING:
                place = self.sessions.index(session)
                self._dues[place] = max(steps + 1, steps + session.due - len(session.context))
        self._next_due = min(self._dues, default=0)

    def write(self) -> None:
        """Write everything that was drawn into the records."""
        rows = self._rows
        if not rows:
            return
        steps = self._steps
        first = steps - len(rows)
        drawn = zip(*rows, strict=True)
        for session, tokens, written in zip(self.sessions, drawn, self._written, strict=True):
            context = session.context
            context += tokens if written <= first else tokens[written - first :]
            session.computed = len(context) - 1
        self._rows = []
        self._written = [steps] * len(self.sessions)

    def remove(self, session: Session) -> None:
        """Let a session go that leaves its lane, with everything written."""
        if session not in self.sessions:
            return
        place = self.sessions.index(session)
        self._write_one(place)
        after = place + 1
        self.lanes = None
        self.keys = self.keys[:place] + self.keys[after:]
        self._bases = self._bases[:place] + self._bases[after:]
        self._rows = [[*row[:place], *row[after:]] for row in self._rows]
        for column in (self.sessions, self._lanes, self._written, self._dues):
            del column[place]
        self._next_due = min(self._dues, default=0)
        self._meter(session, -1)

    def clear(self) -> None:
        """Start anew, for other lanes draw next. Everything has been written."""
        assert not self._rows, "ids that nobody has written"
        self.lanes = None
        self.sessions, self.keys, self._bases = [], [], []
        self._lanes, self._written, self._dues = [], [], []
        self._meters = {}
        self._stops = frozenset()

    def _write_one(self, place: int) -> Session:
        session, rows, steps = self.sessions[place], self._rows, self._steps
        missing = steps - self._written[place]
        if missing:
            fresh = [row[place] for row in rows[-missing:]]
            session.context += fresh
            session.computed += missing
            self._written[place] = steps
        return session

    def _join(self, sessions: Sequence[Session]) -> None:
        """Append sessions that draw from this step on. Who still prefills draws his first: he is due at once."""
        steps = self._steps
        after = steps + 1
        unknown = [0] * len(sessions)
        self._rows = [[*row, *unknown] for row in self._rows]
        self.keys = [*self.keys, *[session.spec.key for session in sessions]]
        self._bases = [*self._bases, *[session.output - after for session in sessions]]
        for session in sessions:
            length = len(session.context)
            is_first = session.phase is Phase.PREFILLING
            assert not is_first or session.computed == length, "drawn from a part of the context"
            self.sessions.append(session)
            self._written.append(steps)
            self._dues.append(max(after, steps + session.due - length))
            if session.spec.stop_ids:
                self._stops |= session.spec.stop_ids
            self._meter(session, 1)
        self._next_due = min(self._dues, default=0)

    def _meter(self, session: Session, change: int) -> None:
        meter = session.meter
        _, count = self._meters.get(id(meter), (meter, 0))
        if count + change:
            self._meters[id(meter)] = (meter, count + change)
        else:
            del self._meters[id(meter)]


def _places(dues: Sequence[int], step: int) -> list[int]:
    """Where a step is due."""
    places = [dues.index(step)]
    for _ in range(dues.count(step) - 1):
        places.append(dues.index(step, places[-1] + 1))
    return places
