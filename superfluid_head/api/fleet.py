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

from superfluid_core.errors import InvalidRequestError
from superfluid_head.api.body import read_object
from superfluid_head.api.errors import ApiError, invalid, require_admin
from superfluid_head.api.schemas.common import BodyModel, Int, read_model
from superfluid_head.api.sse import EventStream, StreamingReply, event
from superfluid_head.api.state import Head
from superfluid_head.fleet.chronicle import FleetEvent, PlacementRecord

GRACE_MS_MAX = 86_400_000
STOP_POLL_S = 0.5
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
        _judge(request)
        return JSONResponse({"object": "fleet", **self._head.fleet.snapshot()})

    async def events(self, request: Request) -> Response:
        """Stream what happens until the reader leaves or the head has stopped serving."""
        _judge(request)
        since = self._since(request)

        async def produce(stream: EventStream) -> None:
            await self._tell(stream, since)

        return StreamingReply(produce, self._head.limits)

    async def why(self, request: Request) -> Response:
        _judge(request)
        name = request.path_params["request"]
        records = self._head.fleet.why(name)
        if not records:
            words = "no placement of such a request is remembered"
            raise ApiError(404, words, code="request_not_found")
        placements = [_placement(record) for record in records]
        return JSONResponse({"object": "fleet.request", "id": name, "placements": placements})

    async def drain(self, request: Request) -> Response:
        _judge(request)
        body = await read_object(request, self._head.limits) if _has_body(request) else {}
        grace_ms = read_model(DrainRequest, body).grace_ms
        return self._set_drained(request.path_params["node"], grace_ms, is_drained=True)

    async def undrain(self, request: Request) -> Response:
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

    async def _tell(self, stream: EventStream, since: int | None) -> None:
        inflight = self._head.inflight
        with self._head.fleet.events(since=since) as listener:
            await stream.put(LISTENING)
            events = aiter(listener)
            while not (inflight.is_draining and inflight.count == 0):
                try:
                    async with asyncio.timeout(STOP_POLL_S):
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
