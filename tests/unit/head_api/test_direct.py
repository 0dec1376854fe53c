"""The short way to a route: who takes it, who does not, and what becomes of failures on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from superfluid_head.api.direct import Direct

PATH = "/known"


class ExpectedError(Exception):
    """What a reply can be made of."""


async def _ok(_request: Request) -> Response:
    return PlainTextResponse("direct")


async def _refused(_request: Request) -> Response:
    raise ExpectedError("refused")


class _BreaksOff(Response):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ExpectedError("too late")


async def _late(_request: Request) -> Response:
    return _BreaksOff()


async def _broken(_request: Request) -> Response:
    raise ZeroDivisionError


async def _on_error(_request: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), 400)


async def _framework(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("routed", 404)(scope, receive, send)


def _asked(
    handler: Callable[[Request], Awaitable[Response]], method: str = "POST", path: str = PATH
) -> tuple[list[Message], dict[str, Any]]:
    sent: list[Message] = []
    route = Route(PATH, _ok)
    app = Direct(_framework, {("POST", PATH): (handler, route)}, (ExpectedError,), _on_error)
    scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "headers": []}

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nobody reads")

    asyncio.run(app(scope, receive, send))
    return sent, scope


def test_a_known_verb_and_path_is_answered_at_once_and_says_which_route_it_is() -> None:
    sent, scope = _asked(_ok)
    assert (sent[0]["status"], sent[1]["body"]) == (200, b"direct")
    assert scope["route"].path == PATH


@pytest.mark.parametrize(("method", "path"), [("GET", PATH), ("POST", "/known/more")])
def test_anything_else_is_for_the_framework(method: str, path: str) -> None:
    sent, scope = _asked(_ok, method, path)
    assert (sent[0]["status"], sent[1]["body"]) == (404, b"routed")
    assert "route" not in scope


def test_an_expected_failure_becomes_a_reply() -> None:
    sent, _ = _asked(_refused)
    assert (sent[0]["status"], sent[1]["body"]) == (400, b"refused")


def test_a_failure_behind_the_first_byte_and_an_unexpected_one_are_for_those_around() -> None:
    with pytest.raises(ExpectedError):
        _asked(_late)
    with pytest.raises(ZeroDivisionError):
        _asked(_broken)
