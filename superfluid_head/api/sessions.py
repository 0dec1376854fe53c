"""The session routes: what runs and waits for a caller, its class, its end (access.md, Session routes).

A session is one request with all its choices; its id is that of its answer. The book holds live ones only, and everything in
it is dropped by leaving the context in which it was entered. Callers see their own, admins all; somebody else's is as
unknown as none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from superfluid_core.limits import HttpLimits
from superfluid_core.session import QosClass
from superfluid_head.access.keys import Principal
from superfluid_head.api.body import read_object
from superfluid_head.api.errors import ApiError, invalid
from superfluid_head.api.ports import GenerationDoor
from superfluid_head.api.qos import QosDesk


@dataclass(slots=True)
class LiveSession:
    """One request that is being served."""

    id: str
    request_id: str
    model: str
    tenant: str
    qos: QosClass
    batch_invariant: bool
    prompt_tokens: int
    created_s: int
    is_streamed: bool
    completion_tokens: Callable[[], int]
    cancel: Callable[[], None] = lambda: None
    doors: dict[int, GenerationDoor] = field(default_factory=dict)

    def attach(self, choice: int, door: GenerationDoor) -> None:
        """Note where a choice runs; it gets the class that the session has by now."""
        self.doors[choice] = door
        door.set_class(self.qos)

    def detach(self, choice: int) -> None:
        self.doors.pop(choice, None)

    def set_class(self, qos: QosClass) -> None:
        """Serve what is left of it as `qos`."""
        self.qos = qos
        for door in self.doors.values():
            door.set_class(qos)

    def shown(self) -> dict[str, Any]:
        nodes = sorted({door.node for door in self.doors.values() if door.node is not None})
        return {
            "id": self.id,
            "object": "session",
            "created": self.created_s,
            "request_id": self.request_id,
            "model": self.model,
            "tenant": self.tenant,
            "class": self.qos.label,
            "batch_invariant": self.batch_invariant,
            "stream": self.is_streamed,
            "state": "running" if nodes else "waiting",
            "nodes": nodes,
            "choices": len(self.doors),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens(),
        }


class SessionBook:
    """All live sessions of a head, in order of arrival. Event-loop only."""

    def __init__(self) -> None:
        self._live: dict[str, LiveSession] = {}

    @contextmanager
    def enter(self, session: LiveSession) -> Iterator[LiveSession]:
        self._live[session.id] = session
        try:
            yield session
        finally:
            del self._live[session.id]

    def visible(self, principal: Principal) -> list[LiveSession]:
        return [s for s in self._live.values() if principal.admin or s.tenant == principal.name]

    def find(self, session: str, principal: Principal) -> LiveSession:
        """Raise ApiError 404 for a session that is not there, or not the caller's."""
        found = self._live.get(session)
        if found is None or not (principal.admin or found.tenant == principal.name):
            raise ApiError(404, "no such session is live", code="session_not_found")
        return found


class SessionsEndpoint:
    """The routes' handlers."""

    def __init__(self, book: SessionBook, desk: QosDesk, limits: HttpLimits) -> None:
        self._book = book
        self._desk = desk
        self._limits = limits

    async def every(self, request: Request) -> Response:
        """List the generations that run now: one's own, or all for an admin."""
        visible = self._book.visible(request.scope["state"]["principal"])
        return JSONResponse({"object": "list", "data": [each.shown() for each in visible]})

    async def one(self, request: Request) -> Response:
        """Show one running generation."""
        return JSONResponse(self._find(request).shown())

    async def set_class(self, request: Request) -> Response:
        """Serve a running generation as `class` from now on, within what the key may ask for."""
        session = self._find(request)
        body = await read_object(request, self._limits)
        name = body.get("class")
        if not isinstance(name, str):
            raise invalid("class is missing or no string", param="class", code="invalid_type")
        principal = request.scope["state"]["principal"]
        session.set_class(self._desk.judge_change(name, principal))
        return JSONResponse(session.shown())

    async def cancel(self, request: Request) -> Response:
        """End a running generation; its reader is told."""
        session = self._find(request)
        session.cancel()
        return JSONResponse({"id": session.id, "object": "session", "cancelled": True})

    def _find(self, request: Request) -> LiveSession:
        principal = request.scope["state"]["principal"]
        return self._book.find(request.path_params["session"], principal)
