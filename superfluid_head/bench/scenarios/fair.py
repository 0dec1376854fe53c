"""`fair`: two tenants with equally long backlogs share the tokens, and a tenant with two short requests hardly notices the others.

It speaks to the fleet's own door inside this process, over real links to real nodes, because tenants are names of API keys and a
head of today knows one key. Everything behind that door is the product: the head's queue, placement, and the nodes' fair order with a cap on
the lanes of one tenant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from superfluid_core.clock import SystemClock
from superfluid_core.errors import SuperfluidError
from superfluid_core.link.addresses import parse_address
from superfluid_core.link.keys import load_keys
from superfluid_core.session import SamplingParams
from superfluid_head.bench.loops import run
from superfluid_head.bench.prose import Draws
from superfluid_head.bench.report import percentile
from superfluid_head.bench.rig import RigError
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario
from superfluid_head.bench.scenarios.stage import engine_flags, own_fleet
from superfluid_head.fleet.events import GenerationRequest, TokensEvent
from superfluid_head.fleet.fleet import Fleet, FleetOptions, NodeAddress

NODES = 2
LANES = 4
RATES = "prefill=2000,decode=50"
LONG_PROMPT, LONG_OUTPUT = 64, 150
SHORT_PROMPT, SHORT_OUTPUT = 200, 8
READY_S = 30.0
T = TypeVar("T")


@dataclass(slots=True)
class Heard:
    """What one tenant was told: tokens so far, and the times to the first token in ms."""

    tokens: int = 0
    firsts: list[float] | None = None
    failed: int = 0


class Fair(Scenario):
    """The scenario."""

    name = "fair"
    about = "two tenants of 50 long requests each, then one of them against 2 short ones of another"
    needs_rig = "it needs two tenants, which are names of API keys"
    engine = "mock"
    bars = (
        Bar("failed", most=0, of_every=True),
        Bar("token_share", most=1.2),
        Bar("short_ttft_over_alone", most=1.5),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.backlog = plan.streams or self.size(50, 16)
        self.shorts = self.size(10, 4)
        self.draws = Draws(plan.seed)
        self.asked = 0

    def setup(self, stack: ExitStack) -> None:
        flags = engine_flags(
            self.plan, self.engine_in_use, NODES, "--max-batch", str(LANES),
            "--queue-policy", "fair", "--tenant-lanes", str(LANES - 1), rates=RATES,
        )  # fmt: skip
        self.stage = own_fleet(stack, self.plan, flags, NODES)

    def round(self, number: int) -> Figures:
        self.draws = Draws(self.plan.seed + number)
        return run(self._with_fleet(self._round))

    async def _with_fleet(self, body: Callable[[Fleet], Awaitable[T]]) -> T:
        fleet_rig = self.stage.fleet
        assert fleet_rig is not None
        addresses = tuple(
            NodeAddress(*parse_address(address, 0), name)
            for name, address in fleet_rig.addresses.items()
        )
        options = FleetOptions(addresses, f"bench-{self.asked}", load_keys(fleet_rig.key))
        fleet = Fleet(options, SystemClock())
        async with asyncio.TaskGroup() as group:
            running = group.create_task(fleet.run())
            try:
                if not await fleet.wait_ready(READY_S):
                    raise RigError("the nodes were not reached")
                return await body(fleet)
            finally:
                running.cancel()

    async def _round(self, fleet: Fleet) -> Figures:
        share, one, two = await self._equals(fleet)
        alone = Heard(firsts=[])
        await self._shorts(fleet, alone)
        beside = Heard(firsts=[])
        crowd = Heard()
        async with asyncio.TaskGroup() as group:
            longs = [group.create_task(self._long(fleet, "a", crowd)) for _ in range(self.backlog)]
            await asyncio.sleep(1.0)
            await self._shorts(fleet, beside)
            was_busy = sum(not task.done() for task in longs)
            for task in longs:
                task.cancel()
        p95 = percentile(beside.firsts or [], 95)
        return {
            "failed": one.failed + two.failed + alone.failed + beside.failed + crowd.failed,
            "token_share": share,
            "alone_ttft_ms_p95": percentile(alone.firsts or [], 95),
            "short_ttft_ms_p95": p95,
            "short_ttft_over_alone": p95 / percentile(alone.firsts or [], 95),
            "backlog_at_the_end": was_busy,
        }

    async def _equals(self, fleet: Fleet) -> tuple[float, Heard, Heard]:
        """Let two tenants compete until one has nothing left to wait; their tokens, more over fewer."""
        one, two = Heard(), Heard()
        async with asyncio.TaskGroup() as group:
            mine, theirs = [], []
            for _ in range(self.backlog):
                mine.append(group.create_task(self._long(fleet, "a", one)))
                theirs.append(group.create_task(self._long(fleet, "c", two)))
            lanes = NODES * LANES
            while all(sum(not t.done() for t in each) > lanes for each in (mine, theirs)):  # noqa: ASYNC110 - it looks at many tasks
                await asyncio.sleep(0.05)
            share = max(one.tokens, two.tokens) / max(1, min(one.tokens, two.tokens))
            for task in (*mine, *theirs):
                task.cancel()
        return share, one, two

    async def _shorts(self, fleet: Fleet, heard: Heard) -> None:
        """Ask two at a time, some times over."""
        for _ in range(self.shorts):
            async with asyncio.TaskGroup() as group:
                for _ in range(2):
                    group.create_task(self._ask(fleet, "b", SHORT_PROMPT, SHORT_OUTPUT, heard))

    async def _long(self, fleet: Fleet, tenant: str, heard: Heard) -> None:
        await self._ask(fleet, tenant, LONG_PROMPT, LONG_OUTPUT, heard)

    async def _ask(self, fleet: Fleet, tenant: str, prompt: int, output: int, heard: Heard) -> None:
        self.asked += 1
        ids = tuple(1_000 + self.draws.below(20_000) for _ in range(prompt))
        sampling = SamplingParams(seed=self.asked)
        request = GenerationRequest(
            f"fair-{self.asked}", self.stage.model, ids, sampling, output, ignore_eos=True, tenant=tenant
        )  # fmt: skip
        clock = self.stage.clock
        began_ns, is_first = clock.now_ns(), True
        try:
            async with fleet.generate(request) as generation:
                async for event in generation:
                    if isinstance(event, TokensEvent):
                        if is_first and heard.firsts is not None:
                            heard.firsts.append((clock.now_ns() - began_ns) / 1e6)
                        is_first = False
                        heard.tokens += len(event.ids)
        except SuperfluidError:
            heard.failed += 1


SCENARIO = Fair
