"""A TCP proxy between a head and a node that breaks what passes through it, as a seeded script says.

One thread with an event loop of its own, loopback only. Directions are the head's: UP to the node, DOWN from it. A *held*
direction is a black hole: nothing passes, nothing is lost and no end of a connection is told, exactly as with a peer
behind a dead cable; what waits passes when it is released. Everything else is done to bytes at known offsets, so a
fault can be repeated. Methods may be called from any thread and return when the fault is in force.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Self, TypeVar

RECEIVE_BYTES = 65_536
CALL_SECONDS = 10.0
CONNECT_SECONDS = 5.0
KEPT_BYTES_MAX = 1 << 20
RESET_LINGER = struct.pack("ii", 1, 0)

T = TypeVar("T")


class Way(StrEnum):
    """The direction of bytes, seen from the head."""

    UP = "up"
    DOWN = "down"


BOTH = (Way.UP, Way.DOWN)


class End(StrEnum):
    """How a cut connection ends."""

    RST = "rst"
    FIN = "fin"


@dataclass(slots=True)
class Weather:
    """What happens to every byte of one direction."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    is_open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.is_open.set()


@dataclass(slots=True)
class Wound:
    """What happens to one byte of one connection: at `offset` of `way` a bit is flipped, or the connection is cut."""

    way: Way
    offset: int
    end: End | None = None
    bit: int = 0


@dataclass(slots=True)
class Pipe:
    """One connection: a socket to the head, one to the node, and how many bytes passed each way."""

    number: int
    near: socket.socket
    far: socket.socket | None = None
    passed: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(Way, 0))
    wound: Wound | None = None
    task: asyncio.Task[None] | None = None
    is_reset: bool = False


Taps = Callable[[int, Way, bytes], None]


class ChaosProxy:
    """Listens on a free port of loopback and connects to `target` for every client.

    `tap` sees (connection, direction, bytes) of all that is passed on, in the proxy's thread.
    """

    def __init__(self, target: str, tap: Taps | None = None) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host.strip("[]"), int(port))
        self._tap = tap
        self._pipes: dict[int, Pipe] = {}
        self._numbers = itertools.count(1)
        self._next_wound: Wound | None = None
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self.accepted = 0
        self.broken = 0
        self._loop = asyncio.new_event_loop()
        self._weather: dict[Way, Weather] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos-proxy")
        self._thread.daemon = True
        self._thread.start()
        self._port = 0
        self._call(self._begin)
        self.address = f"127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- faults -------------------------------------------------------------------------------

    def hold(self, *ways: Way) -> None:
        """Make a black hole of these directions (both without any), for connections that stand and new ones."""

        def change() -> None:
            for way in ways or BOTH:
                self._weather[way].is_open.clear()

        self._call(change)

    def release(self) -> None:
        """Let everything pass again, what has waited first."""

        def change() -> None:
            for weather in self._weather.values():
                weather.is_open.set()

        self._call(change)

    def slow(self, way: Way, *, delay_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        """Delay every piece, limit the bandwidth; 0 is as fast as it goes."""

        def change() -> None:
            self._weather[way].delay_s = delay_s
            self._weather[way].bytes_per_s = bytes_per_s

        self._call(change)

    def cut(self, end: End) -> int:
        """End every connection now; returns how many there were."""

        def change() -> int:
            pipes = list(self._pipes.values())
            for pipe in pipes:
                self._break(pipe, end)
            return len(pipes)

        return self._call(change)

    def wound(self, way: Way, after: int, *, end: End | None = None, bit: int = 0) -> None:
        """Strike every standing connection once `after` more bytes of `way` have passed: cut it, or flip a bit."""

        def change() -> None:
            for pipe in self._pipes.values():
                pipe.wound = Wound(way, pipe.passed[way] + after, end, bit)

        self._call(change)

    def wound_next(self, way: Way, offset: int, *, end: End | None = None, bit: int = 0) -> None:
        """Strike the next connection at byte `offset` of `way`."""

        def change() -> None:
            self._next_wound = Wound(way, offset, end, bit)

        self._call(change)

    def refuse(self) -> None:
        """Refuse new connections; those that stand go on."""
        self._call(self._stop_listening)

    def accept(self) -> None:
        """Listen again, on the same port."""
        self._call(self._listen)

    def retarget(self, target: str) -> None:
        """Connect elsewhere from now on."""
        host, _, port = target.rpartition(":")
        self._target = (host.strip("[]"), int(port))

    def passed(self) -> dict[int, dict[Way, int]]:
        """Bytes of the standing connections so far."""
        return self._call(lambda: {n: dict(pipe.passed) for n, pipe in self._pipes.items()})

    def close(self) -> None:
        """End every connection and the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CALL_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_SECONDS)
        self._loop.close()

    # --- in the thread ------------------------------------------------------------------------

    def _call(self, work: Callable[[], T]) -> T:
        """Run `work` in the loop's thread and wait for it."""

        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(CALL_SECONDS)

    def _begin(self) -> None:
        self._weather = {way: Weather() for way in Way}
        self._listen()

    def _listen(self) -> None:
        if self._listener is not None:
            return
        made = socket.create_server(("127.0.0.1", self._port), backlog=128)
        made.setblocking(False)
        self._listener = made
        self._port = made.getsockname()[1]
        self._accepting = self._loop.create_task(self._accept(made))

    def _stop_listening(self) -> None:
        if self._listener is not None and self._accepting is not None:
            self._accepting.cancel()
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            near, _ = await self._loop.sock_accept(listener)
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pipe = Pipe(next(self._numbers), near)
            pipe.wound, self._next_wound = self._next_wound, None
            self._pipes[pipe.number] = pipe
            self.accepted += 1
            pipe.task = self._loop.create_task(self._serve(pipe))

    async def _serve(self, pipe: Pipe) -> None:
        try:
            for way in BOTH:
                await self._weather[way].is_open.wait()
            async with asyncio.timeout(CONNECT_SECONDS):
                pipe.far = await self._connect()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(pipe, Way.UP, pipe.near, pipe.far))
                group.create_task(self._pump(pipe, Way.DOWN, pipe.far, pipe.near))
        except (OSError, TimeoutError, ExceptionGroup):
            pipe.is_reset = True
        finally:
            self._drop(pipe)

    async def _connect(self) -> socket.socket:
        far = socket.socket()
        far.setblocking(False)
        try:
            await self._loop.sock_connect(far, self._target)
        except BaseException:
            far.close()
            raise
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return far

    async def _pump(self, pipe: Pipe, way: Way, source: socket.socket, to: socket.socket) -> None:
        weather = self._weather[way]
        while True:
            await weather.is_open.wait()
            data = await self._loop.sock_recv(source, RECEIVE_BYTES)
            if weather.delay_s:
                await asyncio.sleep(weather.delay_s)
            await weather.is_open.wait()
            if not data:
                to.shutdown(socket.SHUT_WR)
                return
            data = self._strike(pipe, way, data)
            await self._loop.sock_sendall(to, data)
            pipe.passed[way] += len(data)
            if self._tap is not None:
                self._tap(pipe.number, way, data)
            if weather.bytes_per_s:
                await asyncio.sleep(len(data) / weather.bytes_per_s)
            if self._cuts_here(pipe, way):
                return  # what has been read behind the cut must not pass

    def _strike(self, pipe: Pipe, way: Way, data: bytes) -> bytes:
        """Apply the wound of this connection if it lies in these bytes."""
        wound = pipe.wound
        if wound is None or wound.way is not way:
            return data
        place = wound.offset - pipe.passed[way]
        if place >= len(data):
            return data
        if wound.end is not None:
            return data[:place]
        pipe.wound = None
        self.broken += 1
        harmed = bytearray(data)
        harmed[place] ^= 1 << wound.bit
        return bytes(harmed)

    def _cuts_here(self, pipe: Pipe, way: Way) -> bool:
        wound = pipe.wound
        if wound is None or wound.end is None or wound.way is not way:
            return False
        if pipe.passed[way] < wound.offset:
            return False
        self._break(pipe, wound.end)
        return True

    def _break(self, pipe: Pipe, end: End) -> None:
        """End both sides; the task that serves them closes the sockets."""
        self.broken += 1
        pipe.wound = None
        pipe.is_reset = end is End.RST
        if pipe.task is not None:
            pipe.task.cancel()

    def _drop(self, pipe: Pipe) -> None:
        self._pipes.pop(pipe.number, None)
        for one in (pipe.near, pipe.far):
            if one is None:
                continue
            if pipe.is_reset:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_LINGER)
            one.close()

    async def _end(self) -> None:
        self._stop_listening()
        pipes = list(self._pipes.values())
        for pipe in pipes:
            self._break(pipe, End.RST)
        await asyncio.gather(*(p.task for p in pipes if p.task), return_exceptions=True)
