"""One node as its head sees it: the dial loop, the links while they stand, and the sessions placed on it.

Dials for ever with full-jitter backoff, names resolved anew each time, until as many links stand as are wanted; a node that dials
in instead is handed its links (`joins.py`). While a link stands, one task reads it and one keeps its pulse (`pulse.py`). A worn
link is replaced before it is closed; what that means for sessions is `generation.py`'s. When the last link is lost, for whatever
reason, the fleet hears it exactly once, before the socket is closed, so a node that wakes later speaks into a closed connection.
After a cut, the next link tells whether the process died. It knows nothing of generations and never waits for anybody.
"""

from __future__ import annotations

import asyncio
from functools import partial

from superfluid_core.clock import MS, SECOND
from superfluid_core.link.dial import DialError, dial
from superfluid_core.link.heartbeat import Verdict
from superfluid_core.link.link import Link, LinkClosedError
from superfluid_core.placement.reserve import fold_load
from superfluid_core.placement.view import Load
from superfluid_core.wire.messages import (
    MINOR,
    Closed,
    Goaway,
    Hello,
    Message,
    ModelOffer,
    Opened,
    Pong,
    Prefix,
    ProgressReport,
    Refuse,
    Status,
    Tokens,
    Welcome,
)
from superfluid_core.wire.notes import TIMING, Timing
from superfluid_head.fleet.context import NodeContext
from superfluid_head.fleet.directory import NodeAddress
from superfluid_head.fleet.hooks import NodeHooks, SessionMessage
from superfluid_head.fleet.nodestate import NodeState
from superfluid_head.fleet.pulse import PERIOD_MS, Heard, Pulse
from superfluid_head.fleet.standing import Standing
from superfluid_head.fleet.transitions import Loss
from superfluid_head.fleet.translate import loads_of
from superfluid_head.fleet.wear import Wear

__all__ = ["FleetNode", "NodeHooks", "SessionMessage"]

REPORTS = "prefix"
FEATURES = ("prefix-shared", TIMING)
CLOSE_MS = 500
DRAIN_TURNS = 4


class FleetNode(NodeState):
    """One address of the fleet and whatever answers there, or (`is_joined`) one node that dials in."""

    def __init__(
        self,
        address: NodeAddress,
        context: NodeContext,
        hooks: NodeHooks,
        *,
        is_joined: bool = False,
    ) -> None:
        super().__init__(address, context, is_joined=is_joined)
        self._hooks = hooks
        self._wear = Wear(self, self._lost_one, hooks.relink)
        self._is_ending = False
        self._has_asked = False

    def relocate(self, host: str, port: int) -> None:
        """Dial another address from now on: a local node listens on a new port after each start."""
        self.address = NodeAddress(host, port, self.address.label)
        self._trouble.failures = 0
        self._trouble.located.set()

    def set_drained(self, *, is_drained: bool, is_for_good: bool = False) -> None:
        """Give it no new sessions, by this head's own will, until its process is another one; or do so again."""
        self.is_drained = is_drained
        self._drained_boot = "" if is_for_good else self._boot
        self._hear_drain()

    def part(self) -> None:
        """Close the links in peace and dial again: the node is to be somewhere else from now on."""
        standing = self.standing
        if standing is not None:
            links = list(self.links)
            self._lose(standing, Loss.GOING, "", is_whole=True)
            for each in links:
                each.link.abort("moved to another address")

    def _lost_one(self, link: int, loss: Loss) -> None:
        self._hooks.link_lost(self, link, loss)

    # --- the dial loop ---

    async def run(self) -> None:
        """Keep as many links to this node as are wanted until cancelled. One that joins brings its own."""
        if self.is_joined:
            return
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    await self._located()
                    standing = await self._take(await self._dial())
                    if standing is not None:
                        group.create_task(self._serve(standing))
                    self.tried.set()
                    await self._wanting()
                    await self._rest()
            finally:
                self._is_ending = True

    async def join(self, link: Link) -> None:
        """Use a link that the node dialled, until it ends."""
        standing = await self._take(link)
        self.tried.set()
        if standing is not None:
            await self._serve(standing)

    async def _take(self, link: Link | None) -> Standing | None:
        """Begin to use a link; one that is refused is told why and closed."""
        self._settle_doubt(link)
        if link is None:
            return None
        refusal = self._judge(link)
        standing = None if refusal else self._stand_on(link)
        if standing is None:
            self._hooks.refused()
            why = (refusal or self.complaint).removeprefix("refused: ")
            await self._close(link, f"refused by the head: {why}")
        return standing

    async def _wanting(self) -> None:
        while len(self.links.fresh) >= self._context.conns and self.links.is_warm:
            self._trouble.wanted.clear()
            await self._trouble.wanted.wait()

    async def _located(self) -> None:
        while self.address.port == 0:
            self._trouble.located.clear()
            await self._trouble.located.wait()

    async def _dial(self) -> Link | None:
        context = self._context
        self._has_asked = not self.links.is_warm
        features = (REPORTS, *FEATURES) if self._has_asked else FEATURES
        try:
            return await dial(
                self.address.host,
                self.address.port,
                keys=context.keys,
                hello=Hello(MINOR, features, context.head),
                limits=context.link_limits,
                clock=context.clock,
            )
        except DialError as error:
            self.dial_failures += 1
            self._hooks.refused()
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
        peer = None if link is None else link.peer
        settled = self._trouble.settle(peer.boot if isinstance(peer, Welcome) else None)
        if settled is not None:
            boot, is_lost = settled
            self._hooks.boot_judged(boot, is_lost=is_lost)

    # --- a link that stands ---

    def _judge(self, link: Link) -> str:
        """Say why this link cannot be one of this node's, if it cannot."""
        welcome, primary = link.peer, self.standing
        refusal = ""
        if not isinstance(welcome, Welcome):
            refusal = "it answered the handshake as a head"
        elif primary is not None and primary.welcome.node != welcome.node:
            refusal = f"another node, '{welcome.node}', answers beside '{primary.welcome.node}'"
        elif primary is not None and primary.welcome.boot != welcome.boot:
            self._lose(primary, Loss.CUT, "another process answers", is_whole=True)
            primary.link.abort("another process answers")
            self._settle_doubt(link)
        if refusal:
            self._complain(refusal)
        return refusal

    def _stand_on(self, link: Link) -> Standing | None:
        """Make the link one of the node's: the first, or a further one beside those that stand."""
        welcome, primary = link.peer, self.standing
        assert isinstance(welcome, Welcome), "judged before"
        offers = self._admitted(welcome) if primary is None else primary.offers
        if not offers:
            return None
        self._trouble.failures = 0
        now_ns = self._context.clock.now_ns()
        pulse = Pulse(self._context.link_limits, welcome.stamp_ns, now_ns)
        number = next(self._context.links)
        standing = Standing(link, welcome, number, offers, pulse, welcome.stamp_ns)
        self.links.add(standing, has_reports=self.is_joined or self._has_asked)
        if primary is None:
            self._come_up(welcome)
        else:
            self._wear.replace(now_ns)
        self._hooks.link_added(self, standing)
        return standing

    def _admitted(self, welcome: Welcome) -> dict[str, ModelOffer]:
        self.identity = welcome.node
        admission = self._hooks.admit(self, welcome)
        for complaint in admission.complaints:
            self._complain(f"refused: {complaint}")
        if admission.offers:
            self.view.offers = admission.views()
            if not admission.complaints:
                self._trouble.text = ""
        return admission.offers

    def _come_up(self, welcome: Welcome) -> None:
        view = self.view
        view.sessions_max = welcome.sessions_max
        view.is_up, view.is_suspect = True, False
        self._boot = welcome.boot
        if self._drained_boot not in ("", welcome.boot):
            self.set_drained(is_drained=False)
        self._hear_drain()
        fold_load(view, Load(), (), dict.fromkeys(view.others, Load()))
        view.busy_until_ns = 0
        self.tried.set()
        self._hooks.node_up(self)

    async def _serve(self, standing: Standing) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                pulse = group.create_task(self._keep_pulse(standing))
                await self._read(standing)
                pulse.cancel()
        finally:
            self._lose(standing, Loss.GOING, "", is_whole=self._is_ending)
            await self._close(standing.link, "the head stops")

    async def _read(self, standing: Standing) -> None:
        standing.link.offer(partial(self._is_taken, standing))
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

    def _is_taken(self, standing: Standing, message: Message) -> bool:
        """Take what comes at once, while the link counts."""
        if standing.loss is not None:
            return False
        self._on_message(standing, message)
        return True

    def _on_message(self, standing: Standing, message: Message) -> None:
        match message:
            case Tokens() | Opened() | ProgressReport() | Closed() | Timing():
                self._hooks.heard(self, standing.number, message)
            case Refuse():
                if message.session and not self.asks.refuse(message):
                    self._hooks.heard(self, standing.number, message)
            case Status():
                self._on_status(standing, message)
            case Pong():
                standing.pulse.on_pong(message, self._context.clock.now_ns())
                if message.status is not None:
                    self._on_status(standing, message.status)
            case Goaway():
                standing.is_going = True
                self._hear_drain()
            case Prefix():
                if standing.is_warm and standing is self.links.primary:
                    self._hooks.prefixed(self, message)
            case _:
                self.asks.take(message)

    def _on_status(self, standing: Standing, status: Status) -> None:
        standing.status = status
        standing.pulse.on_status(status, self._context.clock.now_ns())
        standing.stamp_ns = max(standing.stamp_ns, status.stamp_ns)
        was_draining = self.view.is_draining
        self._hear_drain()
        if was_draining and not self.view.is_draining:
            self._hooks.returned(self)
        load, others = loads_of(status)
        reservations = [slot.reservation for slot in self.slots_on(standing)]
        fold_load(self.view, load, reservations, others)
        self._hooks.loaded(self)

    def _hear_drain(self) -> None:
        """Say whether it takes new sessions, and tell the fleet once when the node itself stops to."""
        is_leaving = any(
            standing.is_going or (standing.status is not None and standing.status.draining)
            for standing in self.links.current
        )
        was_draining, self.view.is_draining = self.view.is_draining, self.is_drained or is_leaving
        if is_leaving and not was_draining:
            self._hooks.leaving(self)

    async def _keep_pulse(self, standing: Standing) -> None:
        """Renew leases, ping, judge the node and its sessions, until it is dead."""
        clock, pulse = self._context.clock, standing.pulse
        while standing.loss is None:
            now_ns = clock.now_ns()
            ease_ns = self._ease_ns(standing, now_ns)
            pulse.expect(now_ns, ease_ns)
            await standing.nap.sleep(ease_ns / SECOND)
            if pulse.has_overslept(clock.now_ns()):
                await self._drain_own_pause(standing)
            now_ns = clock.now_ns()
            link = standing.link
            heard = Heard(link.last_received_ns, standing.stamp_ns, link.handed_bytes)
            beat = pulse.beat(heard, len(self.slots), now_ns)
            for message in beat.messages:
                self.send_on(standing.number, message)
            if beat.verdict is Verdict.DEAD:
                self._lose(standing, Loss.SILENT, "silent with sessions live or pings unanswered")
                standing.link.abort("silent")
                return
            standing.is_suspect = beat.verdict is Verdict.SUSPECT
            standing.is_hung = beat.verdict is Verdict.HUNG
            self.view.is_suspect = all(each.is_suspect for each in self.links.current)
            self._judge_engine(standing, is_hung=any(each.is_hung for each in self.links))
            if beat.verdict is Verdict.ALIVE:
                self._judge_sessions(pulse, now_ns)
            self._wear.settle_orphans(now_ns)
            if self._wear.is_over(standing, now_ns):
                await self._close(standing.link, "a fresh link took its place")

    def _ease_ns(self, standing: Standing, now_ns: int) -> int:
        """Say how long nobody needs to look at the link: a period, or more while nothing goes on."""
        is_busy = bool(self.slots) or self._wear.has_orphans or standing.retired_ns is not None
        return PERIOD_MS * MS if is_busy else standing.pulse.ease_ns(now_ns)

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

    def _lose(self, standing: Standing, loss: Loss, reason: str, *, is_whole: bool = False) -> None:
        """Tell the fleet, once, that this link carries nothing any more; without another, that the node is gone."""
        if standing.loss is not None:
            return
        standing.loss = loss
        self.links.remove(standing)
        self.asks.break_off()
        self._trouble.wanted.set()
        if reason:
            self._complain(f"{loss.value}: {reason}")
        if self.links.current and not is_whole:
            beside = loss if loss is Loss.SILENT else Loss.LINK
            self._wear.orphan(standing.number, beside)
            return
        for other in self.links:
            other.loss = loss
            self.links.remove(other)
            other.link.abort("the node is lost")
        self._wear.forget()
        self.view.is_up = False
        self.down_ns = self._context.clock.now_ns()
        if loss is Loss.CUT:
            self._trouble.doubt(standing.welcome.boot)
        self._hooks.node_down(self, loss)

    async def _close(self, link: Link, reason: str) -> None:
        try:
            async with asyncio.timeout(CLOSE_MS / 1_000):
                await link.close(reason)
        except TimeoutError:
            return
