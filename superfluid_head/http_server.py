"""The HTTP server: uvicorn on our own sockets, with our protocol and, where there is a certificate, TLS.

Owns how uvicorn is set up. Signals are the head's, so are limits and log lines. A TLS handshake has the time that a request's
headers have.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from superfluid_core.limits import HttpLimits
from superfluid_head.access.addresses import Connections
from superfluid_head.api.protocol import protocol_class

CLOSE_S = 5

Opening = Callable[[], Awaitable[object]]


def new_loop() -> asyncio.AbstractEventLoop:
    """Make the head's event loop: uvloop, which takes half the time for a write, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    made: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return made


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, and with a deadline for handshakes. It listens once `opens_after` has returned."""

    handshake_s: float | None = None

    def __init__(self, config: uvicorn.Config, opens_after: Opening | None) -> None:
        super().__init__(config)
        self.is_open = asyncio.Event()
        self._opens_after = opens_after

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._opens_after is not None:
            await self._opens_after()
        config, loop = self.config, asyncio.get_running_loop()
        made: Callable[..., asyncio.Protocol] = config.http_protocol_class
        protocol = partial(
            made,
            config=config,
            server_state=self.server_state,
            app_state={},
            _loop=loop,
        )
        self.servers = []
        for one in sockets or ():
            if one.family == socket.AF_UNIX:
                server = await loop.create_unix_server(protocol, sock=one, backlog=config.backlog)
            else:
                server = await loop.create_server(
                    protocol,
                    sock=one,
                    ssl=config.ssl,
                    backlog=config.backlog,
                    ssl_handshake_timeout=None if config.ssl is None else self.handshake_s,
                )
            self.servers.append(server)
        self.started = True
        self.is_open.set()


def http_server(
    app: ASGIApp,
    limits: HttpLimits,
    counted: Connections | None = None,
    tls: ssl.SSLContext | None = None,
    opens_after: Opening | None = None,
) -> HttpServer:
    """Make the HTTP server; call its `serve(sockets=...)`."""
    config = uvicorn.Config(
        app,
        http=protocol_class(limits, counted),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=limits.keep_alive_s,
        timeout_graceful_shutdown=CLOSE_S,
        ssl_context_factory=None if tls is None else lambda _config, _default: tls,
    )
    server = HttpServer(config, opens_after)
    server.handshake_s = limits.header_ms / 1000
    return server
