"""Makes a worker answer for all: an ASGI layer inside the gate, for the few routes that ask about a whole head.

Owns which routes those are, and how the other workers are asked (their side doors, the caller's own key, a deadline). A summed route
is answered from all that answer (the fleet's state, asked for or streamed, by its own endpoint, which is handed the way to the others, as is that of the events, which tells those of all); one that names a session, a stored response, a pinned prefix or a request is answered by whoever
has it; what is done to a node is done by every head. It knows what paths mean and nothing of how they are answered.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from superfluid_core.limits import HttpLimits, WorkerLimits
from superfluid_head.api.body import ClientGoneError, read_body
from superfluid_head.api.console import FOLLOW, IS_SHARE, JOIN, WITH_ALL_SLOTS, Hear, Others
from superfluid_head.api.errors import ApiError
from superfluid_head.api.gate import is_side_door
from superfluid_head.api.shapes import reply as shaped
from superfluid_head.vitals import SLOTS_MAX
from superfluid_head.workers import merge
from superfluid_head.workers.place import Place

PASSED_ON = ("authorization", "x-api-key", "content-type", "x-request-id")
SUMMED_PATHS = ("/metrics", "/scheduler/stats", "/v1/sessions")
STATE = "/v1/fleet"
EVENTS = "/v1/fleet/events"
JOINED_PATHS = (STATE, EVENTS)
OWNED = re.compile(
    r"/v1/(?:sessions/[^/]+(?:/qos)?|responses/[^/]+(?:/cancel|/input_items)?|prefixes/[^/]+|fleet/requests/.+)"
)
DONE_BY_ALL = re.compile(r"/v1/fleet/nodes/.+/(?:drain|undrain)")

HOST = "http://worker"

Merge = Callable[[dict[str, Any], Sequence[dict[str, Any]]], dict[str, Any]]
MERGES: dict[str, Merge] = {
    "/scheduler/stats": merge.schedulers,
    "/v1/sessions": merge.lists,
}


@dataclass(slots=True)
class Answered:
    """A whole answer, from here or from another worker."""

    status: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""

    @property
    def is_good(self) -> bool:
        return self.status == 200

    @property
    def is_nowhere(self) -> bool:
        return self.status == 404


class Siblings:
    """Wraps the application of one worker."""

    def __init__(self, app: ASGIApp, place: Place, limits: HttpLimits) -> None:
        self._app = app
        self._place = place
        self._door = str(place.door(place.number))
        self._limits = limits
        self._bounds = WorkerLimits()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_asked = is_side_door(scope, self._door)
        if scope["type"] == "http" and scope["path"] in JOINED_PATHS:
            around = scope.setdefault("state", {})
            around |= {IS_SHARE: True} if is_asked else self._joined(scope)
        answer = None if is_asked else self._way(scope)
        if answer is None:
            await self._app(scope, receive, send)
            return
        try:
            body = await read_body(Request(scope, receive), self._limits)
            found = await answer(scope, body)
        except ApiError as error:
            await shaped(error, scope)(scope, receive, send)
            return
        except ClientGoneError:
            return
        response = Response(found.body, found.status)
        kept = [pair for pair in found.headers if pair[0] != b"content-length"]
        response.raw_headers = [*kept, (b"content-length", str(len(found.body)).encode())]
        await response(scope, receive, send)

    def _joined(self, scope: Scope) -> dict[str, Any]:
        """Return the ways to the others that an endpoint is handed."""
        follow = partial(self._follow, scope)
        others = Others(self._place.number, self._place.count, follow)
        return {JOIN: partial(self._join, scope), FOLLOW: others}

    def _way(self, scope: Scope) -> Any:
        path, method = scope["path"], scope["method"]
        if method == "GET" and path in SUMMED_PATHS:
            return self._summed
        if method in ("GET", "POST", "DELETE") and OWNED.fullmatch(path):
            return self._owned
        return self._by_all if method == "POST" and DONE_BY_ALL.fullmatch(path) else None

    async def _summed(self, scope: Scope, body: bytes) -> Answered:
        own = await self._here(scope, body)
        if not own.is_good:
            return own
        others = [each for each in await self._everywhere(scope, body) if each.is_good]
        if scope["path"] == "/metrics":
            pages = [each.body.decode() for each in (own, *others)]
            text = await asyncio.to_thread(merge.metrics, pages)
            return Answered(own.status, own.headers, text.encode())
        told = [json.loads(each.body) for each in others]
        shown = MERGES[scope["path"]](json.loads(own.body), told)
        return Answered(own.status, own.headers, json.dumps(shown).encode())

    async def _join(self, scope: Scope, own: dict[str, Any]) -> dict[str, Any]:
        """Make one state of this worker's share and those of the others that answer; who follows a stream is not kept waiting."""
        points, bounds = own["share"]["points"], self._bounds
        query = WITH_ALL_SLOTS if points == SLOTS_MAX else ""
        ask_ms = bounds.watch_ask_ms if points else bounds.ask_ms
        asked = {**scope, "method": "GET", "path": STATE, "query_string": query.encode("ascii")}
        every = await self._everywhere(asked, b"", ask_ms)
        return merge.fleets(own, [json.loads(each.body) for each in every if each.is_good])

    async def _owned(self, scope: Scope, body: bytes) -> Answered:
        own = await self._here(scope, body)
        if not own.is_nowhere:
            return own
        for each in await self._everywhere(scope, body):
            if each.status and not each.is_nowhere:
                return each
        return own

    async def _by_all(self, scope: Scope, body: bytes) -> Answered:
        """Do it here, and if that is right, everywhere; a worker that fails to is told as an error."""
        own = await self._here(scope, body)
        if not own.is_good:
            return own
        failed = [each for each in await self._everywhere(scope, body) if not each.is_good]
        return failed[0] if failed and failed[0].status else own

    async def _here(self, scope: Scope, body: bytes) -> Answered:
        """Answer as this worker alone."""
        found, parts = Answered(), list[bytes]()
        has_body = True

        async def receive() -> Message:
            nonlocal has_body
            if has_body:
                has_body = False
                return {"type": "http.request", "body": body, "more_body": False}
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                found.status = message["status"]
                found.headers = tuple(message.get("headers", ()))
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        found.body = b"".join(parts)
        return found

    async def _everywhere(
        self, scope: Scope, body: bytes, ask_ms: int | None = None
    ) -> list[Answered]:
        """Ask all others; one that does not answer in time has the status 0."""
        ask_s = (ask_ms or self._bounds.ask_ms) / 1_000
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(self._there(number, scope, body, ask_s))
                for number in self._place.others()
            ]
        return [task.result() for task in asked]

    async def _there(self, number: int, scope: Scope, body: bytes, ask_s: float) -> Answered:
        headers = _passed_on(scope)
        query = scope.get("query_string", b"").decode("latin-1")
        url = HOST + scope["path"] + (f"?{query}" if query else "")
        try:
            async with asyncio.timeout(ask_s), self._client(number, ask_s) as client:
                came = await client.request(scope["method"], url, headers=headers, content=body)
        except (httpx.HTTPError, TimeoutError):
            return Answered()
        kept = (b"content-type", b"retry-after")
        found = [(name.lower(), value) for name, value in came.headers.raw]
        return Answered(
            came.status_code, tuple(pair for pair in found if pair[0] in kept), came.content
        )

    def _client(self, number: int, timeout_s: float) -> httpx.AsyncClient:
        """Make a client that goes by the door of worker `number`."""
        door = str(self._place.door(number))
        transport = httpx.AsyncHTTPTransport(uds=door, verify=False)  # no TLS, so no certificates
        return httpx.AsyncClient(transport=transport, timeout=timeout_s, trust_env=False)

    async def _follow(self, scope: Scope, ids: Mapping[int, str], hear: Hear) -> None:
        """Hear the events of all others until cancelled; one that is away is asked again and again."""
        async with asyncio.TaskGroup() as group:
            for number in self._place.others():
                group.create_task(self._follow_one(scope, number, ids.get(number, ""), hear))

    async def _follow_one(self, scope: Scope, number: int, last: str, hear: Hear) -> None:
        silent_s = 2 * self._limits.silence_ms / 1_000
        while True:
            headers = _passed_on(scope)
            if last:
                headers.append((b"last-event-id", last.encode("ascii")))
            with suppress(httpx.HTTPError):
                async with (
                    self._client(number, silent_s) as client,
                    client.stream("GET", HOST + EVENTS, headers=headers) as reply,
                ):
                    lines = reply.aiter_lines() if reply.status_code == httpx.codes.OK else None
                    async for name, data in _events(lines):
                        last = name
                        hear(number, name, data)
            await asyncio.sleep(self._bounds.follow_pause_ms / 1_000)


async def _events(
    lines: AsyncIterator[str] | None,
) -> AsyncIterator[tuple[str, dict[str, Any] | None]]:
    """Read events with their ids from a stream that a worker of ours writes; None for an id alone."""
    if lines is None:
        return
    name, data = "", None
    async for line in lines:
        if line.startswith("id: "):
            name = line[4:]
        elif line.startswith("data: {"):
            data = json.loads(line[6:])
        elif not line and name:
            yield name, data
            name, data = "", None


def _passed_on(scope: Scope) -> list[tuple[bytes, bytes]]:
    passed = {name.encode("ascii") for name in PASSED_ON}
    return [(name, value) for name, value in scope["headers"] if name in passed]
