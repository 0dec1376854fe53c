"""A client that costs little: many streamed chats over bare sockets, counted and not parsed.

For measuring servers whose own cost per chunk is about what a full client's is. It knows HTTP as far as a streamed answer of a
server that speaks HTTP/1.1, one request a connection; chunks are lines that begin with `data:`, and an answer is whole when its
last one is `[DONE]`. What came is not kept.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from superfluid_core.clock import MS, Clock

ANSWER_SECONDS = 300.0
PATH = "/v1/chat/completions"
TAIL_BYTES = 64
_OK = re.compile(rb"HTTP/1\.[01] 200 ")
_TEXT = re.compile(rb'"content": ?"[^"]')
_DATA = b"data: "
_DONE = b"data: [DONE]"


@dataclass(slots=True)
class Outcome:
    """What became of one chat. `first_ms` is the time to the first text, `chunks` counts events but the last."""

    first_ms: float | None = None
    chunks: int = 0
    error: str | None = None

    @property
    def is_whole(self) -> bool:
        return self.error is None


class _Chat(asyncio.Protocol):
    """One connection with one request."""

    def __init__(self, request: bytes, clock: Clock) -> None:
        self.outcome = Outcome()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._clock = clock
        self._began_ns = clock.now_ns()
        self._tail = b""
        self._is_begun = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._began_ns = self._clock.now_ns()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._is_begun:
            self._is_begun = True
            if _OK.match(data) is None:
                self._end(f"refused: {data[:600]!r}")
                return
        seen = self._tail + data
        self.outcome.chunks += seen.count(_DATA) - self._tail.count(_DATA)
        if self.outcome.first_ms is None and _TEXT.search(seen):
            self.outcome.first_ms = (self._clock.now_ns() - self._began_ns) / MS
        if _DONE in seen:
            self.outcome.chunks -= 1
            self._end(None)
            return
        self._tail = seen[-TAIL_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection ended without [DONE]: {exc}")

    def _end(self, error: str | None) -> None:
        if self.ended.done():
            return
        self.outcome.error = error
        self.ended.set_result(None)
        if self._transport is not None:
            self._transport.close()


def request_of(url: str, body: dict[str, Any], api_key: str | None = None) -> bytes:
    """Write a whole request."""
    data = json.dumps(body).encode()
    key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\ncontent-type: application/json\r\n"
        f"{key}content-length: {len(data)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + data


async def stream(url: str, request: bytes, clock: Clock) -> Outcome:
    """Send one request and hear its answer to the end."""
    place = urlsplit(url)
    host, port = place.hostname or "", place.port or 80
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            transport, chat = await loop.create_connection(
                lambda: _Chat(request, clock), host, port
            )
            try:
                await chat.ended
            finally:
                transport.close()
    except (OSError, TimeoutError) as error:
        return Outcome(error=f"{type(error).__name__}: {error}")
    return chat.outcome


async def stream_all(url: str, requests: Sequence[bytes], clock: Clock) -> list[Outcome]:
    """Send them all at once."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(url, request, clock)) for request in requests]
    return [task.result() for task in tasks]
