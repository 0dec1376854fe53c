"""Server-sent events: framing, comments in silence, slow readers, readers that left (http_api.md 2, reliability 2.2).

Owns the response's bytes, what breaks silence, and the watch for readers that leave. Whoever has an event sends it, and waits while
the reader takes nothing: no event waits anywhere but with its maker and in the connection. Everything sent is ASCII JSON (escapes
in pairs), one object per event, so no reader can cut a character. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from superfluid_core.errors import ErrorCode, SuperfluidError
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
FLOW = "superfluid.flow"
"""Where a scope says whether the connection takes nothing just now (a Flow); where it does not say, every event is sent with a deadline."""
WRITE = "superfluid.write"
"""Where a scope has the way to write a piece of a body that has begun past everything else, without waiting."""
PRESENCE = "superfluid.presence"
"""Where a scope tells when whoever asks has left (a Presence); where it does not, somebody has to wait for the ASGI message."""

T = TypeVar("T")


class Flow(Protocol):
    """Whether a connection is full: what is written now would only wait."""

    write_paused: bool


class Write(Protocol):
    """Writes a piece of a body: at once, or with what else is written in this turn of the loop."""

    def __call__(self, data: bytes, *, may_wait: bool = False) -> None: ...


class Presence(Protocol):
    """Whether whoever asks is still there, and who is told when that ends."""

    @property
    def has_left(self) -> bool: ...

    def watch(self, tell: Callable[[], None]) -> None:
        """Have `tell` called by the loop when whoever asks leaves."""
        ...

    def unwatch(self, tell: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Unknown:
    """The flow of a connection that does not say: it may be full at any time."""

    write_paused: bool = True


_logger = logging.getLogger(__name__)


def event(payload: Any) -> bytes:
    """One event holding one JSON object on one line, in ASCII: some clients take U+2028 and its like for the end of a line."""
    return b"data: " + _ascii(payload) + b"\n\n"


_OTHER = re.compile(r"[^\x00-\x7f]+")


def _ascii(payload: Any) -> bytes:
    try:
        data = orjson.dumps(payload)
    except TypeError:  # half a surrogate pair, or a number that is too large for it
        return json.dumps(payload, allow_nan=False, separators=(",", ":")).encode()
    return data if data.isascii() else _OTHER.sub(_escaped, data.decode()).encode()


def _escaped(found: re.Match[str]) -> str:
    return encode_basestring_ascii(found.group())[1:-1]


_MARK = "@@text@@"
"""A text that no model's name and no id holds."""


class TextTemplate:
    """An event that is always the same but for one text, of which only that is escaped. `make` is given a text to stand in for it."""

    __slots__ = ("_head", "_tail")

    def __init__(self, make: Callable[[str], bytes]) -> None:
        self._head, mark, self._tail = make(_MARK).partition(f'"{_MARK}"'.encode())
        assert mark, "the event does not tell the text"

    def event(self, text: str) -> bytes:
        return self._head + encode_basestring_ascii(text).encode("ascii") + self._tail


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


class SlowClientError(SuperfluidError):
    """Raised when a reader took nothing for `slow_client_ms`."""

    code = ErrorCode.CANCELLED


class EventStream:
    """The way to one reader. `put` returns once an event is with the connection, or in line behind others that are not yet.

    The status line goes out with the first event.
    """

    def __init__(self, scope: Scope, send: Send, limits: HttpLimits, framing: Framing) -> None:
        self.has_begun = False
        self._send = send
        self._framing = framing
        self._slow_s = limits.slow_client_ms / 1000
        self._silence_s = limits.silence_ms / 1000
        self._flow: Flow = scope.get(FLOW, _Unknown())
        self._write: Write | None = scope.get(WRITE)
        self._line = asyncio.Lock()
        self._is_free = False
        self._loop = asyncio.get_running_loop()
        self._put_s = self._loop.time()

    async def put(self, data: bytes) -> None:
        """Send one or more whole events. Raises SlowClientError."""
        self._put_s = self._loop.time()
        if self._write is not None and self.is_ready():
            self._write(data, may_wait=True)
            return
        await self._pass_on({"type": "http.response.body", "body": data, "more_body": True})

    def is_ready(self) -> bool:
        """Whether `write` may be called: the reply has begun, and nobody waits for the reader."""
        return self._is_free and not self._flow.write_paused

    def write(self, data: bytes) -> None:
        """Send whole events at once; only right after `is_ready`."""
        assert self._write is not None, "not ready"
        self._put_s = self._loop.time()
        self._write(data)

    async def end(self, failure: SuperfluidError | None) -> None:
        """Say the last words, good or bad. Raises SlowClientError."""
        framing = self._framing
        last = (framing.last or b"") if failure is None else framing.failed(failure)
        end = {"type": "http.response.body", "body": last, "more_body": False}
        await self._pass_on(end if failure is None else {**end, "is_failed": True})

    async def break_silence(self) -> None:
        """Send a comment after every `silence_ms` without an event, until cancelled. Raises SlowClientError."""
        while True:
            left_s = self._put_s + self._silence_s - self._loop.time()
            if left_s <= 0 and not self._line.locked():
                await self.put(self._framing.ping())
            await asyncio.sleep(left_s if left_s > 0 else self._silence_s)

    async def _pass_on(self, message: dict[str, Any]) -> None:
        """Send at once what cannot wait: then there is no need of a turn and a deadline."""
        if not self._is_full():
            if not self.has_begun:
                await self._begin()
            if not self._is_full():
                self._is_free = self._write is not None
                await self._send(message)
                return
        await self._in_line(message)

    def _is_full(self) -> bool:
        """Whether what is sent now would wait: for the reader, or behind others that do."""
        return self._flow.write_paused or self._line.locked()

    async def _begin(self) -> None:
        self.has_begun = True
        headers = self._framing.headers()
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _in_line(self, message: dict[str, Any]) -> None:
        """Send in turn, with a deadline: the reader may be slow."""
        self._is_free = False
        async with self._line:
            try:
                async with asyncio.timeout(self._slow_s):
                    if not self.has_begun:
                        await self._begin()
                    await self._send(message)
            except TimeoutError:
                raise SlowClientError("a reader took nothing for too long") from None
        self._is_free = self._write is not None and not self._line.locked()


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
            await while_connected(Request(scope, receive), self._serve(scope, send))
        except ClientGoneError:
            return
        except SlowClientError:
            log(_logger, "warning", "a reader took nothing for too long; connection closed")
            abort = scope.get(ABORT)
            if abort is not None:
                abort()
                await asyncio.sleep(0)  # lets the server see that the connection is gone

    async def _serve(self, scope: Scope, send: Send) -> None:
        stream = EventStream(scope, send, self._limits, self._framing)
        pings: list[asyncio.Task[None]] = []
        try:
            async with asyncio.TaskGroup() as group:

                def break_silence() -> None:
                    pings.append(group.create_task(stream.break_silence()))

                # most answers are over before a task that breaks silence has anything to do
                silence_s = self._limits.silence_ms / 1000
                timer = asyncio.get_running_loop().call_later(silence_s, break_silence)
                try:
                    failure = await self._fill(stream)
                finally:
                    timer.cancel()
                for each in pings:
                    each.cancel()
        except BaseExceptionGroup as slow:  # the comments met a reader that takes nothing
            if slow.split(SlowClientError)[0] is None:
                raise
            raise SlowClientError("a reader took nothing for too long") from None
        if failure is not None and (isinstance(failure, SlowClientError) or not stream.has_begun):
            raise failure
        await stream.end(failure)

    async def _fill(self, stream: EventStream) -> SuperfluidError | None:
        try:
            await self._produce(stream)
        except SuperfluidError as error:
            return error
        except Exception:
            _logger.exception("a stream failed")
            return SuperfluidError("internal error")
        return None


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` unless the client leaves first: then it is cancelled and ClientGoneError raised.

    It runs in the caller's task: what need not wait is done before the loop turns.
    """
    presence: Presence | None = request.scope.get(PRESENCE)
    if presence is not None:
        return await _while_present(presence, work)
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_until_gone(request.receive))
            value, failure = await _outcome(work)
            watcher.cancel()
    except BaseExceptionGroup as failures:
        if failures.split(ClientGoneError)[0] is None:
            raise
        raise ClientGoneError from None
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]  # a value of T whenever there is no failure


async def _while_present(presence: Presence, work: Coroutine[Any, Any, T]) -> T:
    """Do the same without a task that waits: the connection itself tells, between two steps of the work."""
    task = asyncio.current_task()
    assert task is not None, "work runs in a task"
    cancelling = task.cancelling()
    has_left = False

    def tell() -> None:
        nonlocal has_left
        has_left = True
        task.cancel()

    if presence.has_left:
        work.close()
        raise ClientGoneError
    presence.watch(tell)
    try:
        return await work
    finally:
        presence.unwatch(tell)
        if has_left and task.uncancel() <= cancelling:  # else somebody else cancels it too
            raise ClientGoneError from None


async def _outcome(work: Coroutine[Any, Any, T]) -> tuple[T | None, Exception | None]:
    """Return the result or the expected failure, so that a TaskGroup does not wrap it."""
    try:
        return await work, None
    except (SuperfluidError, ApiError) as error:
        return None, error


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGoneError
