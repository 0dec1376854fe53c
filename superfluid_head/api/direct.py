"""The short way to a route: one look-up of verb and path, and its handler is called.

Stands before the framework's own routing and does what that does for a path without parameters: it says which route this is, answers, and
makes a reply of an expected failure that comes before the first byte. All else (parameters, wrong verbs, unknown paths) the framework
routes: a dozen calls around each request and three around each message, which a short answer feels. Knows no endpoint.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Handler = Callable[[Request], Awaitable[Response]]
OnError = Callable[[Request, Exception], Awaitable[Response]]
Key = tuple[str, str]
"""A verb and a path."""


class Direct:
    """Wraps the application. `expected` are the failures that `on_error` makes replies of; any other is for those around."""

    def __init__(
        self,
        app: ASGIApp,
        known: Mapping[Key, tuple[Handler, BaseRoute]],
        expected: tuple[type[Exception], ...],
        on_error: OnError,
    ) -> None:
        self._app = app
        self._known = known
        self._expected = expected
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = None
        if scope["type"] == "http":
            found = self._known.get((scope["method"], scope["path"]))
        if found is None:
            await self._app(scope, receive, send)
            return
        handler, scope["route"] = found
        has_begun = False

        async def tell(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        request = Request(scope, receive)
        try:
            response = await handler(request)
            await response(scope, receive, tell)
        except self._expected as error:
            if has_begun:
                raise
            response = await self._on_error(request, error)
            await response(scope, receive, tell)
