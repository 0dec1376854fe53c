"""Server-sent events: framing, comments in silence, slow readers, readers that left (http_api.md 2, reliability 2.2).

Owns the response's bytes and its two tasks: one that sends, one that watches for the reader to leave. Everything sent
is ASCII JSON (escapes in pairs), one object per event, so no reader can cut a character. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from superfluid_core.errors import SuperfluidError
from superfluid_core.limits import HttpLimits
from superfluid_core.logs import log
from superfluid_head.api.body import ClientGoneError
from superfluid_head.api.errors import ApiError, from_error

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"connection", b"keep-alive"),
]
ABORT = "superfluid.abort"
QUEUE_MAX = 64

T = TypeVar("T")
_logger = logging.getLogger(__name__)


def event(payload: Any) -> bytes:
    """One event holding one JSON object on one line."""
    return (
        b"data: " + json.dumps(payload, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
    )


def error_event(error: SuperfluidError) -> bytes:
    """Make the last event of a stream that failed after its first byte."""
    return event(from_error(error).body())


def named_event(name: str, payload: Any) -> bytes:
    """One event with a name of its own."""
    return b"event: " + name.encode("ascii") + b"\n" + event(payload)


@dataclass(frozen=True, slots=True)
class Framing:
    """How a dialect puts its events: the type of the reply, what breaks silence, and the last words, good or bad.

    `last` is None where a good end needs no words.
    """

    media_type: bytes = b"text/event-stream; charset=utf-8"
    ping: Callable[[], bytes] = lambda: PING
    last: bytes | None = DONE
    failed: Callable[[SuperfluidError], bytes] = error_event
    extra: tuple[tuple[bytes, bytes], ...] = ()

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"content-type", self.media_type), *HEADERS, *self.extra]


CHAT = Framing()


class SlowClientError(Exception):
    """Raised when a reader took nothing for `slow_client_ms`."""


class EventStream:
    """A bounded line of events between the producer and the sender, ended by `close` or `fail`."""

    def __init__(self, ping: Callable[[], bytes] = lambda: PING) -> None:
        self._ping = ping
        self._line: asyncio.Queue[bytes | SuperfluidError | None] = asyncio.Queue(QUEUE_MAX)
        self._ahead: list[SuperfluidError | None] = []

    async def put(self, data: bytes) -> None:
        await self._line.put(data)

    async def close(self) -> None:
        await self._line.put(None)

    async def fail(self, error: SuperfluidError) -> None:
        await self._line.put(error)

    async def get(self, silence_s: float) -> bytes | SuperfluidError | None:
        """Return the next events, as many as wait; a comment after `silence_s` of silence; at last None or the failure."""
        if self._ahead:
            return self._ahead.pop()
        try:
            async with asyncio.timeout(silence_s):
                item = await self._line.get()
        except TimeoutError:
            return self._ping()
        if not isinstance(item, bytes):
            return item
        parts = [item]
        while not self._line.empty():
            more = self._line.get_nowait()
            if not isinstance(more, bytes):
                self._ahead.append(more)
                break
            parts.append(more)
        return b"".join(parts)


Produce = Callable[[EventStream], Awaitable[None]]


class StreamingReply(Response):
    """A reply whose events `produce` puts into an EventStream; ends with [DONE] or what the framing has for it, or with an error event.

    The status line waits for the first event, for `silence_ms` at most: what fails before it is an ordinary error.
    """

    def __init__(self, produce: Produce, limits: HttpLimits, framing: Framing = CHAT) -> None:
        super().__init__()
        self._framing = framing
        self._produce = produce
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._serve(send))
        except ClientGoneError:
            return
        except SlowClientError:
            log(_logger, "warning", "a reader took nothing for too long; connection closed")
            abort = scope.get(ABORT)
            if abort is not None:
                abort()
                await asyncio.sleep(0)  # lets the server see that the connection is gone

    async def _serve(self, send: Send) -> None:
        stream = EventStream(self._framing.ping)
        failure: SuperfluidError | SlowClientError | None = None
        async with asyncio.TaskGroup() as group:
            producer = group.create_task(self._fill(stream))
            try:
                await self._drain(stream, send)
            except (SuperfluidError, SlowClientError) as error:
                failure = error
                producer.cancel()
        if failure is not None:
            raise failure

    async def _fill(self, stream: EventStream) -> None:
        try:
            await self._produce(stream)
        except SuperfluidError as error:
            await stream.fail(error)
        except Exception:
            _logger.exception("a stream failed")
            await stream.fail(SuperfluidError("internal error"))
        else:
            await stream.close()

    async def _drain(self, stream: EventStream, send: Send) -> None:
        silence_s = self._limits.silence_ms / 1000
        item = await stream.get(silence_s)
        if isinstance(item, SuperfluidError):
            raise item
        headers = self._framing.headers()
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})
        while isinstance(item, bytes):
            await self._send(send, {"type": "http.response.body", "body": item, "more_body": True})
            item = await stream.get(silence_s)
        framing = self._framing
        last = (framing.last or b"") if item is None else framing.failed(item)
        end = {"type": "http.response.body", "body": last, "more_body": False}
        await self._send(send, end if item is None else {**end, "is_failed": True})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._limits.slow_client_ms / 1000):
                await send(message)
        except TimeoutError:
            raise SlowClientError from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` unless the client leaves first: then it is cancelled and ClientGoneError raised."""
    async with asyncio.TaskGroup() as group:
        worker = group.create_task(_outcome(work))
        watcher = group.create_task(_until_gone(receive))
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        is_gone = not worker.done()
        (worker if is_gone else watcher).cancel()
    if is_gone:
        raise ClientGoneError
    value, failure = worker.result()
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]  # a value of T whenever there is no failure


async def _outcome(work: Coroutine[Any, Any, T]) -> tuple[T | None, Exception | None]:
    """Return the result or the expected failure, so that a TaskGroup does not wrap it."""
    try:
        return await work, None
    except (SuperfluidError, ApiError, SlowClientError) as error:
        return None, error


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
