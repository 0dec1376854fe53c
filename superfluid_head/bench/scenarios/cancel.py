"""`cancel`: clients that leave in the queue, in the prefill, while decoding and after the last token, ten thousand of them.

They leave a handful at a time, and the nodes are asked until nothing of theirs is left: how long that takes, the asking included, bounds
from above how long a node took to see it. In the end nothing may be held anywhere.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import httpx

from superfluid_head.bench.load import Answer, chat, chat_body
from superfluid_head.bench.loops import run
from superfluid_head.bench.prose import Draws, prose
from superfluid_head.bench.report import percentile
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario
from superfluid_head.bench.scenarios.stage import (
    client_of,
    engine_flags,
    fleet_state,
    own_fleet,
    stats,
)
from superfluid_head.bench.small_fleet import Shape

NODES = 2
LANES = 8
HANDFUL = 20
RATES = "prefill=8000,decode=100"
SEEN_MS_MAX = 100.0
LEFT_AFTER_S = 1.0
GIVE_UP_MS = 5_000.0


class Cancel(Scenario):
    """The scenario."""

    name = "cancel"
    about = "10,000 aborts in queue, prefill, decode and after the last token"
    needs_rig = "it asks the nodes what they hold"
    engine = "mock"
    bars = (
        Bar("seen_ms_p99", most=SEEN_MS_MAX),
        Bar("held_after", most=0, of_every=True),
        Bar("running_after", most=0, of_every=True),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.aborts = self.size(10_000, 120)
        self.draws = Draws(plan.seed)

    def setup(self, stack: ExitStack) -> None:
        flags = engine_flags(
            self.plan, self.engine_in_use, NODES, "--max-batch", str(LANES), rates=RATES
        )
        self.stage = own_fleet(stack, self.plan, flags, NODES, Shape(("--max-queue", "1024")))

    def round(self, number: int) -> Figures:
        aborts = self.aborts if number else min(self.aborts, 200)
        return run(self._round(10_000 * number + self.plan.seed, aborts))

    async def _round(self, first: int, aborts: int) -> Figures:
        phases = {"unborn": 0, "reading": 0, "over": 0}
        async with client_of(self.stage) as watch, client_of(self.stage) as client:
            seen = [
                await self._handful(watch, client, first + start, phases)
                for start in range(0, aborts, HANDFUL)
            ]
            await asyncio.sleep(LEFT_AFTER_S)
            told = await stats(watch, self.stage)
            state = await fleet_state(watch, self.stage)
        return {
            "aborts": aborts,
            "before_a_token": phases["unborn"],
            "in_mid_answer": phases["reading"],
            "after_the_last": phases["over"],
            "seen_ms_p50": percentile(seen, 50),
            "seen_ms_p99": percentile(seen, 99),
            "held_after": told["lanes_busy"] + told["blocks_used"] + told["queued_tokens"],
            "running_after": state["running"] + sum(state["waiting"]),
        }

    async def _handful(
        self,
        watch: httpx.AsyncClient,
        client: httpx.AsyncClient,
        first: int,
        phases: dict[str, int],
    ) -> float:
        """Ask, leave at a drawn moment, and wait until nothing is left of it."""
        answers: dict[int, Answer] = {}

        async def ask(index: int) -> None:
            words = 20 + (self.draws.below(500) if index % 4 == 0 else self.draws.below(60))
            tokens = 2 if index % 4 == 3 else 400
            body = chat_body(self.stage.model, prose(first + index, words), tokens, ignore_eos=True)

            def on_chunk(answer: Answer) -> None:
                answers[index] = answer

            await chat(client, self.stage.url, body, self.stage.clock, on_chunk)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(index)) for index in range(HANDFUL)]
            await asyncio.sleep(self.draws.below(400) / 1e3)
            for index, task in enumerate(tasks):
                answer = answers.get(index)
                phase = "unborn" if answer is None else "reading"
                phases["over" if answer is not None and answer.finish_reason else phase] += 1
                task.cancel()
        return await self._until_free(watch)

    async def _until_free(self, watch: httpx.AsyncClient) -> float:
        began_ns = self.stage.clock.now_ns()
        while True:
            told = await stats(watch, self.stage)
            took_ms = (self.stage.clock.now_ns() - began_ns) / 1e6
            is_free = not (told["lanes_busy"] or told["queued_tokens"] or told["blocks_used"])
            if is_free or took_ms > GIVE_UP_MS:
                return took_ms


SCENARIO = Cancel
