"""What happened in the fleet, told to whoever wants to know: the log, `why`, and `GET /v1/fleet/events`.

Everything is bounded: the placements of the last REQUESTS_KEPT_MAX requests, the last EVENTS_KEPT_MAX events, and as many for
each listener that does not read; what a slow listener missed is counted and told to it. Never content, only names and
figures. Scores are made readable when somebody asks for them, not on the way of a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from superfluid_core.clock import Clock
from superfluid_core.errors import CapacityError
from superfluid_core.logs import log
from superfluid_core.placement.policies import Choice, Compared, Score
from superfluid_head.fleet.events import GenerationRequest
from superfluid_head.fleet.observer import FleetObserver, Unobserved
from superfluid_head.fleet.transitions import Announce, Place

logger = logging.getLogger(__name__)

REQUESTS_KEPT_MAX = 1_024
RECORDS_KEPT_MAX = 32
EVENTS_KEPT_MAX = 512
LISTENERS_MAX = 64
SCORES_LOGGED_MAX = 4

Value = str | int | float | bool | None


class Titled(Protocol):
    """A node, as people call it."""

    @property
    def title(self) -> str: ...


class Origin(NamedTuple):
    """The worker whose event it is, and when that one started, in seconds of wall time."""

    worker: int
    started_s: int


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """One thing that happened. `sequence` has no gaps; `at_s` is wall time, for people. `origin` None: it happened here."""

    sequence: int
    at_s: int
    kind: str
    fields: Mapping[str, Value]
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """One placement of one choice, as `why` shows it. `first_ms` is the time from there to its first token, None until then."""

    choice: int
    epoch: int
    node: str
    reason: str
    policy: str
    waited_ms: int
    titles: Mapping[str, str] = field(repr=False)
    compared: Compared = field(repr=False)
    first_ms: int | None = None

    @property
    def scores(self) -> tuple[str, ...]:
        """What was compared, a line a node, best first."""
        scores = sorted(self.compared.scores(), key=_rank)
        return tuple(f"{self.titles.get(s.node, s.node)}: {_words(s)}" for s in scores)


def _rank(score: Score) -> tuple[bool, float]:
    return (score.score is None, score.score or 0.0)


def _words(score: Score) -> str:
    return score.fit if score.score is None else f"{score.score:.4f} {score.detail}".rstrip()


class Listener:
    """One reader of events, from number `after` on. Iterate; it never ends by itself."""

    def __init__(self, history: list[FleetEvent], after: int) -> None:
        self.after = after
        self._waiting: deque[FleetEvent] = deque(history)
        self._has_news = asyncio.Event()
        self._missed = 0

    def push(self, event: FleetEvent) -> None:
        if len(self._waiting) >= EVENTS_KEPT_MAX:
            self._waiting.popleft()
            self._missed += 1
        self._waiting.append(event)
        self._has_news.set()

    def __aiter__(self) -> AsyncIterator[FleetEvent]:
        return self

    async def __anext__(self) -> FleetEvent:
        while not self._waiting:
            self._has_news.clear()
            await self._has_news.wait()
        first = self._waiting[0]
        if self._missed:
            missed, self._missed = self._missed, 0
            told = {"events": missed}
            return FleetEvent(first.sequence - 1, first.at_s, "missed", told, first.origin)
        return self._waiting.popleft()


class Chronicle:
    """Owner of the records. Nodes are named by their keys here and by their titles outside."""

    def __init__(self, clock: Clock, titles: Mapping[str, Titled]) -> None:
        self._clock = clock
        self._nodes = titles
        self._records: OrderedDict[str, list[PlacementRecord]] = OrderedDict()
        self._events: deque[FleetEvent] = deque(maxlen=EVENTS_KEPT_MAX)
        self._listeners: dict[int, Listener] = {}
        self._sequence = 0
        self._listened = 0
        self.observer: FleetObserver = Unobserved()

    # --- events -----------------------------------------------------------------------------------

    def tell(self, kind: str, **fields: Value) -> None:
        """Broadcast an event. Never waits."""
        self._sequence += 1
        event = FleetEvent(self._sequence, self._clock.wall_s(), kind, fields)
        self._events.append(event)
        for listener in self._listeners.values():
            listener.push(event)

    def recent(self) -> list[FleetEvent]:
        """Return the events that are kept, oldest first."""
        return list(self._events)

    @contextmanager
    def listen(self, *, since: int | None = None) -> Iterator[Listener]:
        """Hear events from now on, and before that those after number `since` that are kept. Raises CapacityError."""
        if len(self._listeners) >= LISTENERS_MAX:
            raise CapacityError("too many listeners to fleet events")
        history = [] if since is None else [e for e in self._events if e.sequence > since]
        self._listened += 1
        after = self._sequence if since is None else since
        number, listener = self._listened, Listener(history, after)
        self._listeners[number] = listener
        try:
            yield listener
        finally:
            del self._listeners[number]

    # --- generations ------------------------------------------------------------------------------

    def placed(
        self, request: GenerationRequest, epoch: int, wanted: Place, choice: Choice, waited_ms: int
    ) -> PlacementRecord:
        """Keep what was compared, and say where it went."""
        title = self._nodes[choice.node].title
        names = [row[0] for row in choice.compared.rows]
        record = PlacementRecord(
            request.choice,
            epoch,
            title,
            wanted.reason,
            choice.policy.value,
            waited_ms,
            {name: self._nodes[name].title for name in names if name in self._nodes},
            choice.compared,
        )
        self._keep(request.request_id, record)
        self.observer.placed(title, record.policy, record.reason)
        what: dict[str, Value] = {
            "request": request.request_id,
            "choice": record.choice,
            "node": title,
            "reason": record.reason,
            "epoch": epoch,
            "waited_ms": waited_ms,
        }
        self.tell("placed", model=request.model, **what)
        if logger.isEnabledFor(logging.INFO):
            best = "; ".join(record.scores[:SCORES_LOGGED_MAX])
            log(logger, "info", "placed", **what, policy=record.policy, scores=best)
        return record

    def began(self, request: GenerationRequest, first_ms: int) -> None:
        """Note the first token of the choice's last placement."""
        records = self._records.get(request.request_id, [])
        for place in range(len(records) - 1, -1, -1):
            if records[place].choice == request.choice:
                records[place] = replace(records[place], first_ms=first_ms)
                return

    def moved(
        self,
        request: GenerationRequest,
        action: Announce,
        epoch: int,
        delivered: int,
        node: str | None,
    ) -> None:
        """Tell of a move that begins; `node` is the one that it leaves."""
        what: dict[str, Value] = {
            "request": request.request_id,
            "choice": request.choice,
            "moves": action.moves,
            "reason": action.reason,
            "epoch": epoch,
            "delivered": delivered,
            "node": node,
        }
        self.tell("moved", model=request.model, **what)
        log(logger, "warning", "moved", **what)

    def why(self, request_id: str) -> list[PlacementRecord]:
        return list(self._records.get(request_id, ()))

    def _keep(self, request_id: str, record: PlacementRecord) -> None:
        records = self._records.setdefault(request_id, [])
        records.append(record)
        del records[:-RECORDS_KEPT_MAX]
        while len(self._records) > REQUESTS_KEPT_MAX:
            self._records.popitem(last=False)
