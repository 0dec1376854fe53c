"""The HTTP server: uvicorn on our own sockets, with our protocol and, where there is a certificate, TLS.

Owns how uvicorn is set up. Signals are the head's, so are limits and log lines. A TLS handshake has the time that a request's
headers have.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from superfluid_core.limits import HttpLimits
from superfluid_head.access.addresses import Connections
from superfluid_head.api.protocol import protocol_class

CLOSE_S = 5


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, and with a deadline for handshakes."""

    handshake_s: float | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        config, loop = self.config, asyncio.get_running_loop()
        made: Callable[..., asyncio.Protocol] = config.http_protocol_class
        protocol = partial(
            made,
            config=config,
            server_state=self.server_state,
            app_state={},
            _loop=loop,
        )
        self.servers = [
            await loop.create_server(
                protocol,
                sock=one,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=None if config.ssl is None else self.handshake_s,
            )
            for one in sockets or ()
        ]
        self.started = True


def http_server(
    app: ASGIApp,
    limits: HttpLimits,
    counted: Connections | None = None,
    tls: ssl.SSLContext | None = None,
) -> uvicorn.Server:
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
    server = _Server(config)
    server.handshake_s = limits.header_ms / 1000
    return server
