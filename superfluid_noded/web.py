"""The node's small HTTP side: /metrics, /scheduler/stats and /healthz, for operators and monitoring, /livez and /readyz for probes.

On loopback without a token (then only for loopback `Host`s, so that no web page can read it through a name of its own),
elsewhere with a bearer token. Probes bring none and learn one word. It runs on the node's own loop, on its own socket, and leaves signals alone.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from superfluid_core.link.addresses import is_loopback
from superfluid_noded.metrics import CONTENT_TYPE

CONNECTIONS_MAX = 64
BACKLOG = 64
KEEP_ALIVE_S = 15
HUNG = "engine hung"
"""What `health` calls a node that a restart would help; one that drains is alive."""

Figures = Callable[[], dict[str, Any]]
Health = Callable[[], tuple[bool, dict[str, Any]]]


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: they are the node's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _probes(health: Health) -> list[Route]:
    async def livez(_: Request) -> Response:
        details = health()[1]
        is_alive = details["status"] != HUNG
        return JSONResponse({"status": "ok" if is_alive else HUNG}, 200 if is_alive else 503)

    async def readyz(_: Request) -> Response:
        is_well, details = health()
        return JSONResponse({"status": details["status"]}, 200 if is_well else 503)

    return [Route("/livez", livez), Route("/readyz", readyz)]


def build_app(
    expose: Callable[[], bytes],
    figures: Figures,
    health: Health,
    token: bytes | None,
) -> Starlette:
    """Make the app; `health` says whether the node would serve, and why."""

    def denial(request: Request) -> Response | None:
        if token is None:
            host = (request.url.hostname or "").strip("[]")
            if is_loopback(host) or host == "localhost":
                return None
            return PlainTextResponse("this listener answers loopback hosts only\n", 403)
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode(), token)
        if scheme.lower() == "bearer" and is_right:
            return None
        return PlainTextResponse("a bearer token is needed\n", 401, {"www-authenticate": "Bearer"})

    async def metrics(request: Request) -> Response:
        return denial(request) or Response(expose(), media_type=CONTENT_TYPE)

    async def stats(request: Request) -> Response:
        return denial(request) or JSONResponse(figures())

    async def healthz(request: Request) -> Response:
        refused = denial(request)
        if refused is not None:
            return refused
        is_well, details = health()
        return JSONResponse(details, 200 if is_well else 503)

    return Starlette(
        routes=[
            *_probes(health),
            Route("/metrics", metrics),
            Route("/scheduler/stats", stats),
            Route("/healthz", healthz),
        ]
    )


def bind(host: str, port: int) -> socket.socket:
    """Bind the first address of `host`. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


class Web:
    """Serves an app on one bound socket until `stop`."""

    def __init__(self, app: Starlette, listening: socket.socket) -> None:
        self._listening = listening
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                backlog=BACKLOG,
                limit_concurrency=CONNECTIONS_MAX,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
                server_header=False,
            )
        )

    async def run(self) -> None:
        try:
            await self._server.serve(sockets=[self._listening])
        finally:
            self._listening.close()

    def stop(self) -> None:
        self._server.should_exit = True
