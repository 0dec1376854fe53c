"""`rolling`: a steady crowd of streams while every node is drained, stopped, started and taken back, one after the other.

Planned moves are made in peace: the old node streams on until the new one has the context. So the pauses of moved streams are held
against a bar of their own, and no stream may differ from its unbroken answer.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import ExitStack

import httpx

from superfluid_head.bench.load import Answer, chat
from superfluid_head.bench.loops import run
from superfluid_head.bench.report import median, percentile
from superfluid_head.bench.rig import RigError
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario
from superfluid_head.bench.scenarios.modes import bodies_of, comparable
from superfluid_head.bench.scenarios.stage import (
    ask,
    client_of,
    engine_flags,
    failures,
    fleet_state,
    own_fleet,
    placements,
)
from superfluid_head.bench.small_fleet import Shape, SmallFleet

NODES = 4
RATES = "prefill=20000,decode=25"
GAP_MS_MAX = 250.0
GRACE_MS = 500
EMPTY_S = 60.0
MODES_USED = ("greedy", "seeded", "penalties", "logprobs", "two choices")


class Rolling(Scenario):
    """The scenario."""

    name = "rolling"
    about = "100 steady streams, every node drained and restarted in turn"
    needs_rig = "it restarts processes"
    engine = "mock"
    bars = (
        Bar("failed", most=0, of_every=True),
        Bar("equal_share", least=1.0, of_every=True),
        Bar("moved", least=1, of_every=True),
        Bar("planned_gap_ms_p99", most=GAP_MS_MAX),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.streams = plan.streams or self.size(100, 12)
        self.tokens = self.size(160, 60)

    def setup(self, stack: ExitStack) -> None:
        lanes = str(-(-self.streams * 2 // (NODES - 1)))
        flags = engine_flags(
            self.plan, self.engine_in_use, NODES, "--max-batch", lanes, rates=RATES
        )
        self.stage = own_fleet(stack, self.plan, flags, NODES, Shape(("--max-queue", "4096")))
        self.bodies = bodies_of(
            self.stage.model, self.streams, self.tokens, MODES_USED, self.plan.seed
        )
        self.unbroken = ask(self.stage, self.bodies)
        self.normal_ms = median([gap for each in self.unbroken for gap in each.gaps_ms()])

    def round(self, number: int) -> Figures:
        del number  # every round asks the same
        return run(self._round())

    async def _round(self) -> Figures:
        fleet = self.stage.fleet
        assert fleet is not None
        is_over = asyncio.Event()
        answers: list[tuple[int, Answer]] = []

        async with client_of(self.stage) as client, client_of(self.stage) as admin:

            async def stream(index: int) -> None:
                while not is_over.is_set():
                    body = self.bodies[index]
                    answer = await chat(client, self.stage.url, body, self.stage.clock)
                    answers.append((index, answer))

            async with asyncio.TaskGroup() as group:
                for index in range(self.streams):
                    group.create_task(stream(index))
                for number in range(NODES):
                    await self._roll(fleet, admin, f"node-{number}")
                is_over.set()
            records = await placements(admin, self.stage, [answer for _, answer in answers])
        moved: list[Answer] = []
        stayed: list[Answer] = []
        for (_, answer), each in zip(answers, records, strict=True):
            is_moved = any(record["epoch"] > 1 for record in each)
            (moved if is_moved else stayed).append(answer)
        return {**self._figures(answers, moved), "stayed_gap_ms_p99": worst_p99(stayed)}

    async def _roll(self, fleet: SmallFleet, admin: httpx.AsyncClient, name: str) -> None:
        """Drain, wait until it is empty, stop, start, wait until it is back. Raises RigError."""
        url = f"{self.stage.url}/v1/fleet/nodes/{name}/drain"
        reply = await admin.post(url, json={"grace_ms": GRACE_MS})
        reply.raise_for_status()
        began_ms = fleet.rig.now_ms()
        while await self._sessions(admin, name):
            if fleet.rig.now_ms() - began_ms > EMPTY_S * 1000:
                raise RigError(f"{name} is not empty {EMPTY_S:.0f} s after it was drained")
            await asyncio.sleep(0.05)
        node = fleet.node(name)
        node.signal(signal.SIGTERM)
        await asyncio.to_thread(node.process.wait, 60)
        await asyncio.to_thread(fleet.restart, name)

    async def _sessions(self, admin: httpx.AsyncClient, name: str) -> int:
        state = await fleet_state(admin, self.stage)
        return sum(node["sessions"] for node in state["nodes"] if name in node["name"])

    def _figures(self, answers: Sequence[tuple[int, Answer]], moved: Sequence[Answer]) -> Figures:
        equal = [comparable(a) == comparable(self.unbroken[index]) for index, a in answers]
        worst = worst_gaps_ms(moved)
        return {
            "answers": len(answers),
            "moved": len(moved),
            "failed": failures([answer for _, answer in answers]),
            "equal_share": sum(equal) / len(equal),
            "planned_gap_ms_p50": percentile(worst, 50),
            "planned_gap_ms_p99": percentile(worst, 99),
            "normal_gap_ms": self.normal_ms,
        }


def worst_gaps_ms(answers: Sequence[Answer]) -> list[float]:
    return [max(each.gaps_ms(), default=0.0) for each in answers if each.is_complete]


def worst_p99(answers: Sequence[Answer]) -> float:
    """Return the 99th percentile of the longest pauses: of streams that nobody moved, it is the machine's own."""
    return percentile(worst_gaps_ms(answers), 99)


SCENARIO = Rolling
