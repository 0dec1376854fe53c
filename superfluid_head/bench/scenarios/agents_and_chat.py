"""`agents-and-chat`: eight agents with long prompts in the background, and a short chat two seconds later.

The chat's time to the first token is held against the same chat on the idle server plus one step. How long a step may take is asked of
the server while the agents run; a server that does not tell is held against the second that the document grants a GPU box.
`fleet_qos.py` plays the same over many nodes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import httpx

from superfluid_head.bench.load import Answer, chat, chat_body
from superfluid_head.bench.loops import run
from superfluid_head.bench.prose import prose
from superfluid_head.bench.report import median
from superfluid_head.bench.rig import RigError
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario
from superfluid_head.bench.scenarios.stage import (
    Stage,
    ask_all,
    client_of,
    failures,
    found,
    own_box,
    stats,
)

CHAT_AFTER_S = 2.0
TTFT_MS_MAX = 1_000.0
GAP_MS_MAX = 30_000.0
TOKENS_PER_WORD = 1.33
IDLE_CHATS = 3


class AgentsAndChat(Scenario):
    """The scenario."""

    name = "agents-and-chat"
    about = "agents with 6k-token prompts, then an interactive chat"
    lanes = 8

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.agents = plan.streams or self.lanes
        self.words = int(self.size(6_000, 1_000) / TOKENS_PER_WORD)
        self.tokens = 384 if self.is_mock else self.size(384, 96)
        self.bars = (
            Bar("agents_failed", most=0, of_every=True),
            Bar("chat_failed", most=0, of_every=True),
            Bar("agents_at_the_chat", least=self.agents, of_every=True),
            Bar("longest_gap_ms", most=GAP_MS_MAX),
            Bar("over_bound_ms", most=0),
        )

    def setup(self, stack: ExitStack) -> None:
        if self.plan.base_url:
            self.stage = found(self.plan)
            return
        self.stage = own_box(stack, self.plan, self.engine_in_use, "--max-batch", str(self.lanes))

    def round(self, number: int) -> Figures:
        return run(self._round(number))

    def _agent(self, number: int) -> dict[str, Any]:
        return chat_body(self.stage.model, prose(number, self.words), self.tokens, ignore_eos=True)

    def _chat(self, number: int) -> dict[str, Any]:
        return chat_body(self.stage.model, prose(number, 12), 16, ignore_eos=True)

    async def _round(self, number: int) -> Figures:
        first = 10_000 * number + self.plan.seed
        async with (
            client_of(self.stage, "background") as agents,
            client_of(self.stage, "interactive") as chats,
        ):
            idle = [await self._one(chats, first + 900 + n) for n in range(IDLE_CHATS)]
            step = Steps(self.stage)
            async with asyncio.TaskGroup() as group:
                bodies = [self._agent(first + n) for n in range(self.agents)]
                running = group.create_task(ask_all(agents, self.stage, bodies))
                watching = group.create_task(step.watch(chats))
                await asyncio.sleep(CHAT_AFTER_S)
                is_over = running.done()
                busy = await self._one(chats, first + 990)
                answers = await running
                watching.cancel()
        figures = self.figures(idle, busy, answers, step.longest_ms)
        at_chat = sum(each.ended_ms > busy.started_ms for each in answers)
        return {**figures, "agents_at_the_chat": 0 if is_over else at_chat}

    async def _one(self, client: httpx.AsyncClient, number: int) -> Answer:
        return await chat(client, self.stage.url, self._chat(number), self.stage.clock)

    def figures(
        self, idle: Sequence[Answer], busy: Answer, agents: Sequence[Answer], step_ms: float
    ) -> Figures:
        idle_ms = median([each.first_ms or math.nan for each in idle])
        ttft_ms = busy.first_ms if busy.first_ms is not None else math.inf
        bound_ms = TTFT_MS_MAX if math.isnan(step_ms) else idle_ms + step_ms
        begun_ms = min(each.started_ms for each in agents)
        ended_ms = max(each.ended_ms for each in agents)
        return {
            "chat_ttft_ms": ttft_ms,
            "idle_ttft_ms": idle_ms,
            "chat_over_idle": ttft_ms / idle_ms,
            "step_ms": step_ms,
            "over_bound_ms": max(0.0, ttft_ms - bound_ms),
            "chat_failed": not busy.is_complete,
            "agents_failed": failures(agents),
            "longest_gap_ms": max((gap for each in agents for gap in each.gaps_ms()), default=0.0),
            "agents_ms": ended_ms - begun_ms,
        }


class Steps:
    """Watches how long a step of the server may take; nan where it does not tell."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.longest_ms = math.nan

    async def watch(self, client: httpx.AsyncClient) -> None:
        """Look five times a second until cancelled."""
        while True:
            try:
                told = await self._look(client)
            except RigError:
                return
            self.longest_ms = told if math.isnan(self.longest_ms) else max(told, self.longest_ms)
            await asyncio.sleep(0.2)

    async def _look(self, client: httpx.AsyncClient) -> float:
        every = await stats(client, self._stage)
        return float(every.get("step_ms_max", math.nan))


SCENARIO = AgentsAndChat
