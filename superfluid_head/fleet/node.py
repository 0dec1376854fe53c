"""One node as its head sees it: the dial loop, the link while it stands, and the sessions placed on it.

Dials for ever with full-jitter backoff, names resolved anew each time. While a link stands, one task reads it and one
keeps its pulse (`pulse.py`). When it is lost, for whatever reason, the fleet hears it exactly once, before the socket is
closed, so a node that wakes later speaks into a closed connection. After a cut, the next dial tells whether the process died.
It knows nothing of generations: it hands session messages to its hooks and never waits for anybody.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from superfluid_core.clock import MS
from superfluid_core.link.dial import DialError, dial
from superfluid_core.link.heartbeat import Verdict
from superfluid_core.link.link import Link, LinkClosedError
from superfluid_core.logs import log
from superfluid_core.placement.reserve import fold_load
from superfluid_core.placement.view import Load, NodeView
from superfluid_core.wire.messages import (
    MINOR,
    Closed,
    Goaway,
    Hello,
    Message,
    Opened,
    Pong,
    Prefix,
    ProgressReport,
    Refuse,
    Status,
    Tokens,
    Welcome,
)
from superfluid_head.fleet.asks import Asks
from superfluid_head.fleet.circuit import Circuit
from superfluid_head.fleet.context import NodeContext, Trouble
from superfluid_head.fleet.directory import Admission, NodeAddress
from superfluid_head.fleet.pulse import PERIOD_MS, Pulse
from superfluid_head.fleet.standing import Slot, Standing
from superfluid_head.fleet.transitions import Loss

logger = logging.getLogger(__name__)

FEATURES = ("prefix", "prefix-shared")
CLOSE_MS = 500
DRAIN_TURNS = 4
# One failed dial may have any cause; a process that is gone fails twice.
SILENT_DIALS_MAX = 2
COMPLAINT_MS = 60_000

SessionMessage = Opened | ProgressReport | Tokens | Closed | Refuse


class NodeHooks(Protocol):
    """Where a node reports. All calls are synchronous."""

    def admit(self, node: FleetNode, welcome: Welcome) -> Admission: ...

    def node_up(self, node: FleetNode) -> None: ...

    def node_down(self, node: FleetNode, loss: Loss) -> None: ...

    def boot_judged(self, boot: str, *, is_lost: bool) -> None: ...

    def heard(self, node: FleetNode, message: SessionMessage) -> None: ...

    def loaded(self, node: FleetNode) -> None: ...

    def stalled(self, slot: Slot) -> None: ...

    def prefixed(self, node: FleetNode, report: Prefix) -> None: ...

    def leaving(self, node: FleetNode) -> None: ...


class FleetNode:
    """One address of the fleet and whatever answers there."""

    def __init__(self, address: NodeAddress, context: NodeContext, hooks: NodeHooks) -> None:
        self.address = address
        self.key = address.key
        self.identity = ""
        self.view = NodeView(self.key)
        self.circuit = Circuit(context.fleet_limits)
        self.slots: dict[int, Slot] = {}
        self.standing: Standing | None = None
        self.is_drained = False
        self._drained_boot = ""
        self.tried = asyncio.Event()
        self.asks = Asks()
        self._context = context
        self._hooks = hooks
        self._trouble = Trouble()

    @property
    def title(self) -> str:
        """What people call this node: its label, else what it calls itself, else its address."""
        return self.address.label or self.identity or str(self.address)

    @property
    def complaint(self) -> str:
        return self._trouble.text

    @property
    def is_linked(self) -> bool:
        return self.standing is not None

    def relocate(self, host: str, port: int) -> None:
        """Dial another address from now on: a local node listens on a new port after each start."""
        self.address = NodeAddress(host, port, self.address.label)
        self._trouble.failures = 0
        self._trouble.located.set()

    def set_drained(self, *, is_drained: bool, is_for_good: bool = False) -> None:
        """Give it no new sessions, by this head's own will, until its process is another one; or do so again."""
        standing = self.standing
        self.is_drained = is_drained
        self._drained_boot = "" if standing is None or is_for_good else standing.welcome.boot
        self._hear_drain()

    def part(self) -> None:
        """Close the link in peace and dial again: the node is to be somewhere else from now on."""
        standing = self.standing
        if standing is not None:
            standing.is_going = True
            standing.link.abort("moved to another address")

    def send(self, message: Message) -> bool:
        """Queue `message` on the link; False when there is none (its sessions move on their own)."""
        standing = self.standing
        if standing is None or standing.loss is not None:
            return False
        try:
            standing.link.send(message)
        except LinkClosedError:
            return False
        return True

    # --- the dial loop ---

    async def run(self) -> None:
        """Keep a link to this node until cancelled."""
        while True:
            await self._located()
            link = await self._dial()
            self._settle_doubt(link)
            if link is not None:
                await self._serve(link)
            self.tried.set()
            await self._rest()

    async def _located(self) -> None:
        while self.address.port == 0:
            self._trouble.located.clear()
            await self._trouble.located.wait()

    async def _dial(self) -> Link | None:
        context = self._context
        try:
            return await dial(
                self.address.host,
                self.address.port,
                keys=context.keys,
                hello=Hello(MINOR, FEATURES, context.head),
                limits=context.link_limits,
                clock=context.clock,
            )
        except DialError as error:
            self._complain(str(error))
            return None

    async def _rest(self) -> None:
        """Wait before the next dial: full jitter, doubling; cut short when the node is relocated."""
        limits = self._context.link_limits
        longest = min(
            limits.dial_backoff_ms_max,
            limits.dial_backoff_ms_min << min(self._trouble.failures, 16),
        )
        self._trouble.failures += 1
        seconds = self._context.random.uniform(0.0, longest / 1_000)
        self._trouble.located.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._trouble.located.wait()
        except TimeoutError:
            return

    def _settle_doubt(self, link: Link | None) -> None:
        """After a cut: the same boot id answers, or another does, or nobody does: then the process is gone."""
        trouble = self._trouble
        boot = trouble.boot_in_doubt
        if boot is None:
            return
        trouble.silent_dials += 1
        peer = None if link is None else link.peer
        if peer is None and trouble.silent_dials < SILENT_DIALS_MAX:
            return
        trouble.boot_in_doubt = None
        is_same = isinstance(peer, Welcome) and peer.boot == boot
        self._hooks.boot_judged(boot, is_lost=not is_same)

    def _complain(self, text: str) -> None:
        """Log a reason once, then again only when it changes or after a minute."""
        trouble = self._trouble
        now_ns = self._context.clock.now_ns()
        if text == trouble.text and now_ns - trouble.told_ns < COMPLAINT_MS * MS:
            return
        trouble.text, trouble.told_ns = text, now_ns
        name = (
            f"'{self.title}' at {self.address}" if self.title != str(self.address) else self.title
        )
        log(logger, "warning", f"fleet node {name}: {text}; retrying")

    # --- a link that stands ---

    async def _serve(self, link: Link) -> None:
        standing = self._establish(link)
        if standing is None:
            await self._close(link, "refused by the head")
            return
        try:
            async with asyncio.TaskGroup() as group:
                pulse = group.create_task(self._keep_pulse(standing))
                await self._read(standing)
                pulse.cancel()
        finally:
            self._lose(standing, Loss.GOING, "")
            self.asks.break_off()
            await self._close(link, "the head stops")

    def _establish(self, link: Link) -> Standing | None:
        welcome = link.peer
        if not isinstance(welcome, Welcome):
            self._complain("it answered the handshake as a head")
            return None
        self.identity = welcome.node
        admission = self._hooks.admit(self, welcome)
        for complaint in admission.complaints:
            self._complain(f"refused: {complaint}")
        if not admission.offers:
            return None
        if not admission.complaints:
            self._trouble.text = ""
        self._trouble.failures = 0
        pulse = Pulse(self._context.link_limits, self._context.clock.now_ns())
        number = next(self._context.links)
        standing = Standing(link, welcome, number, admission.offers, pulse, welcome.stamp_ns)
        self.standing = standing
        view = self.view
        view.offers = admission.views()
        view.sessions_max = welcome.sessions_max
        view.is_up, view.is_suspect = True, False
        if self._drained_boot not in ("", welcome.boot):
            self.set_drained(is_drained=False)
        self._hear_drain()
        view.load = Load()
        view.busy_until_ns = 0
        self.tried.set()
        self._hooks.node_up(self)
        return standing

    async def _read(self, standing: Standing) -> None:
        while True:
            try:
                message = await standing.link.receive()
            except LinkClosedError as error:
                loss = Loss.GOING if standing.is_going else Loss.CUT
                self._lose(standing, loss, error.reason)
                return
            if standing.loss is not None:
                return
            self._on_message(standing, message)

    def _on_message(self, standing: Standing, message: Message) -> None:
        match message:
            case Tokens() | Opened() | ProgressReport() | Closed():
                self._hooks.heard(self, message)
            case Refuse():
                if message.session:
                    self._hooks.heard(self, message)
            case Status():
                self._on_status(standing, message)
            case Pong():
                if message.status is not None:
                    self._on_status(standing, message.status)
            case Goaway():
                standing.is_going = True
                self._hear_drain()
            case Prefix():
                self._hooks.prefixed(self, message)
            case _:
                self.asks.take(message)

    def _on_status(self, standing: Standing, status: Status) -> None:
        standing.status = status
        standing.pulse.on_status(status, self._context.clock.now_ns())
        standing.stamp_ns = max(standing.stamp_ns, status.stamp_ns)
        self._hear_drain()
        load = Load(
            status.lanes_busy,
            sum(status.queued),
            status.queued_tokens,
            status.blocks_used,
            status.blocks,
            status.prefill_rate,
            status.decode_rates,
        )
        fold_load(self.view, load, [slot.reservation for slot in self.slots.values()])
        self._hooks.loaded(self)

    def _hear_drain(self) -> None:
        """Say whether it takes new sessions, and tell the fleet once when the node itself stops to."""
        standing = self.standing
        is_leaving = standing is not None and (
            standing.is_going or (standing.status is not None and standing.status.draining)
        )
        was_draining, self.view.is_draining = self.view.is_draining, self.is_drained or is_leaving
        if is_leaving and not was_draining:
            self._hooks.leaving(self)

    async def _keep_pulse(self, standing: Standing) -> None:
        """Renew leases, ping, judge the node and its sessions, until it is dead."""
        clock, pulse = self._context.clock, standing.pulse
        while standing.loss is None:
            pulse.expect(clock.now_ns())
            await asyncio.sleep(PERIOD_MS / 1_000)
            if pulse.has_overslept(clock.now_ns()):
                await self._drain_own_pause(standing)
            now_ns = clock.now_ns()
            received_ns = standing.link.last_received_ns
            beat = pulse.beat(received_ns, standing.stamp_ns, len(self.slots), now_ns)
            for message in beat.messages:
                self.send(message)
            if beat.verdict is Verdict.DEAD:
                self._lose(standing, Loss.SILENT, "silent with sessions live or pings unanswered")
                standing.link.abort("silent")
                return
            self.view.is_suspect = beat.verdict is Verdict.SUSPECT
            self._judge_engine(standing, is_hung=beat.verdict is Verdict.HUNG)
            if beat.verdict is Verdict.ALIVE:
                self._judge_sessions(pulse, now_ns)

    async def _drain_own_pause(self, standing: Standing) -> None:
        """Let every socket be read once before any timer is judged: the head itself slept."""
        for _ in range(DRAIN_TURNS):
            await asyncio.sleep(0)
        standing.pulse.forgive(self.slots.values(), self._context.clock.now_ns())

    def _judge_sessions(self, pulse: Pulse, now_ns: int) -> None:
        for slot in [slot for slot in self.slots.values() if pulse.is_stalled(slot, now_ns)]:
            self._hooks.stalled(slot)

    def _judge_engine(self, standing: Standing, *, is_hung: bool) -> None:
        """Take a hung engine's node out of placement and its sessions away; the link stays."""
        if is_hung and self.view.is_up:
            self.view.is_up = False
            self._complain("its engine stands still with lanes in use")
            self._hooks.node_down(self, Loss.HUNG)
        elif not is_hung and not self.view.is_up and standing.loss is None:
            self.view.is_up = True
            self._hooks.node_up(self)

    def _lose(self, standing: Standing, loss: Loss, reason: str) -> None:
        """Tell the fleet, once, that this link carries nothing any more."""
        if standing.loss is not None:
            return
        standing.loss = loss
        self.view.is_up = False
        self.standing = None
        if loss is Loss.CUT:
            self._trouble.boot_in_doubt = standing.welcome.boot
            self._trouble.silent_dials = 0
        if reason:
            self._complain(f"{loss.value}: {reason}")
        self._hooks.node_down(self, loss)

    async def _close(self, link: Link, reason: str) -> None:
        try:
            async with asyncio.timeout(CLOSE_MS / 1_000):
                await link.close(reason)
        except TimeoutError:
            return
