"""A network of hosts under virtual time: sockets, streams, and everything that can happen to them.

Routes (from host to host, one way) have latency, can be blocked (bytes wait, as TCP makes them) or slow. A host without power
answers nothing; a listening socket takes connections while its process is frozen, as a kernel does. Streams are `stream.py`'s.
"""

from __future__ import annotations

import asyncio
import socket as real
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.sim.stream import FIN, WINDOW_BYTES, End, Item, Pipe, Route
from tests.sim.world import MS, Process, World

__all__ = ["FIN", "End", "Item", "Network", "Port", "SimSocket", "SocketModule"]

SYN_RETRY_NS = 1_000 * MS


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
        self,
        process: Process,
        host: str,
        found: tuple[SimSocket, Process],
        address: tuple[str, int],
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
        if is_blocked and not route.is_blocked:
            route.blocked_ns = self.world.now_ns
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
