"""Listening for links: accept, limit, shake hands, hand the link to its handler. Nodes listen for heads, and heads for nodes.

An own accept loop, because `start_server(ssl=...)` hides refusals and `start_tls` leaves back-pressure on the wrong
transport. One deadline covers a connection from accept to WELCOME; who may begin at all is `prelimits.py`'s decision. Every
refusal is counted, and logged with its cause, one line a second per address. `serve` owns every task; the handler's end closes
its link. A listening socket is closed only once nobody waits to accept on it: the event loop would go on watching its number,
and the next connection that is given the number would fail in words that have nothing to do with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from superfluid_core.clock import Clock
from superfluid_core.errors import ErrorCode, SuperfluidError
from superfluid_core.limits import LinkLimits, WireLimits
from superfluid_core.link.addresses import format_address, is_loopback, judge_bind, parse_address
from superfluid_core.link.causes import why_dial_failed, why_refused
from superfluid_core.link.link import Link, LinkClosedError
from superfluid_core.link.prelimits import LogGate, Prelimits
from superfluid_core.link.setup import LinkSetup
from superfluid_core.link.shake import NodeShake, Shake
from superfluid_core.link.tls import Credentials, server_context
from superfluid_core.logs import log
from superfluid_core.wire.messages import Hello, Refuse, Status, Welcome
from superfluid_core.wire.schema import Role

__all__ = ["Listener", "judge_bind", "parse_address"]

logger = logging.getLogger("superfluid.link")

BACKLOG = 128
HANDLER_GRACE_S = 5.0
"""How long a handler may go on after its link has closed with the listener."""

TURNS = 2
"""Of the event loop, from a connection that was accepted to who waited for it."""
REFUSING_S = 2.0
"""What a refusal may take beyond the handshake's deadline, to be read by the peer."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_BACKOFF_S_MIN, _BACKOFF_S_MAX = 0.05, 1.0


@dataclass(slots=True)
class Listener:
    """Accepts links. `welcome` answers a HELLO; `handler` owns an established link until it returns.

    `start` any number of addresses, then run `serve` as a task; `close` ends it and every link. Without keys, on an
    address that others can reach, it warns every minute. With `instead`, whoever connects meets that part of the handshake
    (a head's, for nodes that dial in) and `welcome` is never asked. `refusals` counts what did not come to WELCOME.
    """

    handler: Callable[[Link], Awaitable[None]]
    welcome: Callable[[Hello], Welcome | Refuse]
    keys: Credentials | None
    identity: str
    limits: LinkLimits
    clock: Clock
    status_source: Callable[[], Status | None] | None = None
    instead: Shake | None = None
    refusals: int = field(init=False, default=0)
    shake: Shake = field(init=False)
    _prelimits: Prelimits = field(init=False)
    _gate: LogGate = field(init=False, default_factory=LogGate)
    _sockets: list[socket.socket] = field(init=False, default_factory=list)
    _accepting: list[asyncio.Task[None]] = field(init=False, default_factory=list)
    _pending: dict[int, asyncio.Task[None]] = field(init=False, default_factory=dict)
    _tasks: dict[int, asyncio.Task[None]] = field(init=False, default_factory=dict)
    _unowned: dict[int, socket.socket] = field(init=False, default_factory=dict)
    _links: dict[int, Link] = field(init=False, default_factory=dict)
    _closing: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _reason: str = field(init=False, default="the node stops")
    _evicted: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self._prelimits = Prelimits(self.limits)
        if self.instead is not None:
            self.shake = self.instead
            return
        context = None if self.keys is None else server_context(self.keys, self.identity)
        self.shake = NodeShake(context, self.answer, self.limits.handshake_ms / 1000)

    @property
    def links(self) -> tuple[Link, ...]:
        """The established links."""
        return tuple(self._links.values())

    async def start(self, host: str, port: int) -> list[tuple[str, int]]:
        """Bind every address of the name; returns what was bound (port 0 picks one for all). Raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        addresses = list(dict.fromkeys((family, str(where[0])) for family, _, _, _, where in found))
        bound: list[socket.socket] = []
        try:
            for family, address in addresses:
                bound.append(_bind(family, address, port))
                port = port or bound[0].getsockname()[1]
        except OSError:
            for listening in bound:
                listening.close()
            raise
        self._sockets += bound
        return [(str(where[0]), int(where[1])) for where in (item.getsockname() for item in bound)]

    async def serve(self) -> None:
        """Accept until `close`. Owns every task; when it returns, all links are closed."""
        try:
            async with asyncio.TaskGroup() as group:
                for listening in self._sockets:
                    self._accepting.append(group.create_task(self._accept(listening, group)))
                if self.keys is None and any(_is_exposed(item) for item in self._sockets):
                    self._accepting.append(group.create_task(self._warn()))
                await self._closing.wait()
                await self._hear_last()
                for task in (*self._accepting, *self._pending.values()):
                    task.cancel()
                if self._accepting:
                    await asyncio.wait(self._accepting)
                self._close_sockets()
                await asyncio.gather(*[link.close(self._reason) for link in self.links])
                if self._tasks:
                    await asyncio.wait(self._tasks.values(), timeout=HANDLER_GRACE_S)
                for task in self._tasks.values():
                    task.cancel()
        finally:
            self._close_sockets()
            for link in self.links:
                link.abort(self._reason)

    async def close(self, reason: str = "the node stops") -> None:
        """Stop accepting, close every link with the reason; `serve` returns when the handlers have."""
        self._reason = reason
        self._closing.set()
        if not self._accepting:
            self._close_sockets()

    async def _hear_last(self) -> None:
        """Stop accepting, and take in what was accepted a moment ago: a cancelled accept would lose its socket."""
        loop = asyncio.get_running_loop()
        for listening in self._sockets:
            with contextlib.suppress(NotImplementedError):
                loop.remove_reader(listening)
        for _ in range(TURNS):
            await asyncio.sleep(0)

    # --- accepting ------------------------------------------------------------------------------------

    async def _accept(self, listening: socket.socket, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        backoff_s = _BACKOFF_S_MIN
        while not self._closing.is_set():
            try:
                connected, where = await loop.sock_accept(listening)
            except OSError as error:
                # out of descriptors: the connection waits in the backlog, so asking again at once would spin
                if error.errno in _EXHAUSTED:
                    self.refuse("", f"cannot accept: {error.strerror}")
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _BACKOFF_S_MAX)
                continue
            backoff_s = _BACKOFF_S_MIN
            self._admit(connected, str(where[0]), int(where[1]), group)

    def _admit(
        self, connected: socket.socket, host: str, port: int, group: asyncio.TaskGroup
    ) -> None:
        admission = self._prelimits.admit(host, self.clock.now_ns())
        if admission.number is None:
            connected.close()
            self.refuse(format_address(host, port), admission.cause, host)
            return
        if admission.evicted is not None:
            self._evicted.add(admission.evicted)
            self._pending[admission.evicted].cancel()
        number = admission.number
        self._unowned[number] = connected
        remote = format_address(host, port)
        task = group.create_task(self._serve_one(number, remote, host))
        self._pending[number] = self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _serve_one(self, number: int, remote: str, host: str) -> None:
        connected = self._unowned.pop(number)
        setup = LinkSetup(self.limits, self.clock, WireLimits(), self.status_source)
        link = Link(self.shake.role, setup)
        link.remote = remote
        try:
            extra_s = REFUSING_S if self.shake.role is Role.NODE else 0.0
            async with asyncio.timeout(self.limits.handshake_ms / 1000 + extra_s):
                await self.shake.shake(link, connected)
        except asyncio.CancelledError:
            link.abort("the handshake was given up")
            if number not in self._evicted:
                raise
            self.refuse(remote, "made way for a newer handshake", host)
            return
        except (OSError, SuperfluidError) as error:
            link.abort("the handshake failed")
            self.refuse(remote, self._why(error), host)
            return
        finally:
            self._pending.pop(number, None)
            self._evicted.discard(number)
            self._prelimits.release(number)
        await self._handle(number, link)

    def _why(self, error: OSError | SuperfluidError) -> str:
        if self.shake.role is Role.NODE:
            return why_refused(error, has_key=self.keys is not None)
        return why_dial_failed(error, self.keys)[0]

    def answer(self, hello: Hello) -> Welcome | Refuse:
        """Answer a HELLO, with room for so many heads, and so many links of each."""
        heads = [link.peer.head for link in self.links if isinstance(link.peer, Hello)]
        if hello.head not in heads and len(set(heads)) >= self.limits.heads_max:
            return Refuse(ErrorCode.OVERLOADED, "too many heads", retry_after_ms=10_000)
        if heads.count(hello.head) >= self.limits.links_per_head_max:
            return Refuse(ErrorCode.OVERLOADED, "too many links of this head", 10_000)
        return self.welcome(hello)

    async def _handle(self, number: int, link: Link) -> None:
        self._links[number] = link
        reason = "the handler has ended"
        try:
            await self.handler(link)
        except LinkClosedError:
            pass
        except asyncio.CancelledError:
            reason = self._reason
            if not self._closing.is_set():
                link.abort(reason)  # the program broke: a farewell would pass for a drain
            raise
        except Exception as error:  # noqa: BLE001 # the task's outermost edge: one link must not take the others along
            reason = "internal error"
            log(
                logger,
                logging.ERROR,
                "a link's handler failed",
                peer=link.remote,
                cause=repr(error),
            )
        finally:
            try:
                await link.close(reason)
            finally:
                link.abort(reason)
                del self._links[number]

    # --- small things ---------------------------------------------------------------------------------

    async def _warn(self) -> None:
        while True:
            who = "use this node" if self.shake.role is Role.NODE else "join as a node"
            log(logger, logging.WARNING, f"no fleet key: everybody who can connect may {who}")
            await asyncio.sleep(self.limits.insecure_warning_s)

    def refuse(self, remote: str, cause: str, host: str = "") -> None:
        """Count a refusal, and log it unless this address was logged a moment ago."""
        self.refusals += 1
        skipped = self._gate.admit(host, self.clock.now_ns())
        if skipped is not None:
            log(logger, logging.WARNING, "refused a link", peer=remote, cause=cause, more=skipped)

    def _close_sockets(self) -> None:
        for item in (*self._sockets, *self._unowned.values()):
            item.close()
        self._sockets.clear()
        self._unowned.clear()


def _bind(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    # the protocol is named because asyncio turns Nagle's delays off for sockets that name it
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != "::"))
        listening.setblocking(False)
        listening.bind((address, port))
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _is_exposed(listening: socket.socket) -> bool:
    return not is_loopback(str(listening.getsockname()[0]))
