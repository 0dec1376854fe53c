"""`freeze`: a node that stops and comes back, and a network that swallows what it says, what it hears, or both.

Every node is reached through a proxy that can become a black hole. Streams go on elsewhere within the bar, byte for byte; what the
woken node still says is dropped by its head. Before the first round comes what must not be mistaken for a fault: a prefill of twenty
seconds, and an idle fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

from superfluid_head.bench.load import Answer, chat_body
from superfluid_head.bench.loops import run
from superfluid_head.bench.prose import Draws, prose
from superfluid_head.bench.proxy import HoleProxy
from superfluid_head.bench.report import percentile
from superfluid_head.bench.rig import Rig
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario, Verdict
from superfluid_head.bench.scenarios.modes import bodies_of, comparable
from superfluid_head.bench.scenarios.stage import (
    Stage,
    ask,
    ask_all,
    client_of,
    engine_flags,
    failures,
    fleet_state,
    own_fleet,
)
from superfluid_head.bench.small_fleet import Shape, SmallFleet

GAP_MS_MAX = 4_000.0
RATES = "prefill=2000,decode=10"
SLOW_RATES = "prefill=100,decode=10"
MODES_USED = ("greedy", "seeded", "penalties")
HOLES = {"hole from": ("from",), "hole to": ("to",), "hole both": ("to", "from")}


class HoledFleet(SmallFleet):
    """A fleet whose head sees every node through a proxy."""

    def __init__(self, stack: ExitStack, *parts: object) -> None:
        self.proxies: dict[str, HoleProxy] = {}
        self._stack = stack
        super().__init__(*parts)  # type: ignore[arg-type]

    def link_addresses(self) -> list[str]:
        for name, address in self.addresses.items():
            if name not in self.proxies:
                self.proxies[name] = self._stack.enter_context(HoleProxy(address))
        return [proxy.address for proxy in self.proxies.values()]


class Freeze(Scenario):
    """The scenario."""

    name = "freeze"
    about = "SIGSTOP for 1, 5, 15, 60 s and black holes one and both ways"
    needs_rig = "it stops processes and their network"
    engine = "mock"
    nodes = 4
    bars = (
        Bar("failed", most=0, of_every=True),
        Bar("equal_share", least=1.0, of_every=True),
        Bar("gap_ms_p99", most=GAP_MS_MAX),
        Bar("false_deaths", most=0, of_every=True),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.streams = plan.streams or self.size(32, 8)
        self.tokens = self.size(120, 60)
        self.stops_s = (1, 5, 15, 60) if not plan.is_quick else (1, 5)
        self.idle_s = self.size(600, 3)
        self.draws = Draws(plan.seed)
        self.gaps: list[float] = []
        self.false_deaths = 0.0

    def setup(self, stack: ExitStack) -> None:
        self._long_prefill()
        flags = engine_flags(
            self.plan, self.engine_in_use, self.nodes, "--max-batch", "32", rates=RATES
        )
        rig = stack.enter_context(Rig())
        fleet = HoledFleet(stack, rig, flags, self.plan.model, self.nodes, Shape())
        self.stage = Stage(fleet.url, fleet.served, rig=rig, fleet=fleet, head=fleet.head)
        self.fleet = fleet
        before = self._faults()
        rig.sleep(self.idle_s)
        self.false_deaths += self._faults() - before
        self.bodies = bodies_of(
            self.stage.model, self.streams, self.tokens, MODES_USED, self.plan.seed
        )
        self.unbroken = ask(self.stage, self.bodies)

    def _long_prefill(self) -> None:
        """Twenty seconds of chunks must not look like a fault."""
        with ExitStack() as stack:
            rates = SLOW_RATES
            flags = engine_flags(self.plan, "mock", 2, "--step-tokens", "64", rates=rates)
            stage = own_fleet(stack, self.plan, flags, 2)
            words = self.size(1_400, 120)
            (answer,) = ask(stage, [chat_body(stage.model, prose(7, words), 4, ignore_eos=True)])
            self.stage = stage
            self.false_deaths += self._faults() + (not answer.is_complete)
            self.notes.append(f"the long prefill took {(answer.first_ms or 0) / 1000:.1f} s")

    def _faults(self) -> float:
        async def read() -> float:
            async with client_of(self.stage) as client:
                counters = (await fleet_state(client, self.stage))["counters"]
            return float(counters["faults"] + counters["moves"])

        return run(read())

    def round(self, number: int) -> Figures:
        whole: Figures = {"failed": 0, "equal_share": 1.0, "false_deaths": self.false_deaths}
        gaps: list[float] = []
        for label, seconds in [
            *((f"stop {s} s", s) for s in self.stops_s),
            *((h, 5) for h in HOLES),
        ]:
            answers = run(self._broken(label, seconds))
            equal = self._equal(answers)
            worst = [max(each.gaps_ms(), default=0.0) for each in answers]
            gaps += worst
            whole["failed"] += failures(answers)
            whole["equal_share"] = min(whole["equal_share"], equal)
            whole[f"{label}: gap ms max"] = max(worst)
        if number:
            self.gaps += gaps
        return {**whole, "gap_ms_p99": percentile(gaps, 99)}

    def _equal(self, answers: Sequence[Answer]) -> float:
        pairs = zip(answers, self.unbroken, strict=True)
        return sum(comparable(a) == comparable(b) for a, b in pairs) / len(answers)

    async def _broken(self, label: str, seconds: float) -> list[Answer]:
        """Ask everything; break a node a while later, heal it after so many seconds, and wait until it is back."""
        fleet = self.fleet
        name = f"node-{self.draws.below(self.nodes)}"
        proxy = fleet.proxies[name]

        async def strike() -> None:
            await asyncio.sleep(1.5)
            if label in HOLES:
                proxy.open_hole(*HOLES[label])
            else:
                fleet.node(name).freeze()
            await asyncio.sleep(seconds)
            proxy.fill_hole()
            fleet.node(name).thaw()

        async with client_of(self.stage) as client, asyncio.TaskGroup() as group:
            striking = group.create_task(strike())
            answers = await ask_all(client, self.stage, self.bodies)
            await striking
        await asyncio.to_thread(fleet.wait_linked)
        return answers

    def judge(self, rounds: Sequence[Figures]) -> list[Verdict]:
        """Take the gaps of all rounds as one sample."""
        pooled = [{**figures, "gap_ms_p99": percentile(self.gaps, 99)} for figures in rounds]
        return super().judge(pooled)


SCENARIO = Freeze
