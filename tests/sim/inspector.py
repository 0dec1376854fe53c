"""Looks into every process from outside, twice a second: bounds, books that must agree, and whoever has to be started again.

It only reads, except that it plays the machine's supervisor for processes that ended by themselves. `held` names what is
not given back at the end of a run.
"""

from __future__ import annotations

import random
from weakref import WeakKeyDictionary

import superfluid_head.fleet.pulse as pulse_module
from superfluid_core.limits import FleetLimits, LinkLimits, WireLimits
from superfluid_core.link.link import Link
from superfluid_core.wire.messages import Open
from superfluid_core.wire.schema import schema
from superfluid_head.fleet.fleet import Fleet
from superfluid_head.fleet.node import FleetNode
from superfluid_head.fleet.transitions import Loss
from superfluid_noded.heads import Live
from tests.sim.head import SimHead
from tests.sim.lies import Scene
from tests.sim.node import DRAIN_GRACE_MS, SimNode
from tests.sim.stream import End
from tests.sim.world import MS, SECOND, ViolationError

WATCH_MS = 500
DIALS_PER_10_S_MAX = 150
LEAVING_S_MAX = 75
HALF_OPEN_S_MAX = 5
"""How long a link may stand that carries nothing one way, whichever way that is."""
ORPHANED_S_MAX = 5
LEFT_TURNS_MAX = 2
FAREWELL_S_MAX = 180
FRAME_S_MAX = 25
OPEN_S_MORE = 40
OPEN_TYPE = schema(WireLimits()).by_shape[Open].number
OUTGOING_BYTES_MAX = LinkLimits().outgoing_bytes_max
QUEUE_MAX = FleetLimits().queue_max


class Inspector:
    """One run's overseer."""

    def __init__(self, scene: Scene, drawn: random.Random) -> None:
        self.scene = scene
        self.world = scene.world
        self.network = scene.network
        self.checks = scene.checks
        self.drawn = drawn
        self.killed_by: dict[tuple[int, ...], int] = {}
        self.owed: dict[SimNode, int] = {}
        self._killers: dict[str, set[tuple[int, ...]]] = {}
        self._dialled: dict[tuple[str, str], int] = {}
        self._left: dict[SimNode, dict[tuple[str, int, int], int]] = {}
        self._orphaned_ns: dict[SimNode, int] = {}
        self._unheard_ns: dict[tuple[SimHead, SimNode], int] = {}
        self._stood_ns: WeakKeyDictionary[Link, int] = WeakKeyDictionary()
        self._turns = 0

    def watch(self) -> None:
        self._turns += 1
        self.world.after(WATCH_MS * MS, self.watch)
        for node in self.scene.nodes:
            self._supervise(node)
            for head in self.scene.heads:
                self._judge_half_open(head, node)
        if self._turns % 4 == 0:
            for node in self.scene.nodes:
                self._judge_node(node)
            for head in self.scene.heads:
                self._judge_head(head)
                if head.is_up and head.process is not None and head.process.is_over:
                    raise ViolationError(f"{head.name} ended with {head.process.failure!r}")
        if self._turns % 20 == 0:
            self._judge_dials()
            self.network.forget_closed()

    def _supervise(self, node: SimNode) -> None:
        """Play systemd: a process that ended by itself is started again."""
        now_ns = self.world.now_ns
        if node.process is not None and not node.process.is_dead:
            if node.reap():
                self.owed[node] = now_ns + self.drawn.randrange(500, 5_000) * MS
            elif node.terminated_ns is not None and not node.process.is_frozen:
                late_ns = now_ns - node.terminated_ns - DRAIN_GRACE_MS * MS
                if late_ns > LEAVING_S_MAX * SECOND:
                    raise ViolationError(f"{node.identity} does not end after SIGTERM")
        if self.owed.get(node, now_ns + 1) <= now_ns:
            del self.owed[node]
            if not node.is_up:
                node.start()

    def _judge_half_open(self, head: SimHead, node: SimNode) -> None:
        """A head that is awake leaves a link on which it, or its node, has not been heard for so long."""
        pair, now_ns = (head, node), self.world.now_ns
        ways = (self.network.route(head.host, node.host), self.network.route(node.host, head.host))
        if not (ways[0].is_blocked or ways[1].is_blocked):
            self._unheard_ns.pop(pair, None)
            return
        process, fleet = head.process, head.fleet
        is_awake = process is not None and not process.is_frozen and not process.is_dead
        cut_ns = [way.blocked_ns for way in ways if way.is_blocked]
        is_cut = cut_ns and not any(way.extra_ns for way in ways)
        if fleet is None or process is None or not (is_awake and is_cut):
            self._unheard_ns.pop(pair, None)
            return
        # a way may have been free between two looks; only a cut that has lasted counts
        since_ns = max(self._unheard_ns.setdefault(pair, now_ns), min(cut_ns))
        # its clock may drift, its looks at the time be few, and it may have slept between two looks of ours
        late_ms = 2 * pulse_module.PERIOD_MS + WATCH_MS
        longest_ns = HALF_OPEN_S_MAX * SECOND + late_ms * MS
        book = head.book(node)
        # a head can tell from its WELCOME on, which a node that was frozen may have sent seconds after the connection
        stood = [
            self._stood_ns.setdefault(each.link, now_ns)
            for each in (() if book is None else book.links)
            # a flipped length on the way that is free: what comes is heard as one long frame, until its own deadline
            if ways[1].is_blocked or not each.link._connection.is_mid_frame
        ]
        if stood and now_ns - max(since_ns, min(stood)) > longest_ns:
            raise ViolationError(f"{head.name} keeps a link to {node.identity} that is half open")
        self.checks.count("half open", int(bool(stood)))

    def died(self, node: SimNode, prompt: tuple[int, ...]) -> None:
        """A prompt kills a process. Whether a head can know is another question: see `saw_down`."""
        self._killers.setdefault(node.key, set()).add(prompt)

    def saw_down(self, fleet: Fleet, node: FleetNode, loss: Loss) -> None:
        """A head loses a node. Only an end that it sees as an end is a suspicion; silence, or a farewell, is none.

        Nor is the end of a process of which nothing was heard about this session: its word may be in a frame that was cut.
        """
        left_ns = next(each.farewell_ns for each in self.scene.nodes if each.key == node.key)
        is_stale = left_ns is None or self.world.now_ns - left_ns > FAREWELL_S_MAX * SECOND
        if loss is Loss.GOING and is_stale:
            self.world.broken(f"{node.key} was not told to go, and said goodbye")
        killers = self._killers.get(node.key, set())
        for slot in node.slots.values():
            generation = fleet._runner.generations.get(slot.session)
            prompt = () if generation is None else generation.request.prompt
            if prompt in killers:
                killers.discard(prompt)
                ledger = None if generation is None else self.checks.ledgers[generation.machine]
                is_heard = ledger is not None and ledger.heard_of == ledger.current
                is_known = is_heard and loss is Loss.CUT
                self.killed_by[prompt] = self.killed_by.get(prompt, 0) + int(is_known)
                if self.killed_by[prompt] > FleetLimits().processes_lost_max:
                    self.world.broken("one request has killed a third process")

    def saw_open(self, message: Open) -> None:
        """A head opens a session: what is left until its deadline is what is left of the first one."""
        process = self.world.current
        for head in self.scene.heads:
            if head.fleet is None or head.process is not process or process is None:
                continue
            generation = head.fleet._runner.generations.get(message.session)
            until_ns = None if generation is None else generation.request.deadline_ns
            if generation is None:
                return  # a context on its way to another node, under a session of its own
            if message.epoch < generation.machine.journal.epoch:
                return  # the fault that sends a placement again which is over
            if (until_ns is None) is not (message.deadline_ms is None):
                self.world.broken("a deadline was lost or made up")
            left_ms = 0 if until_ns is None else max(0, until_ns - process.now_ns()) // MS
            if message.deadline_ms is not None and message.deadline_ms > left_ms + 1:
                self.world.broken(f"{message.deadline_ms} ms until a deadline in {left_ms} ms")

    def _judge_frames(self, node: SimNode, links: list[Link]) -> None:
        """What has begun to come is whole within its time, or the link is closed."""
        process = node.process
        if process is None or process.is_frozen:
            return
        for link in links:
            frames = link._connection._frames
            is_open = frames.header is not None and frames.header.type == OPEN_TYPE
            patience_s = FRAME_S_MAX + (OPEN_S_MORE if is_open else 0)
            started_ns = frames.started_ns
            if started_ns is None or not link.is_open or not link._is_reading:
                continue
            if process.now_ns() - started_ns > patience_s * SECOND:
                raise ViolationError(f"{node.identity} waits for the rest of a frame for ever")

    def _judge_node(self, node: SimNode) -> None:
        core = node.node
        if core is None or core.agent is None:
            return
        roster = core.agent.roster
        lives = list(roster.live.values())
        if len(lives) != len(roster.table):
            raise ViolationError(f"{node.identity}: the roster and the table of leases differ")
        if len({live.placement.key for live in lives}) != len(lives):
            raise ViolationError(f"{node.identity}: a session is live twice")
        for live in lives:
            if roster.heads.get(live.head.number) is not live.head:
                raise ViolationError(f"{node.identity}: a session outlived its link")
        self._judge_orphans(node, {live.placement.serial for live in lives})
        self._judge_left(node, lives)
        self._judge_frames(node, [head.link for head in roster.heads.values()])
        names = [head.name for head in roster.heads.values()]
        self.checks.count("two links of one head", int(len(set(names)) < len(names)))
        if any(head.link._outbox.bytes > OUTGOING_BYTES_MAX for head in roster.heads.values()):
            raise ViolationError(f"{node.identity}: a link's queue is over its bound")

    def _judge_orphans(self, node: SimNode, known: set[int]) -> None:
        """What nobody waits for any more is not computed for long."""
        core, process, now_ns = node.node, node.process, self.world.now_ns
        if core is None or process is None:
            return
        orphans = {view.key.session for view in core.scheduler.sessions()} - known
        is_ill = node.ills.slow > 1 or node.ills.hung_until_ns > process.now_ns()
        if not orphans or is_ill or process.is_frozen:
            self._orphaned_ns.pop(node, None)
        elif now_ns - self._orphaned_ns.setdefault(node, now_ns) > ORPHANED_S_MAX * SECOND:
            raise ViolationError(f"{node.identity} computes what nobody waits for")

    def _judge_left(self, node: SimNode, lives: list[Live]) -> None:
        """What its head has left, and could say so, does not run on."""
        left = {
            (live.head.name, live.number, live.epoch) for live in lives if self._is_left(node, live)
        }
        before, self._left[node] = self._left.get(node, {}), {}
        for name in sorted(left):
            turns = self._left[node][name] = before.get(name, 0) + 1
            if turns > LEFT_TURNS_MAX:
                raise ViolationError(f"{node.identity} runs what {name[0]} has left")

    def _is_left(self, node: SimNode, live: Live) -> bool:
        head = next(head for head in self.scene.heads if head.name == live.head.name)
        end = live.head.link.transport
        if head.fleet is None or head.process is None or node.process is None:
            return False
        ways = (self.network.route(head.host, node.host), self.network.route(node.host, head.host))
        if any(way.is_blocked or way.extra_ns for way in ways):
            return False
        if head.process.is_frozen or node.process.is_frozen or not isinstance(end, End):
            return False
        is_mid_frame = live.head.link._connection.is_mid_frame  # a flipped length: it hears nothing
        if is_mid_frame or end.is_gone or end.peer is None or end.peer.is_gone:
            return False
        book = head.book(node)
        slot = None if book is None else book.slots.get(live.number)
        return slot is None or slot.epoch != live.epoch

    def _judge_head(self, head: SimHead) -> None:
        fleet = head.fleet
        if fleet is None:
            return
        generations = fleet._runner.generations
        slots = [slot for node in fleet._nodes.values() for slot in node.slots.values()]
        if len({slot.session for slot in slots}) != len(slots):
            raise ViolationError(f"{head.name}: a session has two slots")
        for slot in slots:
            if slot.session in fleet._runner.relief:
                continue  # a context on its way to another node, under a session of its own
            generation = generations.get(slot.session)
            if generation is None or generation.waiting.slot is not slot:
                raise ViolationError(f"{head.name}: a slot without its generation")
        waiting = sum(not ticket.is_move for ticket in fleet._runner.room)
        if waiting > QUEUE_MAX + 1:
            raise ViolationError(f"{head.name}: {waiting} new requests wait")
        for fleet_node in fleet._nodes.values():
            self._judge_fleet_node(head, fleet_node)

    def _judge_fleet_node(self, head: SimHead, node: FleetNode) -> None:
        if node.view.held.sessions != len(node.slots):
            raise ViolationError(
                f"{head.name}: {node.view.held.sessions} reservations for {len(node.slots)} slots"
            )
        if any(complaint for complaint in (node.complaint,) if "other weights" in complaint):
            self.checks.count("weights refused")
        self.checks.count("single returns", int(len(self.scene.nodes) == 1 and bool(node.slots)
                          and any(slot.epoch > 1 for slot in node.slots.values())))  # fmt: skip

    def _judge_dials(self) -> None:
        for pair, count in self.network.dialled.items():
            if count - self._dialled.get(pair, 0) > DIALS_PER_10_S_MAX:
                raise ViolationError(f"{pair[0]} dials {pair[1]} without a pause")
        self._dialled = dict(self.network.dialled)

    def held(self) -> str:
        for head in self.scene.heads:
            fleet = head.fleet
            if fleet is None or head.open:
                return f"{head.name} is not at rest"
            if fleet._runner.generations or len(fleet._runner.room):
                return f"{head.name} has generations or tickets"
            if len(fleet._nodes) != len(self.scene.nodes):
                return f"{head.name} knows {len(fleet._nodes)} nodes"
            for node in fleet._nodes.values():
                held = node.view.held
                if node.slots or held.sessions or held.unreported_tokens or held.reprefill_ms:
                    return f"{head.name} holds a reservation on {node.key}"
                if not node.is_linked:
                    return f"{head.name} has no link to {node.key}"
        return next((text for node in self.scene.nodes if (text := self._held_by(node))), "")

    def _held_by(self, node: SimNode) -> str:
        core = node.node
        if core is None:
            return f"{node.identity} is down"
        load = core.scheduler.load()
        if core.agent.roster.live or core.scheduler.sessions() or load.lanes_busy:
            return f"{node.identity} has sessions"
        if load.blocks_used or sum(load.queued):
            return f"{node.identity} has blocks or a queue"
        if len(core.agent.roster.heads) != sum(head.conns for head in self.scene.heads):
            return f"{node.identity} has {len(core.agent.roster.heads)} links"
        if not node.is_joining and len(core.listener.links) != len(core.agent.roster.heads):
            return f"{node.identity} has links without a head"
        return ""
