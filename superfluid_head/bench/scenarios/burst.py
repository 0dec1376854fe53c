"""`burst`: how placement spreads what comes at once, what comes at nodes of unlike speed, and what comes one after another.

Three fleets in turn. The first lies behind proxies that hold back every load report while 64 requests are placed, so nothing but the
head's own reservations can spread them. The second has one node twice as fast as the others and is kept saturated; its shares are
held against speed. The third is asked a thousand times, one request at a time. Where a request went, the head tells.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from superfluid_core.clock import SystemClock
from superfluid_head.bench.load import Answer, chat_body, closed_loop
from superfluid_head.bench.loops import run
from superfluid_head.bench.prose import prose
from superfluid_head.bench.rig import Rig
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario
from superfluid_head.bench.scenarios.freeze import HoledFleet
from superfluid_head.bench.scenarios.stage import (
    Stage,
    ask_all,
    client_of,
    engine_flags,
    failures,
    own_fleet,
    placements,
)
from superfluid_head.bench.small_fleet import Shape

NODES = 4
AT_ONCE = 64
LANES = 24
HOLD_S = 0.6
SPEEDS = (2, 1, 1, 1)
LANES_UNEVEN = 4
# More than there are lanes: at saturation a node's share is what it can do.
CLOSED_LOOP = 32
RATE_PREFILL, RATE_DECODE = 4_000, 40


def shares(records: Sequence[Sequence[dict[str, Any]]]) -> Counter[str]:
    """How many requests were first placed on each node."""
    return Counter(each[0]["node"] for each in records if each)


def rates(speed: int) -> str:
    return f"prefill={RATE_PREFILL * speed},decode={RATE_DECODE * speed}"


class Burst(Scenario):
    """The scenario."""

    name = "burst"
    about = "64 at once without load reports; nodes of speed 2:1:1:1; a thousand one after another"
    needs_rig = "it withholds load reports and needs nodes of known speed"
    engine = "mock"
    bars = (
        Bar("failed", most=0, of_every=True),
        Bar("burst_max_over_mean", most=1.10),
        Bar("speed_share_off", most=0.10),
        Bar("sequential_share_off", most=0.10),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.busy = self.size(400, 120)
        self.sequence = self.size(1_000, 100)

    def setup(self, stack: ExitStack) -> None:
        rig = stack.enter_context(Rig())
        flags = engine_flags(self.plan, "mock", NODES, "--max-batch", str(LANES), rates=rates(1))
        fleet = HoledFleet(stack, rig, flags, self.plan.model, NODES, Shape())
        self.even = Stage(fleet.url, fleet.served, rig=rig, fleet=fleet, head=fleet.head)
        self.proxies = list(fleet.proxies.values())
        shape = Shape(node_flags=tuple(("--mock-rates", rates(speed)) for speed in SPEEDS))
        lanes = ("--max-batch", str(LANES_UNEVEN))
        flags = engine_flags(self.plan, "mock", NODES, *lanes, rates=rates(1))
        self.uneven = own_fleet(stack, self.plan, flags, NODES, shape)

    def round(self, number: int) -> Figures:
        first = 100_000 * number + self.plan.seed
        return run(self._round(first))

    def _bodies(self, first: int, count: int, tokens: int) -> list[dict[str, Any]]:
        model = self.even.model
        return [
            chat_body(model, prose(first + n, 60), tokens, ignore_eos=True) for n in range(count)
        ]

    async def _round(self, first: int) -> Figures:
        burst = await self._at_once(first)
        busy, by_speed = await self._closed(self.uneven, first + 1_000, self.busy, CLOSED_LOOP)
        answers, in_turn = await self._closed(self.even, first + 10_000, self.sequence, 1)
        speeds = {f"node-{n}": speed / sum(SPEEDS) for n, speed in enumerate(SPEEDS)}
        even = {f"node-{n}": 1 / NODES for n in range(NODES)}
        spread = shares(burst[1])
        return {
            "failed": failures(burst[0]) + failures(busy) + failures(answers),
            "burst_max_over_mean": max(spread.values()) / (sum(spread.values()) / NODES),
            "speed_share_off": furthest(by_speed, speeds),
            "fast_node_share": by_speed["node-0"] / sum(by_speed.values()),
            "sequential_share_off": furthest(in_turn, even),
        }

    async def _at_once(self, first: int) -> tuple[list[Answer], list[list[dict[str, Any]]]]:
        """Ask everything while no node is heard."""

        async def let_go() -> None:
            await asyncio.sleep(HOLD_S)
            for proxy in self.proxies:
                proxy.fill_hole()

        async with client_of(self.even) as client, asyncio.TaskGroup() as group:
            for proxy in self.proxies:
                proxy.open_hole("from")
            group.create_task(let_go())
            answers = await ask_all(client, self.even, self._bodies(first, AT_ONCE, 24))
            return answers, await placements(client, self.even, answers)

    async def _closed(
        self, stage: Stage, first: int, count: int, at_once: int
    ) -> tuple[list[Answer], Counter[str]]:
        bodies = self._bodies(first, count, 16 if at_once > 1 else 2)
        async with client_of(stage) as client:
            answers = await closed_loop(client, stage.url, bodies, at_once, SystemClock())
            return answers, shares(await placements(client, stage, answers))


def furthest(found: Counter[str], wanted: dict[str, float]) -> float:
    """Return the largest relative distance of a node's share from what it should be."""
    total = max(1, sum(found.values()))
    return max(abs(found[name] / total - share) / share for name, share in wanted.items())


SCENARIO = Burst
