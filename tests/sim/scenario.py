"""One seed, from topology to verdict.

A run has four parts: faults are drawn and strike; everything is healed; every session must end within the liveness bound and a
fresh request must succeed; nothing may be held anywhere afterwards. The outcome is figures and a trace hash, or the broken promise.
"""

from __future__ import annotations

import gc
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import superfluid_core.engine.loop as loop_module
import superfluid_core.link.link as link_module
import superfluid_head.fleet.fleet as fleet_module
import superfluid_head.fleet.node as fleet_node_module
import superfluid_head.fleet.pulse as pulse_module
import superfluid_noded.node as node_module
import superfluid_noded.prefix_reports as reports_module
import superfluid_noded.service as service_module
from superfluid_core.limits import LinkLimits
from superfluid_core.logs import _FIELDS
from superfluid_core.placement.policies import Policy
from superfluid_core.session import QosClass, SamplingParams
from superfluid_head.fleet.events import GenerationRequest
from superfluid_noded.config import JOIN_PORT
from tests.sim.checks import Checks
from tests.sim.faults import Faults
from tests.sim.head import Client, Manner, SimHead
from tests.sim.inspector import Inspector
from tests.sim.lies import Liar, Scene
from tests.sim.network import Network
from tests.sim.node import DRAIN_GRACE_MS, MODEL, SimNode, installed, node_config, patched
from tests.sim.shape import (
    DENSE_EVERY,
    draw_joining,
    draw_links,
    draw_load,
    draw_options,
    draw_shape,
)
from tests.sim.world import MS, SECOND, ViolationError, World

logger = logging.getLogger(__name__)

LIVENESS_S = 120
HEARTBEAT_S = 5.0
SETTLE_S = 140
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


TIGHT = ((link_module, "WRITE_HIGH_BYTES", 512), (link_module, "WRITE_LOW_BYTES", 128))
"""Pipes so narrow that queues form in the link."""


def coarse(period_ms: int) -> tuple[tuple[Any, str, Any], ...]:
    """Regular looks at the time, and words about load, less often than the product has them: most of the cost of an hour without incident."""
    return (
        (pulse_module, "PERIOD_MS", period_ms),
        (fleet_node_module, "PERIOD_MS", period_ms),
        (fleet_module, "TICK_MS", period_ms),
        (service_module, "SWEEP_S", period_ms / 1e3),
        (loop_module, "TIME_MS", period_ms),
        (reports_module, "REPORT_S", period_ms / 1e3),
        (
            node_module,
            "LinkLimits",
            partial(LinkLimits, status_ms=period_ms, status_ms_min=period_ms // 2),
        ),
    )


class Run:
    """One seed at work."""

    def __init__(self, seed: int, only: tuple[str, ...] = (), *, is_dense: bool = False) -> None:
        drawn = self.drawn = random.Random(f"sim {seed}")
        self.shape = draw_shape(drawn, only, is_dense=is_dense or seed % DENSE_EVERY == 0)
        self.links = draw_links(random.Random(f"links {seed}"))
        self.is_joining = draw_joining(random.Random(f"joining {seed}"))
        self.world = World()
        self.network = Network(
            self.world, lambda _a, _b: drawn.choice((100_000, 300_000, 2 * MS, 20 * MS))
        )
        if self.shape.is_tight:
            self.network.window_bytes = 1_024
        self.checks = Checks(self.world)
        nodes = self._draw_nodes()
        load = draw_load(drawn, self.shape, nodes[0].options)
        heads = [self._draw_head(number, nodes) for number in range(self.shape.heads)]
        self.scene = Scene(
            self.world, self.network, nodes, heads, self.checks, random.Random(drawn.random()), load
        )
        self.faults = Faults(self.scene)
        self.checks.distort = Liar(self.scene).distort
        self.checks.is_starved = self._is_starved
        self.inspector = Inspector(self.scene, drawn)
        for node in nodes:
            node.on_death = self.inspector.died
        self.checks.on_down = self.inspector.saw_down
        self.checks.on_open = self.inspector.saw_open

    # --- drawing ------------------------------------------------------------------------------------

    def _draw_nodes(self) -> list[SimNode]:
        drawn, nodes = self.drawn, []
        options = draw_options(drawn, self.shape.pace)
        for number in range(self.shape.nodes):
            flags: dict[str, object] = {
                "max_batch": options.lanes,
                "drain_grace_ms": DRAIN_GRACE_MS,
            }
            if self.is_joining:
                flags["join"] = [f"127.0.0.{1 + n}:{JOIN_PORT}" for n in range(self.shape.heads)]
            config = node_config(f"n{number}", f"127.0.0.{11 + number}", flags)
            node = SimNode(self.world, self.network, number, options, config)
            node.drift_ppm = drawn.choice((0, 0, -500, 500, 200))
            self.checks.count("drifting", int(node.drift_ppm != 0))
            nodes.append(node)
        return nodes

    def _draw_head(self, number: int, nodes: list[SimNode]) -> SimHead:
        drawn = self.drawn
        seeded = random.Random(drawn.random())
        head = SimHead(
            self.world, self.network, f"h{number}", f"127.0.0.{1 + number}", nodes, seeded
        )
        head.drift_ppm = drawn.choice((0, 300, -300))
        head.counts = self.checks.counts
        head.cached_of = self.checks.cached_of
        head.options = {
            "policy": drawn.choice((Policy.LOAD_AWARE, Policy.LOAD_AWARE, *Policy)),
            **self.links,
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
        self.begin()
        for head in self.scene.heads:
            head.load = self.scene.load
        self._strike()
        self.end()

    def begin(self) -> None:
        """Start everything."""
        scene = self.scene
        for node in scene.nodes:
            node.start()
        for head in scene.heads:
            head.start()
        self.inspector.watch()
        self.advance(2.0)

    def end(self) -> None:
        """Strike no more, and hold everybody to what was promised."""
        scene, world = self.scene, self.world
        self._heal()
        for head in scene.heads:
            head.is_asked_to_rest = True
        last_ns = max(scene.busy_until_ns, world.now_ns)
        self._until(last_ns, None)
        self._until(last_ns + LIVENESS_S * SECOND, self._are_all_over)
        self._judge_ends()
        self._prove_service()
        self._until(world.now_ns + SETTLE_S * SECOND, lambda: not self.inspector.held())
        held = self.inspector.held()
        if held:
            raise ViolationError(f"still held at the end: {held}")

    def _strike(self) -> None:
        shape, drawn = self.shape, self.scene.drawn
        until_ns = self.world.now_ns + shape.duration_s * SECOND
        while self.world.now_ns < until_ns:
            gap_s = drawn.expovariate(1 / shape.gap_s)
            self.advance(10.0 + gap_s / 2 if shape.is_calm else gap_s)
            kind = drawn.choice(shape.kinds)
            logger.info(
                "fault: %s %s", kind, "" if self.faults.strike(kind) else "(nothing to harm)"
            )

    def advance(self, seconds: float) -> None:
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
            node.ills.lane_faults = 0

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
        self.advance(HEARTBEAT_S)
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
                raise ViolationError(
                    f"all is healed, and a new request of {head.name} came to {probe.end!r}"
                )

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


@contextmanager
def staged(seed: int, only: tuple[str, ...] = (), *, is_dense: bool = False) -> Iterator[Run]:
    """Draw a run and put the virtual world in place for it; dispose of everything afterwards."""
    gc.collect()  # the run before
    gc.freeze()  # what is left are modules: the next look need not go through them again
    gc.disable()
    try:
        with ExitStack() as stack:
            stack.enter_context(installed())
            run = Run(seed, only, is_dense=is_dense)
            stack.enter_context(patched(*run.checks.patches()))
            stack.enter_context(patched(*(TIGHT if run.shape.is_tight else ())))
            if run.shape.is_coarse:
                stack.enter_context(patched(*coarse(run.shape.pace.coarse_ms)))
            try:
                yield run
            finally:
                run.close()
    finally:
        gc.enable()


@contextmanager
def _told(run: Run, *, is_told: bool) -> Iterator[None]:
    """Print what the product logs, or let it log nothing."""
    if not is_told:
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
        return
    handler, root = _Lines(run.world), logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    print(run.shape, run.scene.load)
    try:
        yield
    finally:
        root.removeHandler(handler)


def run_seed(
    seed: int, only: tuple[str, ...] = (), *, is_told: bool = False, is_dense: bool = False
) -> Outcome:
    """Run one seed. Never raises for a broken promise: it is in the outcome."""
    outcome = Outcome(seed)
    began_s = time.process_time()
    with staged(seed, only, is_dense=is_dense) as run, _told(run, is_told=is_told):
        try:
            run.play()
        except ViolationError as broken:
            outcome.violation = str(broken)
        finally:
            outcome.trace = run.world.trace
            outcome.simulated_s = run.world.now_ns / SECOND
            run.close()
        _gather(run, outcome)
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
