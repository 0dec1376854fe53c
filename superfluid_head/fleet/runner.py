"""Runs generations: does what their machines ask for, and tells them what nodes and time did.

Everything here is synchronous, between awaits: a reader of a link never waits for a client, and choice, reservation and
OPEN are one step. Who cannot be placed waits in the room; whatever may have freed a slot pumps it. Holds no policy:
failover is `generation.py`'s, choice is `placement`'s, order is `queue.py`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from superfluid_core.clock import MS, Clock
from superfluid_core.errors import CapacityError, ErrorCode, LocalProtocolError
from superfluid_core.limits import FleetLimits, LinkLimits
from superfluid_core.logs import log
from superfluid_core.placement.policies import Refusal, RefusalKind
from superfluid_core.placement.reserve import Placed as Reserved
from superfluid_core.placement.view import Fit
from superfluid_core.session import QosClass
from superfluid_core.wire.messages import CancelSession, SetClass, TokenRow, Tokens
from superfluid_core.wire.notes import Timing
from superfluid_head.fleet import transitions as t
from superfluid_head.fleet.chronicle import Chronicle
from superfluid_head.fleet.desk import Desk
from superfluid_head.fleet.events import MovedEvent, ProgressEvent
from superfluid_head.fleet.generation import Phase
from superfluid_head.fleet.heavy import HeavyRows
from superfluid_head.fleet.node import FleetNode, SessionMessage
from superfluid_head.fleet.quarantine import QuarantineTable
from superfluid_head.fleet.queue import MoveRate, Pace, Ticket, WaitingRoom
from superfluid_head.fleet.relief import Relief
from superfluid_head.fleet.standing import Counters, Slot
from superfluid_head.fleet.stream import Generation
from superfluid_head.fleet.translate import (
    arrived_of,
    error_of,
    input_of,
    open_of,
    placed_of,
    too_long,
    wait_over,
    with_deadlines,
)

logger = logging.getLogger(__name__)

BUSY_MS = 100
BUSY_MS_MAX = 10_000
NO_WORKER_RETRY_MS = 5_000
PACE_MS_UNKNOWN = 1_000


class Runner:
    """Owner of all generations of one head."""

    def __init__(
        self,
        nodes: dict[str, FleetNode],
        desk: Desk,
        quarantine: QuarantineTable,
        clock: Clock,
        limits: tuple[FleetLimits, LinkLimits],
    ) -> None:
        self.generations: dict[int, Generation] = {}
        self.room = WaitingRoom(limits[0])
        self.chronicle = Chronicle(clock, nodes)
        self.relief = Relief(nodes, desk, clock, limits, self._replace)
        self.pace = Pace()
        self.counters = Counters()
        self.quarantine = quarantine
        self.knows: Callable[[str], bool] = lambda _model: False
        self._nodes, self._desk, self._clock = nodes, desk, clock
        self._link_limits = limits[1]
        self._moves = MoveRate(limits[0])
        self._is_pump_due = False
        self._heavy = HeavyRows(lambda link, row: self._hear_row(link, row, clock.now_ns()))

    # --- generations ---

    async def prepare(self, generation: Generation) -> None:
        """Do what may take a while before the generation begins."""
        await self._desk.warmth.name(generation.request, generation.names)

    def begin(self, generation: Generation) -> None:
        self.generations[generation.session] = generation
        self.room.shares.begin(generation.request.tenant, generation.request.weight)
        self._act(generation, generation.machine.begin())

    def feed(self, generation: Generation, event: t.Input) -> None:
        """Tell a generation's machine what happened and do what it asks for."""
        machine = generation.machine
        before = machine.stale_rows
        actions = machine.on_event(event, self._clock.now_ns())
        self.counters.stale_rows += machine.stale_rows - before
        self._act(generation, actions)

    def finish(self, generation: Generation) -> None:
        """Forget a generation that has ended; its reader has left."""
        assert generation.machine.phase is Phase.ENDED, "left while it runs"
        self.room.leave(generation.session)
        if self.generations.pop(generation.session, None) is not None:
            self.room.shares.over(generation.session, generation.request.tenant)
            self.room.shares.end(generation.request.tenant)

    def set_class(self, generation: Generation, qos: QosClass) -> None:
        generation.qos = qos
        self.room.set_qos(generation.session, qos)
        slot = generation.waiting.slot
        if slot is not None:
            slot.reservation.set_qos(qos)
            word = SetClass(slot.session, slot.epoch, qos)
            self._nodes[slot.key].send_on(slot.link, word)

    # --- what nodes say and do ---

    def heard(self, link: int, message: SessionMessage) -> None:
        if isinstance(message, Tokens):
            now_ns = self._clock.now_ns()
            for row in self._heavy.plain(link, message.rows):
                self._hear_row(link, row, now_ns)
            return
        self._heavy.flush(message.session)
        if not isinstance(message, Timing):
            self._hear(message.session, input_of(link, message))
        elif message.session in self.generations:
            self.generations[message.session].timed(link, message)

    def _hear_row(self, link: int, row: TokenRow, now_ns: int) -> None:
        generation = self.generations.get(row.session)
        if generation and generation.machine.take_plain(link, row):
            self._deliver(generation, row, now_ns)
        else:
            self._hear(row.session, arrived_of(link, row))

    def _hear(self, session: int, event: t.NodeInput) -> None:
        if session in self.relief:
            self.relief.heard(session, event)
            return
        generation = self.generations.get(session)
        if generation is None:
            self.counters.stale_rows += isinstance(event, t.Arrived)
            return
        slot = generation.waiting.slot
        if slot is not None and slot.epoch == event.epoch and slot.link == event.link:
            slot.progressed_ns = self._clock.now_ns()
            if isinstance(event, t.Acknowledged):
                slot.is_acknowledged = True
                slot.reservation.acknowledge()
                generation.waiting.since_ns = 0
        self.feed(generation, event)

    def stalled(self, slot: Slot) -> None:
        self._heavy.flush(slot.session)
        stalled = t.Stalled(slot.link, slot.epoch)
        if slot.session in self.relief:
            self.relief.heard(slot.session, stalled)
        elif slot.session in self.generations:
            self.feed(self.generations[slot.session], stalled)

    def node_lost(self, node: FleetNode, loss: t.Loss) -> None:
        """Move everything that was placed on `node`."""
        self._heavy.flush()
        self.relief.node_lost(node)
        for slot in list(node.slots.values()):
            generation = self.generations.get(slot.session)
            if generation is not None:
                self.feed(generation, t.NodeLost(slot.link, loss))
        if loss is not t.Loss.GOING:
            self.fault(node, loss.value)

    def link_lost(self, node: FleetNode, link: int, loss: t.Loss) -> None:
        """Move what was placed on one of the links of `node`."""
        self._heavy.flush()
        self.relief.node_lost(node, link)
        for slot in [slot for slot in node.slots.values() if slot.link == link]:
            if slot.session in self.generations:
                self.feed(self.generations[slot.session], t.NodeLost(link, loss))
        if loss is t.Loss.SILENT:
            self.fault(node, loss.value)

    def relink(self, slot: Slot, fresh: int) -> None:
        """Let a session go on at its node over another link."""
        generation = self.generations.get(slot.session)
        if generation is not None:
            self.counters.relinked += 1
            self._replace(generation, t.Relinked(slot.link, slot.epoch, fresh))

    def _replace(self, generation: Generation, event: t.Relieved | t.Relinked) -> None:
        """Give a placement up in peace: what waits of it is heard before its rows are stale."""
        self._heavy.flush(generation.session)
        self.feed(generation, event)

    def boot_judged(self, boot: str, *, is_lost: bool) -> None:
        for generation in list(self.generations.values()):
            self.feed(generation, t.BootVerdict(boot, is_lost))

    def fault(self, node: FleetNode, reason: str) -> None:
        """Count a fault of `node`; its circuit may open, unless it is the last that works."""
        now_ns = self._clock.now_ns()
        self.counters.faults += 1
        node.faults += 1
        is_last = self._desk.is_last_healthy(node, now_ns)
        self.chronicle.tell("fault", node=node.title, reason=reason)
        if node.circuit.fault(now_ns, is_last_healthy=is_last):
            self._desk.unsettle(node)
            self.chronicle.tell("node-rests", node=node.title, reason=reason)
            log(logger, "warning", "node rests after faults", node=node.title, reason=reason)

    # --- time ---

    def tick(self) -> None:
        """Let time pass for deadlines, doubts and waits."""
        now_ns = self._clock.now_ns()
        for ticket, code in self.room.expired(now_ns):
            generation = self.generations.get(ticket.session)
            if generation is not None:
                self.feed(generation, t.NotPlaced(code, wait_over(code), NO_WORKER_RETRY_MS))
        for generation in list(self.generations.values()):
            self.feed(generation, t.Tick())
        self.relief.tick(self.generations, now_ns)
        if len(self.room):
            self.pump()

    def pump_soon(self) -> None:
        """Place who waits, once, when the current step is over."""
        if not self._is_pump_due and len(self.room):
            self._is_pump_due = True
            asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        """Place everyone who can be placed, in order. A kind of session that found no room blocks its like.

        One whose tenant has enough on nodes with room blocks its tenant's.
        """
        self._is_pump_due = False
        now_ns = self._clock.now_ns()
        blocked: set[tuple[object, ...]] = set()
        for ticket in self.room.in_order(now_ns):
            generation = self.generations.get(ticket.session)
            wanted = None if generation is None else generation.waiting.place
            if generation is None or wanted is None:
                self.room.leave(ticket.session)
                continue
            kind = self._desk.kind(generation, wanted)
            if not blocked.isdisjoint((kind, (*kind, ticket.tenant))):
                ticket.without_node_since_ns = None
                continue
            if wanted.is_move and not self._moves.has_one(now_ns):
                continue
            if wanted.verdict is not None and not self._desk.is_any_left(generation, wanted):
                self.room.leave(ticket.session)
                self.feed(generation, wanted.verdict)
                continue
            verdict = self._desk.place(generation, wanted, now_ns)
            if isinstance(verdict, Reserved):
                self._settle(generation, ticket, verdict, now_ns)
            elif self._refuse(generation, ticket, verdict, now_ns):
                is_tenants = Fit.TENANT in verdict.fits
                blocked.add((*kind, ticket.tenant) if is_tenants else kind)

    def _refuse(
        self, generation: Generation, ticket: Ticket, refusal: Refusal, now_ns: int
    ) -> bool:
        """Act on a refusal. True if waiting helps and others of this kind need not be tried either."""
        model = generation.request.model
        match refusal.kind:
            case RefusalKind.FULL:
                ticket.without_node_since_ns = None
                return True
            case RefusalKind.TOO_LONG:
                self.room.leave(ticket.session)
                self.feed(generation, too_long(generation, refusal))
                return False
            case RefusalKind.UNKNOWN_MODEL if not self.knows(model):
                self.room.leave(ticket.session)
                text = f"the model '{model}' does not exist"
                self.feed(generation, t.NotPlaced(ErrorCode.MODEL_NOT_FOUND, text))
                return False
            case RefusalKind.NO_NODE | RefusalKind.UNKNOWN_MODEL:
                if ticket.without_node_since_ns is None:
                    ticket.without_node_since_ns = now_ns
                return False

    def _settle(
        self, generation: Generation, ticket: Ticket, placed: Reserved, now_ns: int
    ) -> None:
        """Use a reserved node: bind the session to the node's link as it stands now."""
        choice, reservation = placed
        node, request = self._nodes[choice.node], generation.request
        standing = node.links.choose(node.slots.values())
        assert standing is not None, "a node without a link was chosen"
        self.room.leave(ticket.session)
        if ticket.has_waited:
            self.pace.placed(ticket.since_ns, now_ns)
        if not ticket.is_move:
            self.room.shares.placed(ticket.session, ticket.tenant, ticket.tokens, ticket.expected)
        wanted = generation.waiting.place
        assert wanted is not None, "placed without being asked"
        generation.waiting.place = None
        epoch = generation.machine.journal.epoch
        where = (standing.number, node.key, node.title)
        slot = Slot(ticket.session, epoch, *where, reservation, now_ns)
        waited_ms = (now_ns - ticket.since_ns) // MS
        generation.waiting.take(slot)
        generation.spans.placed(node.title, epoch, wanted.reason, waited_ms)
        node.hold(slot)
        if wanted.is_move:
            self._moves.take(now_ns)
        self.counters.placements += 1
        # the OPEN leaves first: what is kept about it is written while the node works
        self.feed(generation, placed_of(request, standing, node.key, choice.max_output))
        self.chronicle.placed(request, epoch, wanted, choice, waited_ms)

    # --- doing what machines ask for ---

    def _act(self, generation: Generation, actions: list[t.Action]) -> None:
        for action in actions:
            if isinstance(action, t.NodeAction):
                self._act_on_node(generation, action)
            else:
                self._act_on_reader(generation, action)

    def _act_on_node(self, generation: Generation, action: t.NodeAction) -> None:
        match action:
            case t.Place():
                self._wait(generation, action)
            case t.SendOpen():
                self._open(generation, action)
            case t.Leave():
                self._leave(generation, action)
            case t.Blame():
                self.fault(self._nodes[action.node], action.reason)
            case t.Postpone():
                pause_ms = min(max(action.retry_after_ms or 0, BUSY_MS), BUSY_MS_MAX)
                self._nodes[action.node].view.busy_until_ns = self._clock.now_ns() + pause_ms * MS

    def _act_on_reader(self, generation: Generation, action: t.ReaderAction) -> None:
        match action:
            case t.Deliver():
                self._deliver(generation, action, self._clock.now_ns())
            case t.Report():
                generation.push(ProgressEvent(action.done, action.total, action.cached))
            case t.Announce():
                self._announce(generation, action)
            case t.Quarantine():
                self.counters.quarantined += 1
                self.quarantine.add(generation.request, self._clock.now_ns())
            case t.End():
                self.room.leave(generation.session)  # an end can come while it waits to be moved
                self._desk.learn(generation, action.reason)
                self.counters.ended += 1
                generation.push(generation.end_event(action.reason, action.stop_id))
            case t.Fail():
                self.room.leave(generation.session)
                self.counters.failed += 1
                generation.break_off(error_of(action))

    def _deliver(self, generation: Generation, row: TokenRow | t.Deliver, now_ns: int) -> None:
        slot = generation.waiting.slot
        if slot is not None:
            slot.progressed_ns = now_ns
            if not slot.is_begun:
                self._note_success(generation, slot)
        self.room.shares.produced(generation.session, generation.request.tenant, len(row.ids))
        generation.push_tokens(row.first, row.ids, row.logprobs)

    def _wait(self, generation: Generation, wanted: t.Place) -> None:
        """Queue, and place at once whoever can be: a newcomer does not overtake those who wait."""
        waiting, request = generation.waiting, generation.request
        waiting.place = wanted
        waiting.enter(self._clock.now_ns())
        is_accepted = wanted.is_move or generation.machine.journal.epoch > 1
        ticket = self.room.enter(
            generation.session, generation.qos, waiting.since_ns, is_move=is_accepted
        )
        ticket.tenant, ticket.tokens = request.tenant, len(request.prompt)
        ticket.expected = self._desk.expected(request)
        self.pump()
        if generation.session not in self.room:
            return  # placed, as nearly all are at once
        ticket.has_waited = True
        pace_ns = self.pace.ns or self._desk.pace_ns(request)
        known_ns = pace_ns or PACE_MS_UNKNOWN * MS
        try:
            self.room.judge_room(generation.session, known_ns, is_measured=pace_ns > 0)
        except CapacityError as error:
            refused = t.NotPlaced(error.code, error.message, error.retry_after_ms)
            self.feed(generation, refused)

    def _open(self, generation: Generation, action: t.SendOpen) -> None:
        slot, placed = generation.waiting.slot, generation.machine.placement
        assert slot is not None, "OPEN without a slot"
        assert placed is not None, "OPEN without a placement"
        slot.link, slot.epoch, slot.is_acknowledged = placed.link, action.epoch, False
        node = self._nodes[slot.key]
        standing = node.links.find(slot.link)
        if standing is None:
            return
        journal = generation.machine.journal
        ttl_ms = min(self._link_limits.lease_ttl_ms, standing.welcome.lease_ttl_max_ms)
        lease = (standing.stamp_ns, ttl_ms)
        message = open_of(journal, slot, generation.qos, action.max_output, lease)
        message = with_deadlines(message, journal, self._clock.now_ns())
        features = standing.welcome.features
        note = generation.spans.opened(slot.session, slot.epoch, slot.title, features)
        if note is not None:
            node.send_on(slot.link, note)
        try:
            node.send_on(slot.link, message)
        except LocalProtocolError as error:
            self.feed(generation, t.NotPlaced(ErrorCode.INVALID_REQUEST, error.message))

    def _leave(self, generation: Generation, action: t.Leave) -> None:
        slot, generation.waiting.slot = generation.waiting.slot, None
        assert slot is not None, "left without a slot"
        assert slot.epoch == action.epoch, "left another placement"
        generation.spans.left(action.reason)
        node = self._nodes[slot.key]
        slot.reservation.release()
        node.slots.pop(slot.session, None)
        node.circuit.probe_over()
        if action.is_told:
            node.send_on(slot.link, CancelSession(slot.session, slot.epoch, action.reason))
        self.pump_soon()

    def _note_success(self, generation: Generation, slot: Slot) -> None:
        slot.is_begun = True
        slot.reservation.started()
        now_ns = self._clock.now_ns()
        self.chronicle.began(generation.request, (now_ns - slot.placed_ns) // MS)
        generation.spans.began()
        split = generation.waiting.first_token(slot, now_ns)
        if split is not None:
            self.chronicle.observer.first_token(*split)
        self._nodes[slot.key].circuit.success(now_ns)
        self.pump_soon()

    def _announce(self, generation: Generation, action: t.Announce) -> None:
        self.counters.moves += 1
        epoch, delivered = generation.machine.journal.epoch, len(generation.machine.journal.ids)
        self.chronicle.moved(generation.request, action, epoch, delivered, generation.last_node)
        event = MovedEvent(action.moves, action.reason)
        generation.spans.moved(event, delivered)
        generation.push(event)
