"""`idempotency-key`: a request that is sent again joins or replays the first one's answer instead of running twice.

Stands between the gate and the routes. The first request runs in its own task, and what it answers goes to its own reader and into
the book; one that comes again with the same key and body reads the book, streams too. A reader that leaves does not end the run at
once: it may be the one that comes again, so the run goes on for `GRACE_S` without readers. Knows bodies as bytes.
"""

from __future__ import annotations

import asyncio
import hashlib

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from superfluid_core.clock import Clock
from superfluid_core.errors import CapacityError, ErrorCode
from superfluid_core.limits import HttpLimits
from superfluid_head.access.keys import Principal
from superfluid_head.access.replies import ANSWERS_MAX, Answer, Answers
from superfluid_head.api.body import ClientGoneError, read_body
from superfluid_head.api.errors import ApiError, from_error, invalid
from superfluid_head.api.qos import client_of
from superfluid_head.api.shapes import reply as shaped
from superfluid_head.api.sse import ABORT, PRESENCE, WRITE

HEADER = b"idempotency-key"
REPLAYED = (b"idempotent-replayed", b"true")
KEY_CHARS_MAX = 255
GRACE_S = 10.0
LARGE_BYTES_MIN = 1 << 18


class Idempotency:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, clock: Clock, limits: HttpLimits) -> None:
        self._app = app
        self._clock = clock
        self._limits = limits
        self.answers = Answers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keys = [value for name, value in scope["headers"] if name == HEADER]
        principal: Principal | None = scope["state"].get("principal")
        if not keys or principal is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            key = _judge(keys)
            body = await read_body(Request(scope, receive), self._limits)
            whose = (client_of(principal, scope["client"][0] if scope.get("client") else None), key)
            digest = await _digested(scope, body)
            found = self.answers.find(whose, self._clock.now_ns())
            if found is not None and found.digest != digest:
                words = "this idempotency-key came with another request"
                raise ApiError(422, words, code="idempotency_mismatch")
            if found is None and len(self.answers) >= 2 * ANSWERS_MAX:
                words = "too many requests with an idempotency-key at once"
                raise from_error(CapacityError(words, code=ErrorCode.OVERLOADED))
        except ApiError as error:
            await shaped(error, scope)(scope, receive, send)
            return
        except ClientGoneError:
            return
        if found is None:
            await self._run(scope, body, whose, _Line(receive, send), digest)
        else:
            await _replay(found, scope, _Line(receive, send))

    async def _run(
        self, scope: Scope, body: bytes, whose: tuple[str, str], line: _Line, digest: bytes
    ) -> None:
        scope.pop(WRITE, None)  # every piece of the answer is to come by here
        scope.pop(PRESENCE, None)  # one reader that leaves does not end it
        answer = self.answers.begin(whose, digest, self._clock.now_ns())

        async def send(message: Message) -> None:
            self.answers.add(whose, answer, message)
            await line.send(message)

        try:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(line.watch(answer))
                try:
                    await self._app(scope, _Body(body, answer).receive, send)
                finally:
                    watcher.cancel()
        finally:
            self.answers.end(whose, answer)


def _judge(values: list[bytes]) -> str:
    key = values[-1].decode("latin-1").strip()
    if not 1 <= len(key) <= KEY_CHARS_MAX or not all("!" <= char <= "~" for char in key):
        raise invalid(
            f"an idempotency-key is 1..{KEY_CHARS_MAX} visible ASCII characters",
            param="idempotency-key",
        )
    return key


async def _digested(scope: Scope, body: bytes) -> bytes:
    """Digest a large body in a thread, which lets the event loop run meanwhile."""
    if len(body) < LARGE_BYTES_MIN:
        return _digest(scope, body)
    return await asyncio.to_thread(_digest, scope, body)


def _digest(scope: Scope, body: bytes) -> bytes:
    """Tell requests apart by where they went and what they said."""
    place = f"{scope['path']}?{scope.get('query_string', b'').decode('latin-1')}\n".encode()
    digest = hashlib.sha256(place)
    digest.update(body)
    return digest.digest()


class _Line:
    """The way to one client."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self.receive = receive
        self.send = send

    async def watch(self, answer: Answer) -> None:
        """Count it as a reader of the answer until it leaves."""
        answer.readers += 1
        try:
            while (await self.receive())["type"] != "http.disconnect":
                pass
        finally:
            answer.readers -= 1
            answer.tell()


class _Body:
    """What the application receives: the body that is there already, then a disconnect when nobody has read for a while."""

    def __init__(self, body: bytes, answer: Answer) -> None:
        self._body: bytes | None = body
        self._answer = answer

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        while not await self._is_deserted():
            pass
        return {"type": "http.disconnect"}

    async def _is_deserted(self) -> bool:
        """Wait for news; True when there has been no reader for the time of grace."""
        answer = self._answer
        changed = answer.changed
        if answer.is_read():
            await changed.wait()
            return False
        try:
            async with asyncio.timeout(GRACE_S):
                while not answer.is_read():
                    await answer.changed.wait()
        except TimeoutError:
            return True
        return False


async def _replay(answer: Answer, scope: Scope, line: _Line) -> None:
    """Send what there is, and what comes, until the answer is over or the reader leaves."""
    answer.joined += 1
    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(line.watch(answer))
        sender = group.create_task(_copy(answer, scope, line))
        await asyncio.wait((watcher, sender), return_when=asyncio.FIRST_COMPLETED)
        watcher.cancel()
        sender.cancel()


async def _copy(answer: Answer, scope: Scope, line: _Line) -> None:
    sent = 0
    while True:
        while sent < len(answer.messages):
            message = answer.messages[sent]
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), REPLAYED]}
            await line.send(dict(message))
            sent += 1
        if answer.is_over:
            break
        await answer.changed.wait()
    if answer.has_ended:
        return
    abort = scope.get(ABORT)
    if sent and abort is not None:
        abort()
        await asyncio.sleep(0)  # lets the server see that the connection is gone
    elif not sent:
        words = "the request that this one repeats was given up; send it again"
        failure = from_error(CapacityError(words, code=ErrorCode.OVERLOADED))
        await shaped(failure, scope)(scope, line.receive, line.send)
