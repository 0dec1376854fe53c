"""`prefix`: groups of requests that share a prefix, as many groups as fit into three quarters of the fleet's cache, at saturation.

The oracle computes every group's prefix once and never again, and nothing else is cached. Hits are the server's own counts. The same
load goes over a second fleet that places by least load, for the time to the first token; and halfway the first fleet's head is killed and
started anew, whose hit rate two seconds later is held against the one before.

Both loads are closed: as many clients as lanes, each with one request at a time. Who answers faster is asked more, so the fleets are
not equally loaded, and by Little's law their times differ by no more than their throughput does. Hence the time to the first token is
compared a second time, with other prefixes: what saturates the fleet that places by least load is sent to the other one at the same instants.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from superfluid_core.clock import MS, SystemClock
from superfluid_head.bench.load import Answer, chat, chat_body, closed_loop
from superfluid_head.bench.loops import run
from superfluid_head.bench.prose import Draws, prose
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario
from superfluid_head.bench.scenarios.stage import (
    Stage,
    client_of,
    engine_flags,
    failures,
    own_fleet,
)
from superfluid_head.bench.small_fleet import Shape, wait_linked

NODES = 4
LANES = 4
GROUPS = 60
PREFIX_WORDS = 300
SUFFIX_WORDS = 10
OUTPUT = 8
BLOCK = 16
DEMAND = 0.73
# What nodes keep of their pool when it was nearly full, by default: the cache is that, less what lanes use.
PRESSURE_LOW = 0.70
RATES = "prefill=2000,decode=200"
WARM_S = 2.0
# apart from the numbers of the other prefixes and questions of a round
FRESH = 2_500


def hit_rate(answers: Sequence[Answer]) -> float:
    """Return the share of cached prompt tokens of all prompt tokens."""
    prompts = sum(each.prompt_tokens for each in answers)
    return sum(each.cached_tokens for each in answers) / max(1, prompts)


def first_ms_mean(answers: Sequence[Answer]) -> float:
    firsts = [each.first_ms for each in answers if each.first_ms is not None]
    return sum(firsts) / max(1, len(firsts))


class Prefix(Scenario):
    """The scenario."""

    name = "prefix"
    about = "60 groups of shared prefixes, demand 73 % of the cache, the head restarted midway"
    needs_rig = "it restarts a head and needs caches of known size"
    engine = "mock"
    bars = (
        Bar("failed", most=0, of_every=True),
        Bar("hits_of_oracle", least=0.90),
        Bar("ttft_of_least_loaded", most=0.50),
        Bar("ttft_at_equal_load", most=0.50),
        Bar("hits_after_restart", least=0.80),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.groups = self.size(GROUPS, 12)
        self.requests = self.size(600, 96)
        self.words = self.size(PREFIX_WORDS, 120)

    def setup(self, stack: ExitStack) -> None:
        tokens = self._prefix_tokens()
        demand = self.groups * (tokens // BLOCK)
        live = LANES * -(-(tokens + SUFFIX_WORDS * 2 + OUTPUT) // BLOCK + 1)
        blocks = int((demand / DEMAND / NODES + live) / PRESSURE_LOW)
        flags = engine_flags(
            self.plan, "mock", NODES, "--max-batch", str(LANES), "--kv-blocks", str(blocks),
            "--max-context", "2048", rates=RATES,
        )  # fmt: skip
        self.notes.append(
            f"{self.groups} prefixes of ~{tokens} tokens, {blocks} blocks a node: lanes use {live}, and above the "
            f"pressure mark caches are cut to {PRESSURE_LOW:.0%}"
        )
        self.aware = own_fleet(stack, self.plan, flags, NODES, Shape())
        least = Shape(("--placement", "least-loaded"))
        self.least = own_fleet(stack, self.plan, flags, NODES, least)

    def _prefix_tokens(self) -> int:
        return int(self.words * 1.33)

    def round(self, number: int) -> Figures:
        first = 10_000 * number + self.plan.seed
        half = self.requests // 2
        bodies = self._bodies(first, self.requests)
        before = run(self._load(self.aware, bodies[:half]))
        self._restart_head()
        after = run(self._load(self.aware, bodies[half:]))
        other = run(self._load(self.least, bodies[:half]))
        fresh = self._bodies(first + FRESH, half)
        saturating = run(self._load(self.least, fresh))
        same = run(self._replay(self.aware, fresh, saturating))
        oracle = self._oracle(before)
        steady = before[half // 2 :]
        return {
            "failed": sum(failures(each) for each in (before, after, other, saturating, same)),
            "hit_rate": hit_rate(before),
            "oracle_rate": oracle,
            "hits_of_oracle": hit_rate(before) / oracle,
            "ttft_ms": first_ms_mean(before),
            "least_loaded_ttft_ms": first_ms_mean(other),
            "ttft_of_least_loaded": first_ms_mean(before) / first_ms_mean(other),
            # without the first quarter of all requests, in which the groups are new to both fleets
            "ttft_of_least_loaded_warm": first_ms_mean(steady) / first_ms_mean(other[half // 2 :]),
            "ttft_at_equal_load": first_ms_mean(same) / first_ms_mean(saturating),
            "hit_rate_after_restart": hit_rate(after),
            "hits_after_restart": hit_rate(after) / hit_rate(steady),
        }

    def _bodies(self, first: int, count: int) -> list[dict[str, Any]]:
        """Draw the group of every request; each has a question of its own behind the prefix."""
        draws = Draws(first)
        prefixes = [prose(first + group, self.words) for group in range(self.groups)]
        return [
            chat_body(
                self.aware.model,
                f"{prefixes[draws.below(self.groups)]} {prose(first + 5_000 + n, SUFFIX_WORDS)}",
                OUTPUT,
                ignore_eos=True,
            )
            for n in range(count)
        ]

    def _oracle(self, answers: Sequence[Answer]) -> float:
        """Say what would hit that never forgets and never computes a prefix twice: whole blocks of it, but for each group's first."""
        prompts = [each.prompt_tokens for each in answers if each.is_complete]
        shared = (min(prompts) - int(SUFFIX_WORDS * 1.33) - BLOCK) // BLOCK * BLOCK
        return (len(prompts) - self.groups) * shared / sum(prompts)

    async def _load(self, stage: Stage, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
        async with client_of(stage) as client:
            return await closed_loop(client, stage.url, bodies, NODES * LANES, SystemClock())

    async def _replay(
        self, stage: Stage, bodies: Sequence[dict[str, Any]], before: Sequence[Answer]
    ) -> list[Answer]:
        """Send every body as long after the first as it was sent `before`, whatever became of the others."""
        clock = SystemClock()
        began_ms, first_ms = clock.now_ns() / MS, min(each.started_ms for each in before)

        async def at_its_time(body: dict[str, Any], then_ms: float) -> Answer:
            late_ms = clock.now_ns() / MS - began_ms
            await asyncio.sleep(max(0.0, then_ms - first_ms - late_ms) / 1e3)
            return await chat(client, stage.url, body, clock)

        async with client_of(stage) as client, asyncio.TaskGroup() as tasks:
            sent = [
                tasks.create_task(at_its_time(body, each.started_ms))
                for body, each in zip(bodies, before, strict=True)
            ]
        return [each.result() for each in sent]

    def _restart_head(self) -> None:
        """Kill the head and start it where it was."""
        fleet = self.aware.fleet
        assert fleet is not None
        where = fleet.url.removeprefix("http://")
        fleet.head.kill()
        fleet.heads[0] = fleet.start_head(where)
        fleet.rig.wait_ready(fleet.head)
        wait_linked(fleet.rig, fleet.head, NODES)
        fleet.rig.sleep(WARM_S)


SCENARIO = Prefix
