"""`kill`: many live streams in mixed modes, a random node killed with SIGKILL, over and over.

Owns one fleet; the killed node comes back where it was before the next round. Every stream is held against its own unbroken
answer, which is taken once. The gap of a stream is its longest pause from the kill on. What is judged is by how much a pause is longer
than the unbroken answer's at that place (a tool call comes when it is whole) and than pauses normally are, and than its new prefill and
those before it took (four at once on a surviving node), which the head measured. With the real model and lanes that ignore their
neighbours the answers are equal too; without them the share of equal ones is a figure, not a bar, because another batch adds in
another order. How often a stream was really moved is asked of the head.
"""

from __future__ import annotations

import asyncio
import signal
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from superfluid_core.limits import FleetLimits
from superfluid_head.bench.load import Answer
from superfluid_head.bench.loops import run
from superfluid_head.bench.prose import Draws
from superfluid_head.bench.report import median, percentile
from superfluid_head.bench.rig import RigError
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario, Verdict
from superfluid_head.bench.scenarios.modes import DIALECT, MODES, bodies_of, comparable
from superfluid_head.bench.scenarios.stage import (
    ask,
    ask_all,
    client_of,
    engine_flags,
    failures,
    own_fleet,
    placements,
)
from superfluid_head.bench.small_fleet import Shape, SmallFleet

GAP_MS_MAX = 300.0
MOCK_RATES = "prefill=20000,decode=10"
MLX_STEP_TOKENS = "16"
"""MLX without a GPU computes six tokens a second of the demo model's on a core: in more of them it would count as hung."""


@dataclass(frozen=True, slots=True)
class Moves:
    """What the head remembers of one stream: how often its choices were placed again, and how long the last of these waited.

    `prefilled_ms` is how long that one then took to its first token. All waits are kept: they tell whose turn it was.
    """

    count: int
    waited_ms: float
    prefilled_ms: float
    waits_ms: tuple[float, ...] = ()

    @classmethod
    def of(cls, records: Sequence[dict[str, Any]]) -> Moves:
        again = sorted(
            (float(each["waited_ms"]), float(each.get("first_ms") or 0))
            for each in records
            if each["epoch"] > 1
        )
        waited_ms, prefilled_ms = again[-1] if again else (0.0, 0.0)
        return cls(len(again), waited_ms, prefilled_ms, tuple(wait for wait, _ in again))


def reprefills_ms(moves: Sequence[Moves], at_once: int) -> list[float]:
    """Say for each stream what its move took by what was measured: its own prefill, behind those of the turns before it.

    So many prefill together; a turn takes the median of what prefills took.
    """
    waits = sorted(wait for each in moves for wait in each.waits_ms)
    taken_ms = median([each.prefilled_ms for each in moves if each.count] or [0.0])
    return [
        bisect_left(waits, each.waited_ms) // at_once * taken_ms + each.prefilled_ms
        for each in moves
    ]


def longest_gap_ms(answer: Answer, from_ms: float) -> float:
    """Find the longest pause that ended after `from_ms`."""
    return max((b - a for a, b in pairwise(answer.at_ms) if b >= from_ms), default=0.0)


def longest_added_ms(answer: Answer, unbroken: Answer, from_ms: float, normal_ms: float) -> float:
    """Find by how much a pause that ended after `from_ms` was longer than the unbroken answer's at the same place.

    The place is how much text had come; no pause is held to be shorter than normal ones.
    """
    added = -normal_ms
    for (began_ms, ended_ms), chars in zip(pairwise(answer.at_ms), answer.chars, strict=False):
        if ended_ms >= from_ms:
            place = bisect_right(unbroken.chars, chars)
            pauses = unbroken.at_ms[max(0, place - 1) : place + 1]
            natural_ms = pauses[-1] - pauses[0] if pauses else 0.0
            added = max(added, ended_ms - began_ms - max(normal_ms, natural_ms))
    return added


class Kill(Scenario):
    """The scenario."""

    name = "kill"
    about = "live streams in mixed modes, kill -9 of a random node"
    needs_rig = "it kills processes"
    engine = "mock"
    rounds = 50

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.draws = Draws(plan.seed)
        self.added: list[list[float]] = []
        self.nodes = 4 if self.is_mock else 2
        self.tokens = self.size(64, 24) if self.is_mock else 16
        default = self.size(200, 24) if self.is_mock else 16
        self.streams = plan.streams or default
        is_exact = self.is_mock or plan.batch_invariant
        self.bars = (
            Bar("failed", most=0, of_every=True),
            *((Bar("equal_share", least=1.0, of_every=True),) if is_exact else ()),
            *((Bar("usage_equal_share", least=1.0, of_every=True),) if is_exact else ()),
            *((Bar("added_gap_ms_p99", most=GAP_MS_MAX),) if self.is_mock else ()),
            Bar("moved", least=1),
        )

    def setup(self, stack: ExitStack) -> None:
        lanes = str(-(-self.streams * 3 // 2 // (self.nodes - 1))) if self.is_mock else "8"
        shares: tuple[str, ...] = ("--max-batch", lanes)
        if self.engine_in_use == "mlx":
            shares += ("--step-tokens", MLX_STEP_TOKENS)
        flags = engine_flags(self.plan, self.engine_in_use, self.nodes, *shares, rates=MOCK_RATES)
        shape = Shape(("--http-allow-batch-invariant", "--max-queue", "4096", *DIALECT))
        self.stage = own_fleet(stack, self.plan, flags, self.nodes, shape)
        modes = self._modes()
        self.bodies = bodies_of(self.stage.model, self.streams, self.tokens, modes, self.plan.seed)
        self.unbroken = self._ask()
        if failures(self.unbroken):
            raise RigError(f"an unbroken answer failed: {self._first_error(self.unbroken)}")
        self.notes.append(f"modes: {', '.join(modes)}; a gap is judged over all rounds together")
        self.normal_ms = median([gap for each in self.unbroken for gap in each.gaps_ms()])

    def _modes(self) -> list[str]:
        """Ask once in every mode: none may be missing."""
        names = list(MODES)
        answers = ask(self.stage, bodies_of(self.stage.model, len(names), 4, names, 9))
        for name, answer in zip(names, answers, strict=True):
            if not answer.is_complete:
                raise RigError(f"the mode {name} is not served: {answer.error}")
        return names

    def _ask(self) -> list[Answer]:
        return ask(self.stage, self.bodies, is_invariant=self.plan.batch_invariant)

    @staticmethod
    def _first_error(answers: Sequence[Answer]) -> str:
        return next((each.error or "" for each in answers if each.error), "")

    def round(self, number: int) -> Figures:
        # What earlier rounds left in the nodes' caches must not keep streams away from the node that came back.
        self.asked = [{**body, "cache_salt": f"round-{number}"} for body in self.bodies]
        fleet = self.stage.fleet
        assert fleet is not None
        victim = f"node-{self.draws.below(self.nodes)}"
        share = (10 + self.draws.below(60)) / 100
        answers, killed_ms = run(self._answers(fleet, victim, share))
        fleet.node(victim).process.wait(timeout=10)
        moves = run(self._moves(answers))
        fleet.restart(victim)
        return self.figures(answers, moves, killed_ms)

    async def _answers(
        self, fleet: SmallFleet, victim: str, share: float
    ) -> tuple[list[Answer], float]:
        """Ask everything; SIGKILL `victim` when that share of an answer's usual time is over."""
        usual_ms = median([a.ended_ms - a.started_ms for a in self.unbroken])

        async def strike() -> float:
            await asyncio.sleep(share * usual_ms / 1e3)
            fleet.node(victim).signal(signal.SIGKILL)
            return fleet.rig.now_ms()

        async with (
            client_of(self.stage, is_invariant=self.plan.batch_invariant) as client,
            asyncio.TaskGroup() as group,
        ):
            killing = group.create_task(strike())
            answers = await ask_all(client, self.stage, self.asked)
        return answers, killing.result()

    async def _moves(self, answers: Sequence[Answer]) -> list[Moves]:
        """Ask the head how often each stream was moved."""
        async with client_of(self.stage) as client:
            every = await placements(client, self.stage, answers)
        return [Moves.of(records) for records in every]

    def figures(
        self, answers: Sequence[Answer], moves: Sequence[Moves], killed_ms: float
    ) -> Figures:
        pairs = list(zip(answers, self.unbroken, strict=True))
        moved = [n for n, each in enumerate(moves) if each.count]
        cuts = sum(each.count for each in moves)
        at_once = FleetLimits().reprefills_per_node * (self.nodes - 1)
        took_ms = reprefills_ms(moves, at_once)
        whole = [n for n in moved if answers[n].is_complete]
        gaps = [longest_gap_ms(answers[n], killed_ms) for n in whole]
        added = [
            longest_added_ms(answers[n], self.unbroken[n], killed_ms, self.normal_ms) - took_ms[n]
            for n in whole
        ]
        self.added.append(added)
        return {
            "streams": len(answers),
            "moved": len(moved),
            "cuts": cuts,
            "failed": failures(answers),
            "equal_share": sum(comparable(a) == comparable(b) for a, b in pairs) / len(pairs),
            "moved_equal": sum(comparable(pairs[n][0]) == comparable(pairs[n][1]) for n in moved),
            "usage_equal_share": sum(a.usage == b.usage for a, b in pairs) / len(pairs),
            "added_gap_ms_p50": percentile(added, 50),
            "added_gap_ms_p99": percentile(added, 99),
            "normal_gap_ms": self.normal_ms,
            "gap_ms_p99": percentile(gaps, 99),
            "reprefill_ms_p50": percentile([moves[n].prefilled_ms for n in moved], 50),
            "reprefill_ms_p99": percentile([moves[n].prefilled_ms for n in moved], 99),
            "waited_ms_p99": percentile([moves[n].waited_ms for n in moved], 99),
        }

    def judge(self, rounds: Sequence[Figures]) -> list[Verdict]:
        """Take the gaps of all counted rounds as one sample: few streams move in one."""
        every = [gap for added in self.added[1:] for gap in added]
        pooled = [{**figures, "added_gap_ms_p99": percentile(every, 99)} for figures in rounds]
        pooled = [{**figures, "moved": sum(f["moved"] for f in rounds)} for figures in pooled]
        return super().judge(pooled)


SCENARIO = Kill
