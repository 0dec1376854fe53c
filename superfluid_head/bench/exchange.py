"""One HTTP/1.1 connection of the bench's own client: it sends a request and keeps what comes, with the time when it came.

On a machine that runs the servers too, a client of a hundred streams must cost little: whatever it is late by is measured as a pause
of theirs. So bytes are stamped as soon as the event loop has them, httptools takes them out of HTTP's frames, and nothing looks into
them here. A failure is one of httpx' errors, kept in what was heard rather than raised, because the part before it counts as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import httptools
import httpx

from superfluid_core.clock import Clock

ANSWER_BYTES_MAX = 256 << 20
"""An answer that is longer is given up: everything that came is kept until it ends."""
BODILESS = (204, 304)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long to wait for a connection (or a place for one), for the next byte, and for a whole answer."""

    connect_s: float = 10.0
    silent_s: float = 600.0
    total_s: float = 3_600.0


@dataclass(slots=True)
class Heard:
    """What came for a request. `status` is 0 until its head was read; `pieces` are parts of the body with their times."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[int, bytes]] = field(default_factory=list)
    sent_ns: int = 0
    ended_ns: int = 0
    failure: httpx.HTTPError | None = None

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


OnPieces = Callable[[Heard], None]


class Connection(asyncio.Protocol):
    """One request at a time. `is_open` says whether it can carry another one while none is under way."""

    def __init__(self, on_lost: Callable[[Connection], None]) -> None:
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._is_over = True
        self.is_open = False
        self.idle_since_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def close(self) -> None:
        """Drop the connection at once; who still waits for an answer on it is told by `connection_lost`."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    async def exchange(
        self,
        request: bytes,
        heard: Heard,
        clock: Clock,
        deadlines: Deadlines,
        on_pieces: OnPieces | None,
    ) -> None:
        """Send `request` and fill `heard` until the answer or the connection ends.

        `on_pieces` is called after bytes came, by the task that waits here. If that is cancelled or raises, the connection is dropped.
        """
        self._begin(heard, clock, deadlines, is_live=on_pieces is not None)
        try:
            assert self._transport is not None, "it was made by a loop"
            if self.is_open:
                self._transport.write(request)
            else:
                self._end(httpx.RemoteProtocolError("the connection was lost before the request"))
            while not self._is_over:
                await self._news.wait()
                self._news.clear()
                if on_pieces is not None:
                    on_pieces(heard)
        finally:
            self._timer.cancel()
            self._parser = None  # it holds this connection: a cycle for every request
            if not self._is_over or not self._is_kept:
                self._is_over = True
                self.close()
            self.idle_since_s = self._loop.time()

    def _begin(self, heard: Heard, clock: Clock, deadlines: Deadlines, *, is_live: bool) -> None:
        self._heard, self._clock, self._deadlines = heard, clock, deadlines
        self._parser = httptools.HttpResponseParser(self)
        self._news = asyncio.Event()
        self._is_live = is_live
        self._is_over = self._is_kept = self._ends_with_connection = False
        self._room = ANSWER_BYTES_MAX
        self._now_ns = heard.sent_ns = clock.now_ns()
        self._heard_s = now_s = self._loop.time()
        self._total_at_s = now_s + deadlines.total_s
        self._timer = self._loop.call_at(self._due_s(), self._look)

    # --- what the event loop brings ---------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_over or self._parser is None:
            self._is_kept = False  # nobody asked for this
            self.close()
            return
        self._now_ns = self._clock.now_ns()
        self._heard_s = self._loop.time()
        self._room -= len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._is_kept = False
            self._end(httpx.RemoteProtocolError(f"this is not HTTP: {error}"))
        if self._room < 0:
            self._end(httpx.ReadError(f"an answer of more than {ANSWER_BYTES_MAX} bytes"))
        if self._is_live:
            self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if not self._is_over:
            self._now_ns = self._clock.now_ns()
            self._end(self._failure(exc))
        self._on_lost(self)

    def _failure(self, exc: Exception | None) -> httpx.HTTPError | None:
        if exc is not None:
            return httpx.ReadError(str(exc))
        if not self._heard.status:
            return httpx.RemoteProtocolError("the server ended the connection without an answer")
        if self._ends_with_connection:
            return None
        return httpx.RemoteProtocolError("the server ended the connection in the middle")

    # --- what the parser finds in it --------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_over:
            self._is_kept = False  # a second answer

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._heard.status:  # later ones are trailers
            self._heard.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None, "it calls"
        status, headers = self._parser.get_status_code(), self._heard.headers
        if status < httpx.codes.OK:
            headers.clear()  # an interim answer; the real one follows
        elif not self._is_over:
            self._heard.status = status
            has_end = "content-length" in headers or "transfer-encoding" in headers
            self._ends_with_connection = not has_end and status not in BODILESS

    def on_body(self, body: bytes) -> None:
        if not self._is_over:
            self._heard.pieces.append((self._now_ns, body))

    def on_message_complete(self) -> None:
        if self._heard.status and not self._is_over:
            assert self._parser is not None, "it calls"
            self._is_kept = self._parser.should_keep_alive()
            self._end(None)

    # --- the end ----------------------------------------------------------------------------------

    def _end(self, failure: httpx.HTTPError | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._heard.failure = failure
            self._heard.ended_ns = self._now_ns
            self._news.set()

    def _due_s(self) -> float:
        return min(self._heard_s + self._deadlines.silent_s, self._total_at_s)

    def _look(self) -> None:
        """See whether it is too late: once in a while, so that a byte that comes moves no timer."""
        due_s = self._due_s()
        if self._loop.time() < due_s:
            self._timer = self._loop.call_at(due_s, self._look)
            return
        self._now_ns = self._clock.now_ns()
        is_silent = due_s < self._total_at_s
        silent = f"nothing came for {self._deadlines.silent_s:g} s"
        late = f"the answer was not whole after {self._deadlines.total_s:g} s"
        self._end(httpx.ReadTimeout(silent if is_silent else late))
