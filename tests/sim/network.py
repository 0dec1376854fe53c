"""A network of hosts under virtual time: sockets, streams, and everything that can happen to them.

Each connection is two ends joined by two pipes; a pipe keeps order whatever its route does to it. Routes (from host to host, one way)
have latency, can be blocked (bytes wait, as TCP makes them) or slow. A kernel keeps a bounded window for its process, also while
that is frozen; what does not fit waits in the transport and holds the writer back. Streams behave as under TLS: a flipped bit ends them.
"""

from __future__ import annotations

import asyncio
import socket as real
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.sim.world import MS, Process, ViolationError, World

WINDOW_BYTES = 256 * 1024
SYN_RETRY_NS = 1_000 * MS
FIN = "fin"
Item = bytes | str | OSError


class Route:
    """One way between two hosts."""

    __slots__ = ("extra_ns", "is_blocked", "latency_ns", "pipes")

    def __init__(self, latency_ns: int) -> None:
        self.latency_ns = latency_ns
        self.extra_ns = 0
        self.is_blocked = False
        self.pipes: dict[Pipe, None] = {}


class Pipe:
    """One direction of a connection."""

    __slots__ = ("_arrived", "_last_ns", "_sent", "corrupt", "held", "net", "route", "target", "unread")

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
        due_ns = self._last_ns = max(due_ns, self._last_ns + 1)
        number = self._sent
        world.at(due_ns, lambda: self._arrive(number, item), None)

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
        self.read_soon()

    def read_soon(self) -> None:
        if self._is_read_due or self.protocol is None or self.process.is_frozen or not self.rx:
            return
        self._is_read_due = True
        self.process.loop.call_soon(self._read)

    def _read(self) -> None:
        self._is_read_due = False
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


class SimSocket:
    """As much of a socket as the link's dialling and listening touch."""

    def __init__(self, family: int = real.AF_INET, kind: int = 0, protocol: int = 0) -> None:
        self.family = family
        self.end: End | None = None
        self.name: tuple[str, int] = ("", 0)
        self.net: Network | None = None
        self.backlog: deque[End] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self.is_closed = False

    def setblocking(self, flag: bool) -> None:
        return

    def setsockopt(self, *_: Any) -> None:
        return

    def bind(self, address: tuple[str, int]) -> None:
        self.name = address

    def listen(self, _backlog: int) -> None:
        loop = asyncio.get_running_loop()
        process: Process = loop.process  # type: ignore[attr-defined]
        self.net = process.net.network
        self.net.listening[self.name] = (self, process)

    def getsockname(self) -> tuple[str, int]:
        return self.name

    def close(self) -> None:
        self.is_closed = True
        if self.net is not None:
            self.net.unlisten(self)
        if self.end is not None and self.end.protocol is None:
            self.end.abort()


class SocketModule:
    """Stands where `dial.py` and `listen.py` look for the module `socket`."""

    socket = SimSocket

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)


class Port:
    """A process's view of the network: what its loop asks."""

    def __init__(self, network: Network, host: str) -> None:
        self.network = network
        self.host = host
        self.ends: dict[End, None] = {}

    def resolve(self, host: str, port: int) -> list[Any]:
        return [(real.AF_INET, real.SOCK_STREAM, 6, "", (host, port))]

    def thawed(self, process: Process) -> None:
        for end in list(self.ends):
            end.read_soon()
        for listening, owner in self.network.listening.values():
            if owner is process:
                self.network.announce(listening, owner)

    async def connect(self, sock: SimSocket, address: tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        process: Process = loop.process  # type: ignore[attr-defined]
        done: asyncio.Future[End] = loop.create_future()
        if process.world.ghost is None:
            self.network.dial(process, self.host, address, done)
        sock.end = await done

    async def accept(self, sock: SimSocket) -> tuple[SimSocket, tuple[str, int]]:
        while not sock.backlog:
            sock.waiter = asyncio.get_running_loop().create_future()
            await sock.waiter
        end = sock.backlog.popleft()
        connected = SimSocket()
        connected.end = end
        assert end.peer is not None
        return connected, (end.peer.host, end.peer.port)

    async def attach(self, sock: SimSocket, protocol: Any) -> tuple[End, Any]:
        end = sock.end
        assert end is not None
        end.protocol = protocol
        protocol.connection_made(end)
        end.read_soon()
        if end.is_gone:
            end._tell(None)
        await asyncio.sleep(0)
        return end, protocol


class Network:
    """All routes and connections."""

    def __init__(self, world: World, latency_ns: Callable[[str, str], int]) -> None:
        self.world = world
        self.listening: dict[tuple[str, int], tuple[SimSocket, Process]] = {}
        self.counts: dict[str, int] = {"back-pressure": 0, "held": 0, "dials": 0}
        self.window_bytes = WINDOW_BYTES
        self.dialled: dict[tuple[str, str], int] = {}
        self.dark: dict[str, None] = {}
        self._routes: dict[tuple[str, str], Route] = {}
        self._latency_ns = latency_ns
        self._ports = 30_000

    def route(self, source: str, target: str) -> Route:
        found = self._routes.get((source, target))
        if found is None:
            found = Route(self._latency_ns(source, target))
            self._routes[(source, target)] = found
        return found

    def is_dark(self, host: str) -> bool:
        """Whether a host is without power: it answers nothing."""
        return host in self.dark

    def dial(
        self, process: Process, host: str, address: tuple[str, int], done: asyncio.Future[End]
    ) -> None:
        pair = (host, address[0])
        self.dialled[pair] = self.dialled.get(pair, 0) + 1
        self.counts["dials"] += 1

        def attempt() -> None:
            if done.done() or process.is_dead:
                return
            out, back = self.route(host, address[0]), self.route(address[0], host)
            if out.is_blocked or back.is_blocked or self.is_dark(address[0]):
                self.world.after(SYN_RETRY_NS, attempt)
                return
            self.world.after(out.latency_ns + out.extra_ns, arrive)

        def arrive() -> None:
            back = self.route(address[0], host)
            self.world.after(back.latency_ns + back.extra_ns, answer(self.listening.get(address)))

        def answer(found: tuple[SimSocket, Process] | None) -> Callable[[], None]:
            joined = None if found is None else self._join(process, host, found, address)

            def settle() -> None:
                if done.done() or process.is_dead:
                    if joined is not None:
                        joined.died()
                elif joined is None:
                    error = ConnectionRefusedError(111, "Connection refused")
                    process.loop.call_soon(_fail, done, error)
                else:
                    process.loop.call_soon(_settle, done, joined)

            return settle

        attempt()

    def _join(
        self, process: Process, host: str, found: tuple[SimSocket, Process], address: tuple[str, int]
    ) -> End:
        listening, owner = found
        self._ports += 1
        near = End(self, process, host, self._ports)
        far = End(self, owner, address[0], address[1])
        near.peer, far.peer = far, near
        near.pipe = Pipe(self, self.route(host, address[0]), far)
        far.pipe = Pipe(self, self.route(address[0], host), near)
        process.net.ends[near] = None
        owner.net.ends[far] = None
        listening.backlog.append(far)
        self.announce(listening, owner)
        return near

    def announce(self, listening: SimSocket, owner: Process) -> None:
        waiter = listening.waiter
        if listening.backlog and waiter is not None and not waiter.done() and not owner.is_frozen:
            owner.loop.call_soon(_settle, waiter, None)

    def unlisten(self, sock: SimSocket) -> None:
        found = self.listening.get(sock.name)
        if found is not None and found[0] is sock:
            del self.listening[sock.name]
            for end in sock.backlog:
                end.died()

    # --- faults -----------------------------------------------------------------------------------

    def block(self, source: str, target: str, *, is_blocked: bool) -> None:
        route = self.route(source, target)
        route.is_blocked = is_blocked
        if not is_blocked:
            for pipe in list(route.pipes):
                pipe.release()

    def connections(self, one: str, other: str) -> list[End]:
        """Open ends at `one` of connections to `other`."""
        route = self.route(one, other)
        ends = [pipe.target.peer for pipe in route.pipes]
        return [end for end in ends if end is not None and not end.is_gone]

    def forget_closed(self) -> None:
        for route in self._routes.values():
            for pipe in list(route.pipes):
                if pipe.target.is_gone and (pipe.target.peer is None or pipe.target.peer.is_gone):
                    del route.pipes[pipe]

    def kill(self, process: Process, *, power: bool = False) -> None:
        """End a process as its kernel sees it; without power nobody hears of it."""
        for name, (sock, owner) in list(self.listening.items()):
            if owner is process:
                del self.listening[name]
                for end in sock.backlog:
                    end.vanish() if power else end.died()
        for end in list(process.net.ends):
            end.vanish() if power else end.died()
        process.kill()


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: OSError) -> None:
    if not future.done():
        future.set_exception(error)
