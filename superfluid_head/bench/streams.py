"""The bench's own HTTP client for streamed answers: connections that are used again, and the events in what came.

Owns how a request is written, which connection carries it, and how bytes are cut into events. It speaks HTTP/1.1 without TLS; callers
ask httpx for everything else. `stream_all` counts the events of many answers for measuring servers: one connection a request,
and nothing parsed.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from superfluid_core.clock import MS, Clock
from superfluid_head.bench.exchange import Connection, Deadlines, Heard, OnPieces

COUNTED = Deadlines(total_s=300.0)
PATH = "/v1/chat/completions"
IDLE_S = 4.0
"""A connection that rested longer is not used again: servers close theirs after five seconds or more."""
ERROR_CHARS_MAX = 600
OWN_HEADERS = frozenset((b"host", b"connection", b"content-length", b"content-type", b"accept-encoding"))  # fmt: skip
_TEXT = re.compile(rb'"content": ?"[^"]')

Place = tuple[str, int]
Headers = Iterable[tuple[bytes, bytes]]


def is_plain(url: str) -> bool:
    """Say whether this client can ask there: no TLS, and no password in the address."""
    return url.startswith("http://") and "@" not in urlsplit(url).netloc


def post_of(
    url: str, body: dict[str, Any], headers: Headers = (), *, is_kept: bool = True
) -> bytes:
    """Write a whole request; the connection lives on if `is_kept`. Raises ValueError for headers with line ends."""
    place = urlsplit(url)
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    target = (place.path or "/") + (f"?{place.query}" if place.query else "")
    lines = [
        f"POST {target} HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: application/json".encode(),
        b"content-length: %d" % len(data),
        b"connection: keep-alive" if is_kept else b"connection: close",
        *(b"%s: %s" % each for each in headers if each[0].lower() not in OWN_HEADERS),
    ]
    head = b"\r\n".join(lines)
    if head.count(b"\n") != len(lines) + 1:
        raise ValueError("an address or a header with a line end in it")
    return b"%s\r\n\r\n%s" % (head, data)


class Events:
    """Cuts bytes into what stands behind each `data:`, wherever they were parted."""

    def __init__(self) -> None:
        self._kept = b""

    def cut(self, piece: bytes) -> list[bytes]:
        *lines, self._kept = (self._kept + piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def rest(self) -> list[bytes]:
        """Give what stands in a last line without an end."""
        return self.cut(b"\n")


class Streams:
    """Connections to any servers: `connections` requests at once, any more wait for a place."""

    def __init__(self, connections: int, deadlines: Deadlines | None = None) -> None:
        self._most = connections
        self._deadlines = deadlines or Deadlines()
        self._places = asyncio.Semaphore(connections)
        self._open: dict[Connection, Place] = {}
        self._idle: dict[Place, list[Connection]] = {}

    async def ask(
        self, url: str, request: bytes, clock: Clock, on_pieces: OnPieces | None = None
    ) -> Heard:
        """Send `request`, once, and hear the answer to its end. Cancelling drops the connection, so that the server sees it."""
        heard = Heard()
        try:
            async with asyncio.timeout(self._deadlines.silent_s):
                await self._places.acquire()
        except TimeoutError:
            heard.failure = httpx.PoolTimeout("no connection became free")
            heard.ended_ns = clock.now_ns()
            return heard
        try:
            await self._ask(_place_of(url), request, heard, clock, on_pieces)
        except httpx.HTTPError as error:
            heard.failure, heard.ended_ns = error, clock.now_ns()
        finally:
            self._places.release()
        return heard

    async def _ask(
        self, place: Place, request: bytes, heard: Heard, clock: Clock, on_pieces: OnPieces | None
    ) -> None:
        connection = self._rested(place) or await self._connect(place)
        await connection.exchange(request, heard, clock, self._deadlines, on_pieces)
        if connection.is_open:
            self._keep(place, connection)

    def _rested(self, place: Place) -> Connection | None:
        """Take the connection that rested least; the others are closed if that was too long."""
        idle = self._idle.get(place, [])
        since_s = asyncio.get_running_loop().time() - IDLE_S
        while idle:
            connection = idle.pop()
            if connection.is_open and connection.idle_since_s >= since_s:
                return connection
            connection.close()
        return None

    def _keep(self, place: Place, connection: Connection) -> None:
        if len(self._open) <= self._most:
            self._idle.setdefault(place, []).append(connection)
        else:
            connection.close()

    async def _connect(self, place: Place) -> Connection:
        loop = asyncio.get_running_loop()
        wait_s = self._deadlines.connect_s
        made = Connection(self._lost)
        self._open[made] = place
        try:
            async with asyncio.timeout(wait_s):
                await loop.create_connection(lambda: made, *place)
        except TimeoutError:
            self._drop(made)
            raise httpx.ConnectTimeout(f"no connection within {wait_s:g} s") from None
        except OSError as error:
            self._drop(made)
            raise httpx.ConnectError(str(error)) from None
        except BaseException:
            self._drop(made)
            raise
        return made

    def _drop(self, connection: Connection) -> None:
        connection.close()
        self._open.pop(connection, None)

    def _lost(self, connection: Connection) -> None:
        place = self._open.pop(connection, None)
        idle = self._idle.get(place, []) if place is not None else []
        if connection in idle:
            idle.remove(connection)

    async def aclose(self) -> None:
        """Close every connection; answers under way end with an error."""
        for connection in list(self._open):
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)


def _place_of(url: str) -> Place:
    place = urlsplit(url)
    return place.hostname or "", place.port or 80


def request_of(url: str, body: dict[str, Any], api_key: str | None = None) -> bytes:
    """Write the request for a chat that has a connection to itself; `url` is the server's."""
    key = ((b"authorization", f"Bearer {api_key}".encode()),) if api_key else ()
    return post_of(url + PATH, body, key, is_kept=False)


@dataclass(slots=True)
class Outcome:
    """What became of one chat. `first_ms` is the time to the first text, `chunks` counts events but the last."""

    first_ms: float | None = None
    chunks: int = 0
    error: str | None = None

    @property
    def is_whole(self) -> bool:
        return self.error is None


def outcome_of(heard: Heard) -> Outcome:
    """Count what came."""
    outcome, events, last = Outcome(), Events(), b""
    for at_ns, piece in heard.pieces:
        for event in events.cut(piece):
            outcome.chunks += event != b"[DONE]"
            last = event
            if outcome.first_ms is None and _TEXT.search(event):
                outcome.first_ms = (at_ns - heard.sent_ns) / MS
    if heard.failure is not None:
        outcome.error = f"{type(heard.failure).__name__}: {heard.failure}"
    elif heard.status != httpx.codes.OK:
        outcome.error = f"refused: {heard.status} {heard.body[:ERROR_CHARS_MAX]!r}"
    elif last != b"[DONE]":
        outcome.error = "the stream ended without [DONE]"
    return outcome


async def stream(url: str, request: bytes, clock: Clock) -> Outcome:
    """Send one request and hear its answer to the end."""
    return (await stream_all(url, [request], clock))[0]


async def stream_all(url: str, requests: Sequence[bytes], clock: Clock) -> list[Outcome]:
    """Send them all at once."""
    streams = Streams(len(requests), COUNTED)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(streams.ask(url, each, clock)) for each in requests]
    finally:
        await streams.aclose()
    return [outcome_of(task.result()) for task in tasks]
