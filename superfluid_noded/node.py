"""The parts of a running node, joined: one card and one agent for all links, one scheduler and loop for each model.

It binds nothing and owns no task: `server.py` does. Everything here runs on the event loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from superfluid_core.clock import MS, Clock
from superfluid_core.engine.loop import EngineLoop
from superfluid_core.limits import LinkLimits
from superfluid_core.link.listen import Listener
from superfluid_core.link.setup import LinkSetup
from superfluid_core.link.tls import Credentials, FleetKeys, PkiFiles
from superfluid_core.scheduler.plan import Input, StepDone, TickDone, TickPlan
from superfluid_core.scheduler.scheduler import Scheduler
from superfluid_core.tracing.options import open_tracer
from superfluid_noded.agent import Agent
from superfluid_noded.answers import ModelCard, NodeCard
from superfluid_noded.build import Built, scheduler_sizes
from superfluid_noded.config import NodeConfig
from superfluid_noded.embeds import EmbedDesk
from superfluid_noded.gauges import LinkFigures
from superfluid_noded.grammars import GrammarDesk
from superfluid_noded.joiner import Joiner
from superfluid_noded.metrics import FACTS, NodeMetrics
from superfluid_noded.pins import Pins, pins_figures
from superfluid_noded.prefix_reports import PrefixReports
from superfluid_noded.psi import PressureWatch
from superfluid_noded.recording import RecordedScheduler, RecordFile, Recordings, Sizes
from superfluid_noded.service import Service
from superfluid_noded.serving import Serving, steps, submit
from superfluid_noded.spans import Traces
from superfluid_noded.teller import Teller
from superfluid_noded.web import HUNG

HUNG_FACTOR = 4
SALT_BYTES = 32
"""Of the prefix cache's salt, where no fleet key gives one: heads learn it from WELCOME."""


class _Watches:
    """Shows an engine loop's doings to the teller (waits end) and to the metrics."""

    def __init__(self, teller: Teller, metrics: NodeMetrics) -> None:
        self._teller = teller
        self._metrics = metrics

    def planned(self, plan: TickPlan, elapsed_ns: int) -> None:
        self._teller.planned(plan)
        self._metrics.planned(plan, elapsed_ns)

    def stepped(self, done: StepDone) -> None:
        self._metrics.stepped(done)

    def ticked(self, done: TickDone) -> None:
        self._metrics.ticked(done)


class Node:
    """Needs a running event loop. `models` and `built` are parallel, the main model first."""

    def __init__(
        self,
        config: NodeConfig,
        models: Sequence[tuple[tuple[str, ...], Built]],
        keys: Credentials | None,
        clock: Clock,
        record: Recordings | None = None,
    ) -> None:
        cards = tuple(ModelCard(names, built.info, built.text_files) for names, built in models)
        limits = replace(
            LinkLimits(), handshake_ms=config.handshake_ms, idle_timeout_ms=config.idle_timeout_ms
        )
        minted = secrets.token_bytes(SALT_BYTES) if isinstance(keys, PkiFiles) else b""
        card = _card(config, cards, minted)
        self.facts = _facts(card)
        self.clock = clock
        self.limits = limits
        salt = keys.prefix_salt if isinstance(keys, FleetKeys) else minted
        schedulers = [
            _scheduler(config, each, salt, None if record is None else record.files[number])
            for number, each in enumerate(cards)
        ]
        self.scheduler = schedulers[0]
        pct = config.scheduling.pin_budget_pct
        self.pins = [
            Pins(scheduler, each.info.blocks * pct // 100)
            for each, scheduler in zip(cards, schedulers, strict=True)
        ]
        self.metrics = NodeMetrics(self.scheduler.stats, self.facts)
        for each, scheduler in zip(cards[1:], schedulers[1:], strict=True):
            self.metrics.add_model(each.names[0], scheduler.stats)
        pins = {
            name: each for model, each in zip(cards, self.pins, strict=True) for name in model.names
        }
        self.agent = Agent(card, clock, self.metrics, self.submit, limits, pins)
        self.prefixes = PrefixReports(schedulers, self.agent.roster)
        self.teller = Teller(self.agent, clock, self.metrics, limits)
        watch = _Watches(self.teller, self.metrics)
        self.servings = tuple(
            Serving(
                each, scheduler, EngineLoop(scheduler, built.engine, clock, self.teller.tell, watch)
            )
            for each, scheduler, (_, built) in zip(cards, schedulers, models, strict=True)
        )
        self.agent.on_embed = EmbedDesk(self.servings, self.agent.roster).take
        self.grammars = GrammarDesk(lambda *inputs: submit(self.servings, inputs), self.teller.tell)
        for names, built in models:
            if built.grammars is not None:
                self.grammars.add(names, built.grammars)
        self.service = Service(self.agent, self.teller, self.servings, clock, self.figures)
        self.pressure = _pressure(config, self)
        self.listener = Listener(
            self.service.handle,
            self.agent.welcome,
            keys,
            config.identity,
            limits,
            clock,
            self.service.status,
        )
        self.joiner = _joiner(config, self)
        self.service.on_farewell = self.joiner.farewell
        self.metrics.links.read = self._links
        self.traces = _traces(config, self)

    def _links(self) -> LinkFigures:
        refusals = self.listener.refusals + self.joiner.refusals
        return LinkFigures(len(self.agent.roster.heads), self.joiner.joins, refusals)

    @property
    def loop(self) -> EngineLoop:
        """The main model's."""
        return self.servings[0].loop

    @property
    def loops(self) -> list[EngineLoop]:
        return [serving.loop for serving in self.servings]

    @property
    def steps(self) -> int:
        return steps(self.servings)

    def submit(self, *inputs: Input) -> None:
        self.grammars.submit(*inputs)

    def figures(self) -> dict[str, Any]:
        """Give everything that is measured, with the node's facts, as JSON knows it."""
        now_ns = self.clock.now_ns()
        pins = {
            name: pins_figures(each, now_ns)
            for model, each in zip(self.agent.card.models, self.pins, strict=True)
            for name in model.names
        }
        node = {**self.facts, "steps": self.steps, "pressure": self._pressure_level}
        return {**self.metrics.figures(node), "pins": pins}

    @property
    def _pressure_level(self) -> str:
        return "unwatched" if self.pressure is None else self.pressure.level.value

    @property
    def is_hung(self) -> bool:
        """A step takes far longer than predicted (decisions 8)."""
        return any(self._is_loop_hung(loop) for loop in self.loops if loop.is_busy)

    def _is_loop_hung(self, loop: EngineLoop) -> bool:
        predicted_ns = loop.predicted_step_ms() * MS
        patience_ns = max(self.limits.engine_hung_ms * MS, HUNG_FACTOR * predicted_ns)
        return self.clock.now_ns() - loop.step_started_ns > patience_ns

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Say whether the node would serve, and what it does."""
        is_hung = self.is_hung
        is_well = not is_hung and not self.agent.is_draining
        details = {
            "status": "ok" if is_well else HUNG if is_hung else "draining",
            "identity": self.facts["identity"],
            "sessions": len(self.agent.roster.live),
            "links": len(self.agent.roster.heads),
            "steps": self.steps,
        }
        return is_well, details


def _card(config: NodeConfig, cards: tuple[ModelCard, ...], minted: bytes) -> NodeCard:
    rules = config.scheduling.rules
    shared, lanes = rules.prefix_shared, rules.tenant_lanes
    boot, has_traces = secrets.token_hex(8), config.traces is not None
    return NodeCard(config.identity, boot, cards, shared, minted, lanes, has_traces)


def _traces(config: NodeConfig, node: Node) -> Traces:
    """Open the way to a collector, if there is one, and let the agent and the roster speak of sessions."""
    facts = {"service.name": "superfluid-noded", "service.instance.id": config.identity}
    tracer = open_tracer(
        config.traces, {**facts, "superfluid.boot": node.facts["boot"]}, node.clock
    )
    traces = Traces(tracer, node.clock, lambda: node.steps)
    node.agent.on_trace, node.agent.roster.on_over = traces.begin, traces.over
    node.teller.steps = lambda: node.steps
    if tracer is not None:
        node.metrics.count_spans(tracer.counts)
    return traces


def _joiner(config: NodeConfig, node: Node) -> Joiner:
    return Joiner(
        config.join,
        node.listener.shake,
        LinkSetup(node.limits, node.clock, status_source=node.service.status),
        node.service.handle,
        lambda: node.agent.is_draining,
    )


def _facts(card: NodeCard) -> dict[str, str]:
    info = card.main.info
    values = (
        *(card.identity, card.boot, card.main.names[0], info.engine_build, info.device),
        *(info.dtype, info.weights_fingerprint, str(info.window)),
    )
    return dict(zip(FACTS, values, strict=True))


def _scheduler(
    config: NodeConfig, card: ModelCard, salt: bytes, record: RecordFile | None
) -> Scheduler:
    limits, rules, pool = scheduler_sizes(config, card.info)
    is_free = card.info.cuts_are_free
    if record is not None:
        return RecordedScheduler(Sizes(limits, rules, pool, is_free), salt, record)
    return Scheduler(limits, pool, prefix_salt=salt, cuts_are_free=is_free, rules=rules)


def _pressure(config: NodeConfig, node: Node) -> PressureWatch | None:
    path = config.scheduling.pressure_file
    return None if path is None else PressureWatch(path, node.submit)
