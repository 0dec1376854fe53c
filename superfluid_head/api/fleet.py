"""The fleet routes, for admins: how it stands, what happens in it, why a request ran where it did, drain and undrain.

Owns what of the fleet is shown and how its events are framed; decides nothing about nodes. An event's id is the head's start
and the event's number, so a reader that comes back to another process of this head gets all that is kept there, not nothing.
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from superfluid_core.clock import MS, SECOND
from superfluid_core.errors import InvalidRequestError
from superfluid_head.access.keys import Principal
from superfluid_head.api.body import read_object
from superfluid_head.api.console import (
    IS_SHARE,
    JOIN,
    POINTS_AGAIN,
    WITH_ALL_SLOTS,
    Join,
    fleet_state,
    share_state,
    watched_state,
    whole_state,
)
from superfluid_head.api.errors import ApiError, invalid, require_admin
from superfluid_head.api.schemas.common import BodyModel, Int, read_model
from superfluid_head.api.sse import EventStream, StreamingReply, event, named_event
from superfluid_head.api.state import Head
from superfluid_head.fleet.chronicle import FleetEvent, PlacementRecord
from superfluid_head.vitals import SLOTS_MAX

GRACE_MS_MAX = 86_400_000
STOP_POLL_S = 0.5
EVERY_MS_MIN, EVERY_MS_MAX = 250, 60_000
LISTENING = b": listening\n\n"

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
        since = self._since(request)
        around = request.scope["state"]
        watch = _Watch(self._head, around["principal"], _every_ms(request), around.get(JOIN))

        async def produce(stream: EventStream) -> None:
            await self._tell(stream, since, watch)

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

    async def _tell(self, stream: EventStream, since: int | None, watch: _Watch) -> None:
        inflight = self._head.inflight
        with self._head.fleet.events(since=since) as listener:
            await stream.put(LISTENING)
            events = aiter(listener)
            while not (inflight.is_draining and inflight.count == 0):
                if watch.is_due:
                    await stream.put(await watch.framed())
                try:
                    async with asyncio.timeout(min(STOP_POLL_S, watch.wait_s)):
                        found = await anext(events)
                except TimeoutError:
                    continue
                await stream.put(self._framed(found))

    def _framed(self, found: FleetEvent) -> bytes:
        name = f"id: {self._head.created_s}-{found.sequence}\nevent: {found.kind}\n"
        shown = {
            "sequence": found.sequence,
            "at": found.at_s,
            "kind": found.kind,
            **found.fields,
        }
        return name.encode("ascii") + event(shown)

    def _since(self, request: Request) -> int | None:
        """Return after which event to begin: what the reader saw last, or what the query says; None is from now on."""
        seen = request.headers.get("last-event-id", "")
        text = seen or request.query_params.get("since", "")
        if not text:
            return None
        matched = _NUMBER.fullmatch(text)
        if matched is None:
            raise invalid("since is no number of an event", param="since", code="invalid_type")
        start, number = matched.groups()
        is_of_another = start is not None and int(start) != self._head.created_s
        return 0 if is_of_another else int(number)


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
