"""`disconnect`: clients that leave in the middle of long answers, streamed and not; lanes and blocks must be free a second later.

Owns only the leaving. What is held is asked of the server; one that does not tell its lanes cannot be judged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx

from superfluid_head.bench.load import Answer, chat, chat_body
from superfluid_head.bench.loops import run
from superfluid_head.bench.prose import prose
from superfluid_head.bench.rig import RigError
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario
from superfluid_head.bench.scenarios.stage import Stage, client_of, found, own_box, stats

AT_CHUNK = 16
AFTER_S = 2.0
FREE_MS_MAX = 1_000.0
GIVE_UP_MS = 10_000.0
LEAVE_S_MAX = 120.0


class Disconnect(Scenario):
    """The scenario."""

    name = "disconnect"
    about = "8 streams dropped after 16 pieces, then 8 collected answers dropped after 2 s"
    bars = (
        Bar("stream_lanes_free_ms", most=FREE_MS_MAX, of_every=True),
        Bar("stream_blocks_free_ms", most=FREE_MS_MAX, of_every=True),
        Bar("collected_lanes_free_ms", most=FREE_MS_MAX, of_every=True),
        Bar("collected_blocks_free_ms", most=FREE_MS_MAX, of_every=True),
        Bar("busy_before", least=1, of_every=True),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.streams = plan.streams or 8
        self.tokens = 2_000

    def setup(self, stack: ExitStack) -> None:
        if self.plan.base_url:
            self.stage = found(self.plan)
        else:
            self.stage = own_box(
                stack, self.plan, self.engine_in_use, "--max-batch", str(self.streams)
            )

    def round(self, number: int) -> Figures:
        return run(self._round(number))

    async def _round(self, number: int) -> Figures:
        first = 1_000 * number + self.plan.seed
        async with client_of(self.stage) as watch:
            streamed = await self._leave(watch, first, is_streamed=True)
            collected = await self._leave(watch, first + 100, is_streamed=False)
        busy = min(streamed.pop("busy"), collected.pop("busy"))
        return {
            **{f"stream_{name}": value for name, value in streamed.items()},
            **{f"collected_{name}": value for name, value in collected.items()},
            "busy_before": busy,
        }

    async def _leave(
        self, watch: httpx.AsyncClient, first: int, *, is_streamed: bool
    ) -> dict[str, float]:
        bodies = [
            chat_body(self.stage.model, prose(first + n, 30), self.tokens, ignore_eos=True)
            for n in range(self.streams)
        ]
        async with client_of(self.stage) as client, asyncio.TaskGroup() as group:
            if is_streamed:
                tasks, far = self._streams(group, client, bodies)
                async with asyncio.timeout(LEAVE_S_MAX):
                    await far.wait()
            else:
                tasks = [group.create_task(self._collect(client, body)) for body in bodies]
                await asyncio.sleep(AFTER_S)
            busy = (await stats(watch, self.stage))["lanes_busy"]
            for task in tasks:
                task.cancel()
            return {"busy": busy, **await until_free(watch, self.stage)}

    def _streams(
        self, group: asyncio.TaskGroup, client: httpx.AsyncClient, bodies: list[dict[str, Any]]
    ) -> tuple[list[asyncio.Task[Any]], asyncio.Event]:
        """Start all; the event is set when every one has its sixteen pieces."""
        reached: set[int] = set()
        far = asyncio.Event()

        def watcher(index: int) -> Callable[[Answer], None]:
            def on_chunk(answer: Answer) -> None:
                if len(answer.at_ms) >= AT_CHUNK:
                    reached.add(index)
                    if len(reached) == len(bodies):
                        far.set()

            return on_chunk

        tasks: list[asyncio.Task[Any]] = [
            group.create_task(chat(client, self.stage.url, body, self.stage.clock, watcher(index)))
            for index, body in enumerate(bodies)
        ]
        return tasks, far

    async def _collect(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        body = {**body, "stream": False}
        del body["stream_options"]
        await client.post(f"{self.stage.url}/v1/chat/completions", json=body)


async def until_free(client: httpx.AsyncClient, stage: Stage) -> dict[str, float]:
    """How long lanes and blocks were still held. Raises RigError when the server does not tell."""
    began_ns = stage.clock.now_ns()
    found_ms: dict[str, float] = {}
    while len(found_ms) < 2:
        told = await stats(client, stage)
        now_ms = (stage.clock.now_ns() - began_ns) / 1e6
        if told["lanes_busy"] == 0:
            found_ms.setdefault("lanes_free_ms", now_ms)
        if told["blocks_used"] == 0:
            found_ms.setdefault("blocks_free_ms", now_ms)
        if now_ms > GIVE_UP_MS:
            raise RigError(
                f"after {now_ms:.0f} ms the server still holds {told['lanes_busy']} lanes"
            )
        await asyncio.sleep(0.02)
    return found_ms


SCENARIO = Disconnect
