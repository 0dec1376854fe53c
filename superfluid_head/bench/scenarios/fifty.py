"""`fifty`: a fleet of fifty nodes under two heads, nodes killed at random for ten minutes, and one head killed.

First the idle fleet: what fifty silent nodes cost a head. Then a burst, for hot spots. Then a crowd of streams over both heads while
nodes die and come back. Halfway the second head is killed with its sessions running: nodes must give up what it held when
its leases end, and nothing else may be held when the crowd is gone. A node that was counted lost without having been killed is a
false death.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack

import httpx

from superfluid_head.bench.load import Answer, chat, chat_body
from superfluid_head.bench.loops import run
from superfluid_head.bench.prose import Draws, prose
from superfluid_head.bench.rig import Child
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario
from superfluid_head.bench.scenarios.burst import shares
from superfluid_head.bench.scenarios.stage import (
    Stage,
    ask_all,
    client_of,
    engine_flags,
    failures,
    fleet_state,
    own_fleet,
    placements,
    stats,
)
from superfluid_head.bench.small_fleet import Shape, SmallFleet

LANES = 8
RATES = "prefill=20000,decode=10"
LEASE_S, LEASE_SLACK_S = 10.0, 1.0
RESTART_EVERY_S = 8.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(child: Child) -> float:
    """Processor seconds of a process so far, where the system tells; nan elsewhere."""
    try:
        with open(f"/proc/{child.pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def resident_mib(child: Child) -> float:
    try:
        with open(f"/proc/{child.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * PAGE_BYTES / (1 << 20)
    except OSError:
        return float("nan")


class Fifty(Scenario):
    """The scenario."""

    name = "fifty"
    about = "50 nodes, 2 heads, random restarts, one head killed"
    needs_rig = "it kills processes"
    engine = "mock"
    rounds = 1
    bars = (
        Bar("failed", most=0, of_every=True),
        Bar("ghosts", most=0, of_every=True),
        Bar("false_deaths", most=0, of_every=True),
        Bar("hot_spot", most=1.2, of_every=True),
        Bar("dead_head_freed_s", most=LEASE_S + LEASE_SLACK_S, of_every=True),
        Bar("idle_head_cpu_share", most=0.05, of_every=True),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.nodes = self.size(50, 6)
        self.seconds = self.size(600, 16)
        self.idle_s = self.size(30, 4)
        self.streams = plan.streams or self.size(40, 8)
        self.draws = Draws(plan.seed)

    def setup(self, stack: ExitStack) -> None:
        flags = engine_flags(
            self.plan, self.engine_in_use, self.nodes, "--max-batch", str(LANES), rates=RATES
        )
        shape = Shape(("--max-queue", "4096"), heads=2)
        self.stage = own_fleet(stack, self.plan, flags, self.nodes, shape)

    def round(self, number: int) -> Figures:
        fleet = self.stage.fleet
        assert fleet is not None
        if number == 0:
            return {"node_rss_mib": resident_mib(fleet.node("node-0"))}
        before_s = cpu_s(fleet.head)
        fleet.rig.sleep(self.idle_s)
        idle = (cpu_s(fleet.head) - before_s) / self.idle_s
        figures = run(self._round(fleet))
        return {"idle_head_cpu_share": idle, "head_rss_mib": resident_mib(fleet.head), **figures}

    async def _round(self, fleet: SmallFleet) -> Figures:
        async with client_of(self.stage) as client:
            bodies = [self._body(n, 8) for n in range(4 * self.nodes)]
            burst = await ask_all(client, self.stage, bodies)
            spread = shares(await placements(client, self.stage, burst))
            before = (await fleet_state(client, self.stage))["counters"]["faults"]
            answers, kills = await self._storm(fleet, client)
            freed_s = await self._kill_head(fleet, client)
            ghosts = await self._held(client)
            state = await fleet_state(client, self.stage)
        deaths = state["counters"]["faults"] - before
        return {
            "answers": len(answers),
            "failed": failures(answers) + failures(burst),
            "kills": kills,
            "false_deaths": max(0, deaths - kills),
            "hot_spot": max(spread.values()) / (sum(spread.values()) / self.nodes),
            "dead_head_freed_s": freed_s,
            "ghosts": ghosts + sum(not node["is_up"] for node in state["nodes"]),
        }

    def _body(self, number: int, tokens: int) -> dict[str, object]:
        return chat_body(self.stage.model, prose(number, 40), tokens, ignore_eos=True)

    async def _storm(
        self, fleet: SmallFleet, client: httpx.AsyncClient
    ) -> tuple[list[Answer], int]:
        """Keep streams going over both heads while nodes are killed and brought back."""
        is_over = asyncio.Event()
        answers: list[Answer] = []

        async def stream(index: int) -> None:
            number = 0
            while not is_over.is_set():
                url = fleet.heads[index % 2].url
                body = self._body(1_000 + 100 * index + number, 64)
                answers.append(await chat(client, url, body, self.stage.clock))
                number += 1

        kills = 0
        async with asyncio.TaskGroup() as group:
            for index in range(self.streams):
                group.create_task(stream(index))
            until_ms = fleet.rig.now_ms() + self.seconds * 1000
            while fleet.rig.now_ms() < until_ms:
                await asyncio.sleep(RESTART_EVERY_S * (50 + self.draws.below(100)) / 100)
                await self._restart(fleet, f"node-{self.draws.below(self.nodes)}")
                kills += 1
            is_over.set()
        return answers, kills

    async def _restart(self, fleet: SmallFleet, name: str) -> None:
        fleet.node(name).kill()
        await asyncio.sleep(self.draws.below(1_000) / 1e3)
        await asyncio.to_thread(fleet.restart, name)

    async def _kill_head(self, fleet: SmallFleet, client: httpx.AsyncClient) -> float:
        """Kill the second head with sessions running; the time until the nodes hold nothing of it."""
        second = fleet.heads[1]
        stage = Stage(second.url, self.stage.model)
        async with client_of(stage) as other, asyncio.TaskGroup() as group:
            bodies = [self._body(9_000 + n, 400) for n in range(2 * self.nodes)]
            running = group.create_task(ask_all(other, stage, bodies))
            await self._until(client, lambda busy: busy >= self.nodes)
            second.signal(signal.SIGKILL)
            began_ns = self.stage.clock.now_ns()
            await running
            await self._until(client, lambda busy: busy == 0)
        second.process.wait(timeout=10)
        return (self.stage.clock.now_ns() - began_ns) / 1e9

    async def _until(self, client: httpx.AsyncClient, is_enough: Callable[[int], bool]) -> None:
        async with asyncio.timeout(6 * LEASE_S):
            while not is_enough((await stats(client, self.stage))["lanes_busy"]):  # noqa: ASYNC110 - it asks a server
                await asyncio.sleep(0.1)

    async def _held(self, client: httpx.AsyncClient) -> float:
        told = await stats(client, self.stage)
        state = await fleet_state(client, self.stage)
        return float(told["lanes_busy"] + told["blocks_used"] + state["running"])


SCENARIO = Fifty
