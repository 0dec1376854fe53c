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
from superfluid_core.link.keys import FleetKeys
from superfluid_core.link.listen import Listener
from superfluid_core.scheduler.plan import Input, StepDone, TickDone, TickPlan
from superfluid_core.scheduler.scheduler import Scheduler
from superfluid_noded.agent import Agent
from superfluid_noded.answers import ModelCard, NodeCard
from superfluid_noded.build import Built, scheduler_sizes
from superfluid_noded.config import NodeConfig
from superfluid_noded.metrics import NodeMetrics
from superfluid_noded.pins import Pins
from superfluid_noded.prefix_reports import PrefixReports
from superfluid_noded.psi import PressureWatch
from superfluid_noded.recording import RecordedScheduler, RecordFile, Sizes
from superfluid_noded.service import Service
from superfluid_noded.serving import Serving, steps, submit
from superfluid_noded.teller import Teller

HUNG_FACTOR = 4


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
        keys: FleetKeys | None,
        clock: Clock,
        record: RecordFile | None = None,
    ) -> None:
        cards = tuple(ModelCard(names, built.info, built.text_files) for names, built in models)
        limits = replace(
            LinkLimits(), handshake_ms=config.handshake_ms, idle_timeout_ms=config.idle_timeout_ms
        )
        rules = config.scheduling.rules
        card = NodeCard(config.identity, secrets.token_hex(8), cards, rules.prefix_shared)
        info = card.main.info
        self.facts = _facts(card)
        self.clock = clock
        self.limits = limits
        salt = b"" if keys is None else keys.prefix_salt
        schedulers = [
            _scheduler(config, each, salt, record if each is card.main else None) for each in cards
        ]
        self.scheduler = schedulers[0]
        budget = info.blocks * config.scheduling.pin_budget_pct // 100
        self.pins = Pins(self.scheduler, budget)
        self.metrics = NodeMetrics(self.scheduler.stats, self.facts)
        for each, scheduler in zip(cards[1:], schedulers[1:], strict=True):
            self.metrics.add_model(each.names[0], scheduler.stats)
        self.agent = Agent(card, clock, self.metrics, self.submit, limits, self.pins)
        self.prefixes = PrefixReports(self.scheduler, self.agent.roster)
        self.teller = Teller(self.agent, clock, self.metrics, limits)
        watch = _Watches(self.teller, self.metrics)
        self.servings = tuple(
            Serving(
                each, scheduler, EngineLoop(scheduler, built.engine, clock, self.teller.tell, watch)
            )
            for each, scheduler, (_, built) in zip(cards, schedulers, models, strict=True)
        )
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
        submit(self.servings, inputs)

    def figures(self) -> dict[str, Any]:
        """Give everything that is measured, with the node's facts, as JSON knows it."""
        pins = {
            "blocks": self.pins.blocks,
            "budget_blocks": self.pins.budget,
            "refused_blocks": self.pins.refused,
            "seconds_to_next_end": self.pins.seconds_to_next_end(self.clock.now_ns()),
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
            "status": "ok" if is_well else "draining" if self.agent.is_draining else "engine hung",
            "identity": self.facts["identity"],
            "sessions": len(self.agent.roster.live),
            "links": len(self.agent.roster.heads),
            "steps": self.steps,
        }
        return is_well, details


def _facts(card: NodeCard) -> dict[str, str]:
    info = card.main.info
    return {
        "identity": card.identity,
        "boot": card.boot,
        "model": card.main.names[0],
        "engine": info.engine_build,
        "device": info.device,
        "dtype": info.dtype,
        "weights": info.weights_fingerprint,
        "window": str(info.window),
    }


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
