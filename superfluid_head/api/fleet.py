"""The fleet routes, for admins: how it stands, what happens in it, why a request ran where it did, drain and undrain.

Owns what of the fleet is shown and how its events are framed; decides nothing about nodes. An event's id is the head's start
and the event's number, so a reader that comes back to another process of this head gets all that is kept there, not nothing. Where
several workers serve, events of all are told, what all of them saw once, and an id says how far the reader has come with each
(`START-NUMBER,START-NUMBER`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from superfluid_core.clock import MS, SECOND
from superfluid_core.errors import InvalidRequestError, SuperfluidError
from superfluid_head.access.keys import Principal
from superfluid_head.api.body import read_object
from superfluid_head.api.console import (
    FOLLOW,
    IS_SHARE,
    JOIN,
    POINTS_AGAIN,
    WITH_ALL_SLOTS,
    Join,
    Others,
    fleet_state,
    share_state,
    watched_state,
    whole_state,
)
from superfluid_head.api.errors import ApiError, invalid, require_admin
from superfluid_head.api.schemas.common import BodyModel, Int, read_model
from superfluid_head.api.sse import EventStream, StreamingReply, event, named_event
from superfluid_head.api.state import Head
from superfluid_head.fleet.chronicle import FleetEvent, Listener, Origin, PlacementRecord
from superfluid_head.fleet.repeats import Repeats
from superfluid_head.vitals import SLOTS_MAX

GRACE_MS_MAX = 86_400_000
STOP_POLL_S = 0.5
EVERY_MS_MIN, EVERY_MS_MAX = 250, 60_000
LISTENING = b": listening\n\n"
FRAME = ("sequence", "at", "kind")
"""What every event tells; the rest are its fields."""

_NUMBER = re.compile(r"(?:([0-9]{1,15})-)?([0-9]{1,15})")


class DrainRequest(BodyModel):
    """The body of a drain; there may be none."""

    accepted: ClassVar[frozenset[str]] = frozenset()

    grace_ms: Annotated[Int, Field(ge=0, le=GRACE_MS_MAX)] | None = None


class FleetEndpoint:
    """The routes' handlers."""

    def __init__(self, head: Head) -> None:
        self._head = head

    async def state(self, request: Request) -> Response:
        """Show heads, nodes, links, queues and rates (admins)."""
        _judge(request)
        head, around = self._head, request.scope["state"]
        if around.get(IS_SHARE):
            slots = POINTS_AGAIN if request.url.query != WITH_ALL_SLOTS else SLOTS_MAX
            return JSONResponse(share_state(head, around["principal"], slots))
        return JSONResponse(await whole_state(head, fleet_state(head), around.get(JOIN)))

    async def events(self, request: Request) -> Response:
        """Stream what happens until the reader leaves or the head has stopped serving; with `every_ms` also how it stands."""
        _judge(request)
        around = request.scope["state"]
        place = _Place(self._head.created_s, around.get(FOLLOW), _seen(request))
        watch = _Watch(self._head, around["principal"], _every_ms(request), around.get(JOIN))

        async def produce(stream: EventStream) -> None:
            with self._head.fleet.events(since=place.since) as listener:
                place.note(place.number, place.id_of(listener.after))
                await stream.put(place.framed() if around.get(IS_SHARE) else LISTENING)
                await place.with_others(listener, self._tell(stream, listener, watch, place))

        return StreamingReply(produce, self._head.limits)

    async def why(self, request: Request) -> Response:
        """Tell where a request was placed, why there, and when it moved (admins)."""
        _judge(request)
        name = request.path_params["request"]
        records = self._head.fleet.why(name)
        if not records:
            words = "no placement of such a request is remembered"
            raise ApiError(404, words, code="request_not_found")
        placements = [_placement(record) for record in records]
        return JSONResponse({"object": "fleet.request", "id": name, "placements": placements})

    async def drain(self, request: Request) -> Response:
        """Move the sessions of a node away and give it nothing new (admins)."""
        _judge(request)
        body = await read_object(request, self._head.limits) if _has_body(request) else {}
        grace_ms = read_model(DrainRequest, body).grace_ms
        return self._set_drained(request.path_params["node"], grace_ms, is_drained=True)

    async def undrain(self, request: Request) -> Response:
        """Use a drained node again (admins)."""
        _judge(request)
        return self._set_drained(request.path_params["node"], None, is_drained=False)

    def _set_drained(self, node: str, grace_ms: int | None, *, is_drained: bool) -> Response:
        try:
            if is_drained:
                self._head.fleet.drain(node, grace_ms)
            else:
                self._head.fleet.undrain(node)
        except InvalidRequestError:
            raise ApiError(404, "no such node", code="node_not_found") from None
        return JSONResponse({"object": "fleet.node", "id": node, "is_drained": is_drained})

    async def _tell(
        self, stream: EventStream, listener: Listener, watch: _Watch, place: _Place
    ) -> None:
        inflight = self._head.inflight
        events = aiter(listener)
        while not (inflight.is_draining and inflight.count == 0):
            if watch.is_due:
                await stream.put(await watch.framed())
            try:
                async with asyncio.timeout(min(STOP_POLL_S, watch.wait_s)):
                    found = await anext(events)
            except TimeoutError:
                continue
            await stream.put(place.told(found))


def _seen(request: Request) -> list[str]:
    """Return after which events to begin, by worker: what the reader saw last, or what the query says; nothing is from now on."""
    seen = request.headers.get("last-event-id", "")
    text = seen or request.query_params.get("since", "")
    parts = text.split(",") if text else []
    if not all(map(_NUMBER.fullmatch, parts)):
        raise invalid("since is no number of an event", param="since", code="invalid_type")
    return parts


class _Place:
    """How far a reader has come with the events of every worker, which is the id of what it is told.

    A number without a start is meant for all; an id of another count of workers is of another head, of which nothing is known.
    """

    def __init__(self, started_s: int, others: Others | None, seen: list[str]) -> None:
        self._started_s = started_s
        self._others = others
        self.number = 0 if others is None else others.number
        count = 1 if others is None else others.count
        is_plain = len(seen) == 1 and "-" not in seen[0]
        if is_plain or len(seen) not in (0, count):
            seen = [seen[0] if is_plain else "0"] * count
        self._ids = dict(enumerate(seen))
        self._count = count
        self._repeats = Repeats()

    @property
    def since(self) -> int | None:
        """The number of this worker's own event after which to begin; None is from now on."""
        found = _NUMBER.fullmatch(self._ids.get(self.number, ""))
        if found is None:
            return None
        start, number = found.groups()
        is_of_another = start is not None and int(start) != self._started_s
        return 0 if is_of_another else int(number)

    def id_of(self, sequence: int, started_s: int | None = None) -> str:
        return f"{self._started_s if started_s is None else started_s}-{sequence}"

    def note(self, number: int, name: str) -> None:
        """Remember how far worker `number` has been told."""
        self._ids[number] = name

    def framed(self) -> bytes:
        """Frame an id alone, which tells where the reader stands."""
        ids = ",".join(self._ids.get(number, "0") for number in range(self._count))
        return f"id: {ids}\n\n".encode("ascii")

    def told(self, found: FleetEvent) -> bytes:
        """Frame an event, and remember that it was told; only its id if another worker told the same."""
        number, started_s = found.origin or (self.number, self._started_s)
        self.note(number, self.id_of(found.sequence, started_s))
        if self._others is not None and self._repeats.is_one(found, number):
            return self.framed()
        named = self.framed()[:-1] + f"event: {found.kind}\n".encode("ascii")
        shown = {"sequence": found.sequence, "at": found.at_s, "kind": found.kind, **found.fields}
        if self._others is not None:
            shown["worker"] = number
        return named + event(shown)

    async def with_others(self, listener: Listener, telling: Coroutine[Any, Any, None]) -> None:
        """Run `telling` while the events of the other workers, if there are any, come to `listener` too."""
        if self._others is None:
            await telling
            return

        def hear(number: int, name: str, data: dict[str, Any] | None) -> None:
            if data is None:
                self._ids.setdefault(number, name)
                return
            fields = {key: value for key, value in data.items() if key not in FRAME}
            origin = Origin(number, int(name.partition("-")[0]))
            listener.push(FleetEvent(data["sequence"], data["at"], data["kind"], fields, origin))

        failure: SuperfluidError | None = None
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self._others.follow(dict(self._ids), hear))
            try:
                await telling
            except SuperfluidError as error:  # which the group would wrap
                failure = error
            following.cancel()
        if failure is not None:
            raise failure


class _Watch:
    """When a reader is next told how the fleet stands. `every_ms` None: never."""

    def __init__(
        self, head: Head, principal: Principal, every_ms: int | None, join: Join | None
    ) -> None:
        self._head = head
        self._principal = principal
        self._join = join
        self._every_ns = None if every_ms is None else every_ms * MS
        self._due_ns = head.clock.now_ns()
        self._is_first = True

    @property
    def wait_s(self) -> float:
        if self._every_ns is None:
            return STOP_POLL_S
        return max(0.0, (self._due_ns - self._head.clock.now_ns()) / SECOND)

    @property
    def is_due(self) -> bool:
        return self._every_ns is not None and self._head.clock.now_ns() >= self._due_ns

    async def framed(self) -> bytes:
        """Tell it now, for all workers. It has no id: a reader that comes back is told anew anyway."""
        assert self._every_ns is not None, "nobody asked to be told"
        self._due_ns = self._head.clock.now_ns() + self._every_ns
        is_first, self._is_first = self._is_first, False
        own = watched_state(self._head, self._principal, is_first=is_first)
        points = SLOTS_MAX if is_first else POINTS_AGAIN
        return named_event("state", await whole_state(self._head, own, self._join, points))


def _every_ms(request: Request) -> int | None:
    """Return how often the reader wants to be told how the fleet stands. Raises ApiError."""
    text = request.query_params.get("every_ms", "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(EVERY_MS_MAX))):
        raise invalid(
            "every_ms is no number of milliseconds", param="every_ms", code="invalid_type"
        )
    every_ms = int(text)
    if not EVERY_MS_MIN <= every_ms <= EVERY_MS_MAX:
        raise invalid(f"every_ms: {EVERY_MS_MIN} to {EVERY_MS_MAX}", param="every_ms")
    return every_ms


def _judge(request: Request) -> None:
    require_admin(request.scope["state"]["principal"])


def _has_body(request: Request) -> bool:
    headers = request.headers
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip() != "0"


def _placement(record: PlacementRecord) -> dict[str, Any]:
    return {
        "choice": record.choice,
        "epoch": record.epoch,
        "node": record.node,
        "reason": record.reason,
        "policy": record.policy,
        "waited_ms": record.waited_ms,
        "first_ms": record.first_ms,
        "scores": list(record.scores),
    }
