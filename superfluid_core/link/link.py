"""An established link: messages in and out over one transport.

A Link owns no task. Everything happens in callbacks of its transport and one timer, and inside `send`, `receive` and `close` of its user; whoever made
it (dial, Listener) hands it on, whoever holds it closes it. Outgoing messages stay values until the transport can take them, so that a fenced session's
can be purged; incoming ones wait in a bounded queue, and reading pauses only while the consumer is behind. Neither side can make the other hold more
than named bounds: a peer that does not read is cut off, one that drips a frame runs into its deadline, an idle one is pinged (head) or dropped (node).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable

from superfluid_core.clock import SECOND
from superfluid_core.errors import (
    ErrorCode,
    LocalProtocolError,
    RemoteProtocolError,
    SuperfluidError,
)
from superfluid_core.link.inbox import Inbox
from superfluid_core.link.outbox import Outbox
from superfluid_core.link.protocol import LinkProtocol
from superfluid_core.link.setup import LinkSetup
from superfluid_core.link.watch import Watch
from superfluid_core.logs import log
from superfluid_core.wire.connection import Connection
from superfluid_core.wire.messages import Goaway, Hello, LinkError, Message, Ping, Pong, Welcome
from superfluid_core.wire.schema import Role
from superfluid_core.wire.states import State

logger = logging.getLogger("superfluid.link")

WRITE_HIGH_BYTES = 64 * 1024
WRITE_LOW_BYTES = 16 * 1024
CLOSE_GRACE_S = 1.0
BROKEN = "the connection broke"
Taker = Callable[[Message], bool]
SLOW_PEER = "slow peer: it does not read what is sent"


class LinkClosedError(SuperfluidError):
    """Raised when a link is used that has closed; `reason` is for people, `cause` what the transport said."""

    code = ErrorCode.NODE_LOST
    retryable = True

    def __init__(self, reason: str, cause: BaseException | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.cause = cause


class Link:
    """One end of a link; see the module's text for who owns what. One consumer at a time calls `receive`.

    `on_backlog` is called before what has waited is written: whoever queued it can still purge what has become untrue.
    """

    def __init__(self, role: Role, setup: LinkSetup) -> None:
        self.role = role
        self.remote = ""
        self.identity: str | None = None
        self.bytes_in = 0
        self.bytes_out = 0
        self.protocol = LinkProtocol(self)
        self._setup = setup
        self._limits = setup.limits
        self._clock = setup.clock
        self._loop = asyncio.get_running_loop()
        self._connection = Connection(role, setup.wire)
        self._transport: asyncio.Transport | None = None
        self._peer: Hello | Welcome | None = None
        self._outbox = Outbox()
        self.on_backlog: Callable[[], None] = lambda: None
        self._inbox = Inbox()
        self._waiter: asyncio.Future[None] | None = None
        self._taker: Taker | None = None
        self._is_writable = True
        self._is_reading = True
        self._reason: str | None = None
        self._cause: BaseException | None = None
        self._farewell = ""
        self._done = asyncio.Event()
        self._lost = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._due_ns = 0
        self.opened_ns = self._clock.now_ns()
        self._watch = Watch(role, self._limits, self.opened_ns)

    @property
    def peer(self) -> Hello | Welcome:
        """The HELLO of the head, or the WELCOME of the node, at the other end."""
        if self._peer is None:
            raise LocalProtocolError("the link is not established yet")
        return self._peer

    @property
    def features(self) -> frozenset[str]:
        return self._connection.features

    @property
    def minor(self) -> int:
        return self._connection.minor or 0

    @property
    def is_open(self) -> bool:
        return self._reason is None and self._connection.state is State.OPEN

    @property
    def is_going_away(self) -> bool:
        """Whether the peer said GOAWAY: open nothing more here."""
        return self._connection.is_going_away

    @property
    def close_reason(self) -> str | None:
        return self._reason

    @property
    def last_received_ns(self) -> int:
        """When the last bytes came."""
        return self._watch.last_received_ns

    @property
    def round_trip_ns(self) -> int | None:
        """How long the last answered PING took; None before the first."""
        return self._watch.round_trip_ns

    @property
    def handed_bytes(self) -> int:
        """How much was given to this link to send so far, written or still queued."""
        return self.bytes_out + self._outbox.bytes

    def wants_rekey(self, now_ns: int) -> bool:
        """Whether it is old or used enough to be replaced by a fresh one (make before break)."""
        is_old = now_ns - self.opened_ns >= self._limits.rekey_s * SECOND
        return is_old or self.bytes_in + self.bytes_out >= self._limits.rekey_bytes

    # --- out ----------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """As `send_all` for one."""
        self.send_all((message,))

    def send_all(self, messages: Iterable[Message]) -> None:
        """Write now what the transport can take, small messages in one write (a system call costs more than they do), and queue the rest.

        Raises LinkClosedError when closed (or closed by this: the queue was full, the peer does not read), and
        LocalProtocolError, with the link as it was, for a message that must not be sent; those before it are.
        """
        ready = b""
        try:
            for message in messages:
                if self._reason is not None:
                    raise LinkClosedError(self._reason, self._cause)
                if not self._is_writable or self._outbox:
                    self._queue(message)
                    continue
                ready += self._connection.send(message)
                if len(ready) >= WRITE_LOW_BYTES:
                    data, ready = ready, b""
                    self._write(data)
        finally:
            if ready:
                self._write(ready)
        if self._is_closed():
            raise LinkClosedError(BROKEN)

    def _queue(self, message: Message) -> None:
        self._outbox.push(message)
        if self._outbox.bytes > self._limits.outgoing_bytes_max:
            self.abort(SLOW_PEER)
            raise LinkClosedError(SLOW_PEER)

    def purge(self, session: int, epoch: int) -> int:
        """Take back what is queued and not yet written of a placement; returns how many messages and rows."""
        return self._outbox.purge(session, epoch)

    # --- in -----------------------------------------------------------------------------------------

    async def receive(self) -> Message:
        """Wait for the next message. Raises LinkClosedError once closed and everything received was handed out."""
        while not self._inbox:
            if self._reason is not None:
                raise LinkClosedError(self._reason, self._cause)
            assert self._waiter is None, "one consumer at a time"
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._inbox.pop()
        if not self._is_reading and self._inbox.has_room:
            self._resume_reading()
        return message

    def offer(self, taker: Taker) -> None:
        """Have what comes while `receive` waits given to `taker` at once; what that does not take, `receive` returns.

        So no turn of the loop stands between the transport and who listens. What `taker` raises, `receive` raises.
        """
        self._taker = taker

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            try:
                message = await self.receive()
            except LinkClosedError:
                return
            yield message

    # --- the end ------------------------------------------------------------------------------------

    async def close(self, reason: str) -> None:
        """Say GOAWAY, write what is queued, close; at most about a second. Harmless when closed."""
        if self._reason is None:
            if self._connection.state is State.OPEN:
                self._review()
                self._outbox.push(Goaway(reason))
                self._flush(force=True)
            self._finish(reason)
            self._close_transport()
        if self._transport is not None:
            await self._lost.wait()

    async def wait_closed(self) -> str:
        """Wait for the end without reading; returns the reason."""
        await self._done.wait()
        return self._reason or ""

    def abort(self, reason: str) -> None:
        """Close at once, without a word to the peer. Harmless when closed."""
        self._finish(reason)
        if self._transport is not None:
            self._transport.abort()

    # --- handshake, for dial and Listener ------------------------------------------------------------

    def establish(self, peer: Hello | Welcome) -> None:
        """Start the timers of an established link."""
        self._peer = peer
        if isinstance(peer, Welcome):
            self._watch.stay_below(peer.idle_timeout_ms)
        self._arm()

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._transport

    # --- callbacks of the transport -------------------------------------------------------------------

    def on_connected(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES, low=WRITE_LOW_BYTES)
        if self._reason is not None:
            transport.abort()

    def on_data(self, data: bytes) -> None:
        if self._reason is not None:
            return
        now_ns = self._clock.now_ns()
        self._watch.last_received_ns = now_ns
        self.bytes_in += len(data)
        self._connection.receive_data(data, now_ns)
        try:
            while (message := self._connection.next_event()) is not None:
                self._deliver(message, now_ns)
                if self._is_closed():
                    return
        except RemoteProtocolError as breach:
            self._on_breach(breach)
            return
        if self._connection.is_mid_frame:
            self._arm()

    def on_eof(self) -> None:
        if self._reason is None:
            try:
                self._connection.receive_eof()
                self._gone(None)  # now: until the transport says so, somebody could still send
            except RemoteProtocolError as breach:
                self._finish(breach.message, breach)
            self._close_transport()

    def _gone(self, error: BaseException | None) -> None:
        why = f"the connection broke: {error}" if error else "the peer closed the connection"
        self._finish(f"{why} ({self._farewell})" if self._farewell else why, error)

    def on_lost(self, error: BaseException | None) -> None:
        if self._reason is None:
            self._gone(error)
        if self._grace is not None:
            self._grace.cancel()
        self._lost.set()

    def on_writable(self, *, is_writable: bool) -> None:
        if is_writable:
            self._review()
        self._is_writable = is_writable
        self._flush()

    # --- inside ---------------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        if self._transport is None:
            raise LocalProtocolError("the link has no transport yet")
        if self._transport.is_closing():  # broken, nobody was told yet: writing only fills the log
            self._finish(BROKEN)
            return
        self._watch.last_sent_ns = self._clock.now_ns()
        self.bytes_out += len(data)
        self._transport.write(data)

    def _say(self, message: Ping | Pong) -> None:
        """Send what the link says by itself; failures end the link, not the callback."""
        try:
            self.send(message)
        except LinkClosedError:
            pass
        except LocalProtocolError as error:
            self._on_own_fault(error)

    def _on_own_fault(self, error: LocalProtocolError) -> None:
        log(logger, logging.ERROR, "a queued message cannot be sent", cause=error.message)
        self.abort(f"internal error: {error.message}")

    def _review(self) -> None:
        """Have what waited for the transport looked at once more before it leaves."""
        if self._outbox:
            self.on_backlog()

    def _flush(self, *, force: bool = False) -> None:
        while self._outbox and self._reason is None and (force or self._is_writable):
            try:
                self._write(self._connection.send(self._outbox.pop()))
            except LocalProtocolError as error:
                self._on_own_fault(error)

    def _deliver(self, message: Message, now_ns: int) -> None:
        if isinstance(message, Ping):
            if self._watch.may_answer(now_ns):
                source = self._setup.status_source
                self._say(Pong(message.nonce, None if source is None else source()))
            return
        if isinstance(message, Pong):
            self._watch.on_pong(message.nonce, now_ns)
            if self.role is Role.NODE:
                return
        elif isinstance(message, LinkError):
            self._finish(f"the peer reported {message.code}: {message.text}")
            self._close_transport()
            return
        elif isinstance(message, Goaway):
            self._farewell = message.reason
        if self._is_taken(message):
            return
        self._inbox.push(message)
        if self._is_reading and self._inbox.is_full and self._transport is not None:
            self._is_reading = False
            self._transport.pause_reading()
        self._wake()

    def _is_taken(self, message: Message) -> bool:
        """Give it away, if somebody waits and nothing is before it."""
        waiter, taker = self._waiter, self._taker
        if taker is None or waiter is None or waiter.done() or self._inbox:
            return False
        try:
            return taker(message)
        except Exception as error:  # noqa: BLE001  # the consumer's, raised where it waits
            waiter.set_exception(error)
            return True

    def _is_closed(self) -> bool:
        return self._reason is not None

    def _resume_reading(self) -> None:
        self._is_reading = True
        if self._transport is not None and self._reason is None:
            self._connection.forgive(self._clock.now_ns())
            self._transport.resume_reading()
            self._arm()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _frame_deadline_ns(self) -> int | None:
        return self._connection.frame_deadline_ns() if self._is_reading else None

    def _arm(self) -> None:
        """Look again when something is due; an earlier look that is planned already will do."""
        if self._peer is None or self._is_closed():
            return
        due_ns, deadline_ns = self._watch.due_ns(), self._frame_deadline_ns()
        if deadline_ns is not None:
            due_ns = min(due_ns, deadline_ns)
        if self._timer is not None:
            if self._due_ns <= due_ns:
                return
            self._timer.cancel()
        self._due_ns = due_ns
        delay_s = max(0.001, (due_ns - self._clock.now_ns()) / SECOND)
        self._timer = self._loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now_ns = self._clock.now_ns()
        if not self._is_reading or self._watch.has_slept(self._due_ns, now_ns):
            # what the peer sent meanwhile is still unread, so nobody is judged yet
            self._watch.forgive(now_ns)
            self._connection.forgive(now_ns)
        deadline_ns = self._frame_deadline_ns()
        if deadline_ns is not None and deadline_ns <= now_ns:
            self._on_breach(RemoteProtocolError("a frame did not arrive whole in time"))
            return
        if self._watch.is_idle(now_ns):
            self._finish("idle for too long")
            self._close_transport()
            return
        nonce = self._watch.next_ping(now_ns)
        if nonce is not None and self.is_open:
            self._say(Ping(nonce))
        self._arm()

    def _on_breach(self, breach: RemoteProtocolError) -> None:
        """Tell the peer what it did, as far as that is possible, and close."""
        self._outbox.clear()
        if self._connection.state is State.OPEN or self._connection.state is State.BROKEN:
            self._write(self._connection.send(LinkError(breach.code, breach.message)))
        self._finish(f"protocol breach by the peer: {breach.message}", breach)
        self._close_transport()

    def _finish(self, reason: str, cause: BaseException | None = None) -> None:
        if self._reason is not None:
            return
        self._reason = reason
        self._cause = cause
        self._outbox.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._done.set()
        self._wake()

    def _close_transport(self) -> None:
        if self._transport is not None and not self._lost.is_set():
            self._transport.close()
            self._grace = self._loop.call_later(CLOSE_GRACE_S, self._transport.abort)
