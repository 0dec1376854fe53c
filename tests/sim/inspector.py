"""Looks into every process from outside, twice a second: bounds, books that must agree, and whoever has to be started again.

It only reads, except that it plays the machine's supervisor for processes that ended by themselves. `held` names what is
not given back at the end of a run.
"""

from __future__ import annotations

import random

from superfluid_core.limits import FleetLimits, LinkLimits
from superfluid_head.fleet.node import FleetNode
from superfluid_noded.heads import Live
from tests.sim.head import SimHead
from tests.sim.lies import Scene
from tests.sim.node import DRAIN_GRACE_MS, SimNode
from tests.sim.stream import End
from tests.sim.world import MS, SECOND, ViolationError

WATCH_MS = 500
DIALS_PER_10_S_MAX = 150
LEAVING_S_MAX = 75
ORPHANED_S_MAX = 5
LEFT_TURNS_MAX = 2


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
        self._dialled: dict[tuple[str, str], int] = {}
        self._left: dict[SimNode, dict[tuple[str, int, int], int]] = {}
        self._orphaned_ns: dict[SimNode, int] = {}
        self._turns = 0

    def watch(self) -> None:
        self._turns += 1
        self.world.after(WATCH_MS * MS, self.watch)
        for node in self.scene.nodes:
            self._supervise(node)
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

    def died(self, node: SimNode, prompt: tuple[int, ...]) -> None:
        """A prompt kills a process. It counts if a head runs it there and can see the process go."""
        is_seen = not node.is_leaving and any(
            generation.request.prompt == prompt
            and generation.waiting.slot is not None
            and generation.waiting.slot.key == node.identity
            and not self.network.route(node.host, head.host).is_blocked
            for head in self.scene.heads
            if head.fleet is not None
            for generation in head.fleet._runner.generations.values()
        )
        self.killed_by[prompt] = self.killed_by.get(prompt, 0) + is_seen
        if self.killed_by[prompt] > FleetLimits().processes_lost_max:
            self.world.broken("one request has killed a third process")

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
        names = [head.name for head in roster.heads.values()]
        self.checks.count("two links of one head", int(len(set(names)) < len(names)))
        bound = LinkLimits().outgoing_bytes_max
        if any(head.link._outbox.bytes > bound for head in roster.heads.values()):
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
        slot = head.fleet._nodes[node.identity].slots.get(live.number)
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
        if waiting > FleetLimits().queue_max + 1:
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
            for node in fleet._nodes.values():
                held = node.view.held
                if node.slots or held.sessions or held.unreported_tokens or held.reprefills:
                    return f"{head.name} holds a reservation on {node.key}"
                if not node.is_linked:
                    return f"{head.name} has no link to {node.key}"
        return next((text for node in self.scene.nodes if (text := self._held_by(node))), "")

    def _held_by(self, node: SimNode) -> str:
        core = node.node
        if core is None:
            return f"{node.identity} is down"
        stats = core.scheduler.stats()
        if core.agent.roster.live or core.scheduler.sessions() or stats.lanes_busy:
            return f"{node.identity} has sessions"
        if stats.blocks_used or sum(stats.queued):
            return f"{node.identity} has blocks or a queue"
        if len(core.agent.roster.heads) != len(self.scene.heads):
            return f"{node.identity} has {len(core.agent.roster.heads)} links"
        if len(core.listener.links) != len(core.agent.roster.heads):
            return f"{node.identity} has links without a head"
        return ""
