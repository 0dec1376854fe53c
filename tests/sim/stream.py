"""One connection of the virtual network: two ends, each kernel buffers and asyncio transport in one, joined by two pipes.

A pipe keeps order whatever its route does to it, and proves it by numbers. A kernel keeps a bounded window for its process, also while
that is frozen; what does not fit waits in the transport and holds the writer back. Streams behave as under TLS: a flipped bit ends them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.sim.world import Process, ViolationError

if TYPE_CHECKING:
    from tests.sim.network import Network

WINDOW_BYTES = 256 * 1024
FIN = "fin"
Item = bytes | str | OSError


class Route:
    """One way between two hosts."""

    __slots__ = ("blocked_ns", "extra_ns", "is_blocked", "latency_ns", "pipes")

    def __init__(self, latency_ns: int) -> None:
        self.latency_ns = latency_ns
        self.extra_ns = 0
        self.is_blocked = False
        self.blocked_ns = 0
        self.pipes: dict[Pipe, None] = {}


class Pipe:
    """One direction of a connection."""

    __slots__ = (
        "_arrived",
        "_last_ns",
        "_sent",
        "corrupt",
        "held",
        "net",
        "route",
        "target",
        "unread",
    )

    def __init__(self, net: Network, route: Route, target: End) -> None:
        self.net = net
        self.route = route
        self.target = target
        self.held: deque[tuple[int, Item]] = deque()
        self.unread = 0
        self.corrupt: Callable[[bytes], list[Item]] | None = None
        self._last_ns = 0
        self._sent = 0
        self._arrived = 0
        route.pipes[self] = None

    def send(self, item: Item) -> None:
        if isinstance(item, bytes):
            self.unread += len(item)
            if self.corrupt is not None:
                corrupt, self.corrupt = self.corrupt, None
                for each in corrupt(item):
                    self._post(each)
                return
        self._post(item)

    def _post(self, item: Item) -> None:
        self._sent += 1
        world = self.net.world
        due_ns = world.now_ns + self.route.latency_ns + self.route.extra_ns
        if due_ns <= self._last_ns:
            due_ns = self._last_ns + 1
        self._last_ns = due_ns
        world.at(due_ns, partial(self._arrive, self._sent, item), None)

    def _arrive(self, number: int, item: Item) -> None:
        if self.route.is_blocked or self.held:
            self.held.append((number, item))
            self.net.counts["held"] += 1
            return
        self._deliver(number, item)

    def _deliver(self, number: int, item: Item) -> None:
        if number != self._arrived + 1:
            raise ViolationError("the simulated network broke the order of a stream")
        self._arrived = number
        self.target.arrived(item)

    def release(self) -> None:
        while self.held and not self.route.is_blocked:
            self._deliver(*self.held.popleft())


class End(asyncio.Transport):
    """A process's end of a connection: kernel buffers and asyncio transport in one."""

    def __init__(self, net: Network, process: Process, host: str, port: int) -> None:
        super().__init__()
        self.net = net
        self.process = process
        self.host = host
        self.port = port
        self.peer: End | None = None
        self.pipe: Pipe | None = None
        self.protocol: Any = None
        self.rx: deque[Item] = deque()
        self.is_gone = False
        self.is_mute = False
        self.is_stuck = False
        self._is_told = False
        self._is_closing = False
        self._is_reading = True
        self._is_paused = False
        self._is_read_due = False
        self._buffer: deque[bytes] = deque()
        self._buffered = 0
        self._high, self._low = 64 * 1024, 16 * 1024

    # --- transport --------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self.is_gone or self._is_closing or self.process.world.ghost is not None:
            return
        if self.is_stuck:
            return
        self._buffer.append(bytes(data))
        self._buffered += len(data)
        self.flush()
        if self._buffered > self._high and not self._is_paused:
            self._is_paused = True
            self.net.counts["back-pressure"] += 1
            self.protocol.pause_writing()

    def flush(self) -> None:
        pipe = self.pipe
        while self._buffer and pipe is not None and pipe.unread < self.net.window_bytes:
            data = self._buffer.popleft()
            self._buffered -= len(data)
            pipe.send(data)
        if self._is_paused and self._buffered <= self._low:
            self._is_paused = False
            self._soon(self.protocol.resume_writing)
        if self._is_closing and not self._buffer and not self.is_gone:
            self._leave(None, FIN)

    def close(self) -> None:
        if self.is_gone:
            self._tell(None)
        elif not self._is_closing:
            self._is_closing = True
            self.flush()

    def abort(self) -> None:
        self._is_closing = True
        self._leave(None, FIN)
        self._tell(None)

    def is_closing(self) -> bool:
        return self._is_closing or self.is_gone

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 * 1024 if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._buffered

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self.read_soon()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    # --- what comes in ----------------------------------------------------------------------------

    def arrived(self, item: Item) -> None:
        if self.is_gone:
            is_told = isinstance(item, bytes) and not self.is_mute
            if is_told and self.pipe is not None and not self.net.is_dark(self.host):
                self.pipe.send(ConnectionResetError("connection reset by peer"))
            return
        self.rx.append(item)
        if not self._is_read_due:
            self.read_soon()

    def read_soon(self) -> None:
        if self._is_read_due or self.protocol is None or self.process.is_frozen or not self.rx:
            return
        self._is_read_due = True
        self.process.loop.call_soon(self._read)

    def _read(self) -> None:
        self._is_read_due = False
        if self.is_stuck:
            return
        chunks: list[bytes] = []
        while self.rx and self._is_reading and isinstance(self.rx[0], bytes):
            chunks.append(self.rx.popleft())  # type: ignore[arg-type]
        if chunks:
            data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            self._consumed(len(data))
            if not self.is_closing():
                self.protocol.data_received(data)
        if not self.rx or self.is_gone:
            return
        last = self.rx[0]
        if isinstance(last, OSError):
            self.rx.clear()
            self._leave(last, None)
        elif last == FIN and self._is_reading:
            self.rx.popleft()
            if not self._is_closing:
                self.protocol.eof_received()
            self.close()
        elif self._is_reading:
            self.read_soon()

    def _consumed(self, size: int) -> None:
        peer = self.peer
        if peer is not None and peer.pipe is not None:
            peer.pipe.unread -= size
            if peer._buffer:
                peer.flush()

    # --- the end ----------------------------------------------------------------------------------

    def _leave(self, error: OSError | None, word: Item | None) -> None:
        if self.is_gone:
            return
        has_unread = any(isinstance(item, bytes) for item in self.rx)
        self.vanish()
        if word is not None and self.pipe is not None and self.process.world.ghost is None:
            self.pipe.send(ConnectionResetError("connection reset by peer") if has_unread else word)
        self._tell(error)

    def _tell(self, error: OSError | None) -> None:
        """Tell the protocol, once, that it is over."""
        if self.protocol is not None and not self._is_told:
            self._is_told = True
            self._soon(self.protocol.connection_lost, error)

    def vanish(self) -> None:
        """Go without a word to anybody."""
        self.is_gone = True
        self.process.net.ends.pop(self, None)
        self.rx.clear()
        self._buffer.clear()
        self._buffered = 0

    def break_with(self, error: OSError, *, is_mute: bool = False) -> None:
        """What a reset does to this end; a mute one answers nothing that still comes."""
        self.is_mute = is_mute
        self._leave(error, None)

    def died(self) -> None:
        """The process is gone: its kernel closes for it."""
        has_unread = any(isinstance(item, bytes) for item in self.rx)
        if not self.is_gone and self.pipe is not None:
            self.pipe.send(ConnectionResetError("connection reset by peer") if has_unread else FIN)
        self.vanish()

    def _soon(self, callback: Callable[..., object], *args: Any) -> None:
        if not self.process.is_dead:
            self.process.loop.call_soon(callback, *args)
