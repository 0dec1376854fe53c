"""One seed, from topology to verdict.

A run has four parts: faults are drawn and strike; everything is healed; every session must end within the liveness bound and a
fresh request must succeed; nothing may be held anywhere afterwards. The outcome is figures and a trace hash, or the broken promise.
"""

from __future__ import annotations

import gc
import logging
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import superfluid_core.engine.loop as loop_module
import superfluid_core.link.link as link_module
import superfluid_head.fleet.fleet as fleet_module
import superfluid_head.fleet.node as fleet_node_module
import superfluid_head.fleet.pulse as pulse_module
import superfluid_noded.service as service_module
from superfluid_core.engine.sim import SimOptions
from superfluid_core.limits import FleetLimits, LinkLimits
from superfluid_core.session import QosClass, SamplingParams
from superfluid_head.fleet.events import GenerationRequest
from superfluid_core.placement.policies import Policy
from superfluid_core.logs import _FIELDS
from superfluid_head.fleet.node import FleetNode
from tests.sim.checks import Checks
from tests.sim.faults import CALM, Faults, Scene
from tests.sim.head import Client, Load, Manner, SimHead
from tests.sim.network import Network
from tests.sim.node import MODEL, SimNode, installed, node_config, patched
from tests.sim.oracle import EOS_PROBABILITY
from tests.sim.world import MS, SECOND, ViolationError, World

logger = logging.getLogger(__name__)

LIVENESS_S = 120
HEARTBEAT_S = 5.0
SESSIONS_LIVE = 0.8
SETTLE_S = 140
WATCH_MS = 500
DIALS_PER_10_S_MAX = 150
DRAIN_GRACE_MS = 4_000
CALM_ENDS = ("stop", "length", "left", "deadline_exceeded", "timeout")


@dataclass
class Outcome:
    """What a seed came to. `violation` is empty when every promise was kept."""

    seed: int
    violation: str = ""
    trace: str = ""
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    events: int = 0
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Shape:
    """What is drawn before anything starts."""

    nodes: int
    heads: int
    kinds: tuple[str, ...]
    is_calm: bool
    is_tight: bool
    is_coarse: bool
    duration_s: int
    gap_s: float


def draw_shape(drawn: random.Random, only: tuple[str, ...] = ()) -> Shape:
    every = ALL_KINDS
    is_calm = drawn.random() < 0.1 and not only
    if only:
        kinds = only
    elif is_calm:
        kinds = CALM
    elif drawn.random() < 0.2:
        kinds = (drawn.choice(every),)
    else:
        kinds = tuple(kind for kind in every if drawn.random() < 0.45) or ("crash",)
    return Shape(
        nodes=drawn.choice((1, 2, 2, 3, 3, 3, 5)),
        heads=2 if drawn.random() < 0.15 else 1,
        kinds=kinds,
        is_calm=is_calm,
        is_tight=drawn.random() < 0.25,
        is_coarse=drawn.random() < 0.6,
        duration_s=drawn.choice((100, 160, 240)),
        gap_s=drawn.choice((10.0, 16.0, 24.0)),
    )


ALL_KINDS = (
    "crash", "power loss", "crash loop", "freeze node", "freeze head", "partition", "half to node",
    "half to head", "reset", "duplicate link", "deaf node", "flip", "raw flip", "truncate", "delay",
    "late OPEN", "stale OPEN", "hang", "slow engine", "lane fault", "drain", "terminate",
    "goaway race", "boot jump", "starve leases", "busy", "wrong weights", "head crash",
    "head power loss", "faulty node", "burst",
)  # fmt: skip


TIGHT = ((link_module, "WRITE_HIGH_BYTES", 512), (link_module, "WRITE_LOW_BYTES", 128))
"""Pipes so narrow that queues form in the link."""

COARSE_MS = 250
COARSE = (
    (pulse_module, "PERIOD_MS", COARSE_MS),
    (fleet_node_module, "PERIOD_MS", COARSE_MS),
    (fleet_module, "TICK_MS", COARSE_MS),
    (service_module, "SWEEP_S", COARSE_MS / 1e3),
    (loop_module, "TIME_MS", COARSE_MS),
)
"""Regular looks at the time, less often than the product takes them: most of the cost of an hour without incident."""


class Run:
    """One seed at work."""

    def __init__(self, seed: int, only: tuple[str, ...] = ()) -> None:
        drawn = self.drawn = random.Random(f"sim {seed}")
        self.shape = draw_shape(drawn, only)
        self.world = World()
        self.network = Network(
            self.world, lambda _a, _b: drawn.choice((100_000, 300_000, 2 * MS, 20 * MS))
        )
        if self.shape.is_tight:
            self.network.window_bytes = 1_024
        self.checks = Checks(self.world)
        self.killed_by: dict[tuple[int, ...], int] = {}
        self.owed: dict[SimNode, int] = {}
        nodes = self._draw_nodes()
        load = self._draw_load(nodes[0].options)
        heads = [self._draw_head(number, nodes) for number in range(self.shape.heads)]
        self.scene = Scene(
            self.world, self.network, nodes, heads, self.checks, random.Random(drawn.random()), load
        )
        self.faults = Faults(self.scene)
        self.checks.distort = self.faults.distort
        self.checks.is_starved = self._is_starved
        self._dialled: dict[tuple[str, str], int] = {}
        self._turns = 0

    # --- drawing ------------------------------------------------------------------------------------

    def _draw_nodes(self) -> list[SimNode]:
        drawn, nodes = self.drawn, []
        lanes = drawn.choice((1, 2, 4))
        options = SimOptions(
            window=1_024,
            lanes=lanes,
            blocks=drawn.choice((70, 120, 300)),
            prefill_rate=drawn.choice((200.0, 1_000.0, 4_000.0)),
            decode_rate=drawn.choice((3.0, 5.0, 9.0)),
            eos_probability=EOS_PROBABILITY,
        )
        for number in range(self.shape.nodes):
            flags = {"max_batch": lanes, "drain_grace_ms": DRAIN_GRACE_MS}
            config = node_config(f"n{number}", f"127.0.0.{11 + number}", flags)
            node = SimNode(self.world, self.network, number, options, config)
            node.drift_ppm = drawn.choice((0, 0, -500, 500, 200))
            self.checks.count("drifting", int(node.drift_ppm != 0))
            node.on_death = self._died
            nodes.append(node)
        return nodes

    def _draw_load(self, options: SimOptions) -> Load:
        """Make up what clients ask for: never more in the long run than a third of what the nodes can do."""
        drawn, calm = self.drawn, self.shape.is_calm
        prompt_max = drawn.choice((30, 150, 600))
        output_max = drawn.choice((20, 60, 120))
        service_s = prompt_max / 2 / options.prefill_rate + output_max / 3 / options.decode_rate
        live = min(SESSIONS_LIVE, self.shape.nodes * options.lanes / 3)
        return Load(
            gap_s=1.7 * service_s * self.shape.heads / live,
            prompt_max=prompt_max,
            output_max=output_max,
            poison_pct=0 if calm else drawn.choice((0, 0, 0, 8)),
            slow_pct=drawn.choice((0, 20)),
            leave_pct=drawn.choice((0, 15)),
        )

    def _draw_head(self, number: int, nodes: list[SimNode]) -> SimHead:
        drawn = self.drawn
        seeded = random.Random(drawn.random())
        head = SimHead(self.world, self.network, f"h{number}", f"127.0.0.{1 + number}", nodes, seeded)
        head.drift_ppm = drawn.choice((0, 300, -300))
        head.counts = self.checks.counts
        head.cached_of = self.checks.cached_of
        head.options = {
            "policy": drawn.choice((Policy.LOAD_AWARE, Policy.LOAD_AWARE, *Policy)),
        }
        if "wrong weights" in self.shape.kinds:
            head.engine_seeds = [0, 1]
        return head

    def _is_starved(self, link: Any) -> bool:
        process = self.world.current
        assert process is not None
        until = self.scene.starved
        return any(
            until.get((process.name, node.identity), 0) > self.world.now_ns
            and link.remote.startswith(f"{node.host}:")
            for node in self.scene.nodes
        )

    # --- the four parts -----------------------------------------------------------------------------

    def play(self) -> None:
        scene, world = self.scene, self.world
        for node in scene.nodes:
            node.start()
        for head in scene.heads:
            head.start()
        self._watch()
        self._advance(2.0)
        for head in scene.heads:
            head.load = scene.load
        self._strike()
        self._heal()
        for head in scene.heads:
            head.is_asked_to_rest = True
        last_ns = max(scene.busy_until_ns, world.now_ns)
        self._until(last_ns, None)
        self._until(last_ns + LIVENESS_S * SECOND, self._are_all_over)
        self._judge_ends()
        self._prove_service()
        self._until(world.now_ns + SETTLE_S * SECOND, lambda: not self._held())
        held = self._held()
        if held:
            raise ViolationError(f"still held at the end: {held}")

    def _strike(self) -> None:
        shape, drawn = self.shape, self.scene.drawn
        until_ns = self.world.now_ns + shape.duration_s * SECOND
        while self.world.now_ns < until_ns:
            gap_s = drawn.expovariate(1 / shape.gap_s)
            self._advance(10.0 + gap_s / 2 if shape.is_calm else gap_s)
            kind = drawn.choice(shape.kinds)
            logger.info("fault: %s %s", kind, "" if self.faults.strike(kind) else "(nothing to harm)")

    def _advance(self, seconds: float) -> None:
        self._until(self.world.now_ns + int(seconds * SECOND), None)

    def _until(self, until_ns: int, is_done: Callable[[], bool] | None) -> None:
        """Let time pass; `is_done` is asked ten times a second."""
        world = self.world
        while world.now_ns < until_ns and not (is_done is not None and is_done()):
            world.run_until(until_ns if is_done is None else min(until_ns, world.now_ns + 100 * MS))

    def _heal(self) -> None:
        scene = self.scene
        for node in scene.nodes:
            node.faulty = ""

    def _are_all_over(self) -> bool:
        return not any(head.open for head in self.scene.heads)

    def _judge_ends(self) -> None:
        for head in self.scene.heads:
            if head.open:
                client = next(iter(head.open.values()))
                raise ViolationError(
                    f"{len(head.open)} sessions of {head.name} have not ended, such as number "
                    f"{client.number}, begun at {client.begun_ns / 1e9:.1f} s"
                )
        if not self.shape.is_calm:
            return
        for name, count in self.checks.counts.items():
            is_wrong = name.startswith("end: ") and name[5:] not in CALM_ENDS
            if count and (is_wrong or name.startswith(("move: ", "loss: "))):
                raise ViolationError(f"nothing was broken, and yet: {name} ({count})")

    def _are_all_ready(self) -> bool:
        fleets = [head.fleet for head in self.scene.heads]
        return all(fleet is not None and fleet.health().is_ready for fleet in fleets)

    def _prove_service(self) -> None:
        self._until(self.world.now_ns + 60 * SECOND, self._are_all_ready)
        self._advance(HEARTBEAT_S)
        for head in self.scene.heads:
            seed = self.scene.drawn.getrandbits(32)
            request = GenerationRequest(
                f"last-{head.name}", MODEL, (1, 2, 3), SamplingParams(seed=seed), 5,
                qos=QosClass.AGENT,
            )  # fmt: skip
            probe = Client(
                len(head.clients), request, Manner(), self.world.now_ns, self.world.broken
            )
            head.send(probe)
            done: Callable[[], bool] = lambda probe=probe: bool(probe.end)  # type: ignore[misc]  # noqa: E731
            self._until(self.world.now_ns + 60 * SECOND, done)
            if probe.end not in ("length", "stop"):
                raise ViolationError(f"all is healed, and a new request of {head.name} came to {probe.end!r}")

    # --- looking on ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._turns += 1
        self.world.after(WATCH_MS * MS, self._watch)
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
                if late_ns > 75 * SECOND:
                    raise ViolationError(f"{node.identity} does not end after SIGTERM")
        if self.owed.get(node, now_ns + 1) <= now_ns:
            del self.owed[node]
            if not node.is_up:
                node.start()

    def _died(self, node: SimNode, prompt: tuple[int, ...]) -> None:
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
        names = [head.name for head in roster.heads.values()]
        self.checks.count("two links of one head", int(len(set(names)) < len(names)))
        bound = LinkLimits().outgoing_bytes_max
        if any(head.link._outbox.bytes > bound for head in roster.heads.values()):
            raise ViolationError(f"{node.identity}: a link's queue is over its bound")

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
        self.checks.count("single returns", int(self.shape.nodes == 1 and bool(node.slots)
                          and any(slot.epoch > 1 for slot in node.slots.values())))  # fmt: skip

    def _judge_dials(self) -> None:
        for pair, count in self.network.dialled.items():
            if count - self._dialled.get(pair, 0) > DIALS_PER_10_S_MAX:
                raise ViolationError(f"{pair[0]} dials {pair[1]} without a pause")
        self._dialled = dict(self.network.dialled)

    def _held(self) -> str:
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

    def close(self) -> None:
        for node in self.scene.nodes:
            node.crash()
        for head in self.scene.heads:
            head.crash()


class _Lines(logging.Handler):
    """Prints what the product logs, at virtual times."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        name = "-" if self._world.current is None else self._world.current.name
        fields = getattr(record, _FIELDS, {})
        tail = " ".join(f"{key}={value}" for key, value in fields.items() if key != "scores")
        print(f"{self._world.now_ns / SECOND:10.4f} {name:3} {record.getMessage()} {tail}")


def run_seed(seed: int, only: tuple[str, ...] = (), *, is_told: bool = False) -> Outcome:
    """Run one seed. Never raises for a broken promise: it is in the outcome."""
    outcome = Outcome(seed)
    began_s = time.process_time()
    if not is_told:
        logging.disable(logging.CRITICAL)
    gc.disable()
    try:
        with ExitStack() as stack:
            stack.enter_context(installed())
            run = Run(seed, only)
            if is_told:
                handler = _Lines(run.world)
                logging.getLogger().addHandler(handler)
                logging.getLogger().setLevel(logging.INFO)
                stack.callback(logging.getLogger().removeHandler, handler)
                print(run.shape, run.scene.load)
            stack.enter_context(patched(*run.checks.patches()))
            stack.enter_context(patched(*(TIGHT if run.shape.is_tight else ())))
            stack.enter_context(patched(*(COARSE if run.shape.is_coarse else ())))
            try:
                run.play()
            except ViolationError as broken:
                outcome.violation = str(broken)
            finally:
                outcome.trace = run.world.trace
                outcome.simulated_s = run.world.now_ns / SECOND
                run.close()
            _gather(run, outcome)
    finally:
        gc.enable()
        gc.collect()
        logging.disable(logging.NOTSET)
    outcome.cpu_s = time.process_time() - began_s
    return outcome


def _gather(run: Run, outcome: Outcome) -> None:
    counts = run.checks.counts
    for head in run.scene.heads:
        counts["sessions"] = counts.get("sessions", 0) + len(head.clients)
    counts["deaths"] = sum(node.deaths for node in run.scene.nodes)
    counts["bytes held"] = run.network.counts["held"]
    counts["back-pressure"] = run.network.counts["back-pressure"]
    counts["faults"] = sum(n for name, n in counts.items() if name.startswith("fault: "))
    outcome.counts = counts
    outcome.events = run.world.events
