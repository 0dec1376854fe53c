"""uvicorn's HTTP/1.1 protocol with bounds of its own: header size, count and deadline, connections, JSON parse errors.

Works below the application, where a request is not one yet. Also hands five things to the scope: `superfluid.arrived`, whether the
whole body is here, `superfluid.flow`, whether the reader takes nothing just now, `superfluid.write`, the short way to it, `superfluid.abort`,
the way to drop it, and `superfluid.presence`, who is told when it leaves.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from superfluid_core.limits import HttpLimits
from superfluid_head.access.addresses import Connections, Proxies
from superfluid_head.api.body import ARRIVED
from superfluid_head.api.errors import ApiError
from superfluid_head.api.gathering import Gathering
from superfluid_head.api.sse import ABORT, FLOW, PRESENCE, WRITE

# Strangers decide how many of their requests are none: those are answered, and no line each in the log.
_logger = logging.getLogger("superfluid_head.connections")
_logger.setLevel(logging.ERROR)


class HeadProtocol(HttpToolsProtocol):
    """One connection. `limits` and `counted` are set on the class made by `protocol_class`."""

    limits = HttpLimits()
    counted = Connections(0, Proxies())

    _refusal: ApiError | None = None
    _head_bytes = 0
    _is_in_head = False
    _head_timer: asyncio.TimerHandle | None = None
    _address: str | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.logger = _logger
        self.has_left = False
        self._watching: set[Callable[[], None]] = set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        super().connection_made(cast("asyncio.Transport", Gathering(transport, self.loop)))
        address = self.client[0] if self.client else ""
        if len(self.connections) > self.limits.connections_max or not self.counted.enter(address):
            transport.abort()
            return
        self._address = address
        high = self.limits.slow_client_bytes_max
        transport.set_write_buffer_limits(high=high, low=high // 4)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._address is not None:
            self.counted.leave(self._address)
            self._address = None
        super().connection_lost(exc)
        self.has_left = True
        for tell in list(self._watching):
            tell()

    def watch(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when the client leaves; for that, the connection has to be read."""
        self.flow.resume_reading()
        self._watching.add(tell)

    def unwatch(self, tell: Callable[[], None]) -> None:
        self._watching.discard(tell)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.header_bytes_max:
                self._refuse(_headers_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._head_bytes = 0
        scope = cast("dict[str, Any]", self.scope)
        scope.update({ABORT: self.transport.abort, FLOW: self.flow, PRESENCE: self})
        self._arm()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._disarm()
        size = sum(len(name) + len(value) + 4 for name, value in self.headers) + len(self.url)
        if size > self.limits.header_bytes_max or len(self.headers) > self.limits.header_count_max:
            self._refusal = _headers_too_large()
            raise ValueError("headers too large")
        super().on_headers_complete()
        scope, cycle = cast("dict[str, Any]", self.scope), self.cycle
        scope[WRITE] = partial(_write, cycle)
        scope[ARRIVED] = partial(_has_arrived, cycle)

    def send_400_response(self, msg: str) -> None:
        """Answer a request that could not be parsed, in the API's shape."""
        del msg
        found = self._refusal or ApiError(400, "this is not an HTTP request", code="bad_request")
        self._refuse(found)

    def _refuse(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        self._disarm()
        self._is_in_head = False
        body = json.dumps(error.body()).encode()
        fields: list[tuple[bytes, bytes]] = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", b"req-" + secrets.token_hex(12).encode()),
            (b"connection", b"close"),
        ]
        head = b"".join(name + b": " + value + b"\r\n" for name, value in fields)
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self.transport.close()

    def _arm(self) -> None:
        if self._head_timer is None:
            wait_s = self.limits.header_ms / 1000
            self._head_timer = self.loop.call_later(wait_s, self._on_head_late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_late(self) -> None:
        self._head_timer = None
        if self._is_in_head:
            words = "the request's headers did not arrive in time"
            self._refuse(ApiError(408, words, code="request_timeout"))
        elif not self.transport.is_closing():
            self.transport.close()


def _write(cycle: RequestResponseCycle, data: bytes, *, may_wait: bool = False) -> None:
    """Write a piece of a body as uvicorn would, without its checks: who asks has begun the reply and not ended it.

    One that `may_wait` leaves with what else is written in this turn of the loop.
    """
    if cycle.disconnected or cycle.response_complete:
        return
    gathering = cast("Gathering", cycle.transport)
    framed = b"%x\r\n%b\r\n" % (len(data), data) if cycle.chunked_encoding else data
    if may_wait:
        gathering.write(framed)
    else:
        gathering.write_now(framed)


def _has_arrived(cycle: RequestResponseCycle) -> bool:
    return not cycle.more_body


def _headers_too_large() -> ApiError:
    return ApiError(431, "the request's headers are too large", code="headers_too_large")


def protocol_class(limits: HttpLimits, counted: Connections | None = None) -> type[Any]:
    """Make the protocol with these bounds."""
    bounds = {"limits": limits, "counted": counted or Connections(0, Proxies())}
    return type("BoundedProtocol", (HeadProtocol,), bounds)
