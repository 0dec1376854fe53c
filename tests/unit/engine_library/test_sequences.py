"""Blocks as sequences: whatever plans come, a lane reads its own tokens, and cells never outnumber the pool."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_core.engine.llamacpp.sequences import Move, Sequences, Tag, Untag
from superfluid_core.kv.blocks import PoolShape
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.plan import (
    Effect,
    Emits,
    Finish,
    StepDone,
    Submit,
    TickDone,
    TickOutcome,
    TickPlan,
)
from superfluid_core.scheduler.scheduler import Scheduler
from superfluid_core.session import SamplingParams, SessionKey, SessionSpec

TOKENS = 4
LANES = 3
BLOCKS = 24


class Memory:
    """What llama.cpp's cache does: cells with a position, a token and the sequences that they belong to."""

    def __init__(self) -> None:
        self.cells: list[tuple[int, int, set[int]]] = []

    def apply(self, moves: list[Move]) -> None:
        for move in moves:
            if isinstance(move, Tag):
                for place, _, owners in self.cells:
                    if move.source in owners and move.first <= place < move.end:
                        owners.add(move.target)
            else:
                for place, _, owners in self.cells:
                    if place >= move.first and (move.end < 0 or place < move.end):
                        owners.discard(move.sequence)
                self.cells = [cell for cell in self.cells if cell[2]]

    def write(self, lane: int, first: int, tokens: list[int]) -> None:
        assert len(self.read(lane)) == first, "llama.cpp refuses positions with a gap"
        self.cells += [(first + at, token, {lane}) for at, token in enumerate(tokens)]

    def read(self, lane: int) -> list[int]:
        held = sorted((place, token) for place, token, owners in self.cells if lane in owners)
        assert [place for place, _ in held] == list(range(len(held))), "a position twice, or a gap"
        return [token for _, token in held]


class Twin:
    """A library that only remembers; the token after a context follows from the context."""

    def __init__(self, shelves: int) -> None:
        self.sequences = Sequences(LANES, shelves, TOKENS)
        self.memory = Memory()
        self.contexts: dict[int, list[int]] = {}
        self.recomputed = 0

    def open(self, plan: TickPlan) -> None:
        for lane in (*plan.frees, *(start.lane for start in plan.starts)):
            self.memory.apply(self.sequences.free(lane))
        for start in plan.starts:
            self.contexts[start.lane] = [*start.spec.prompt, *start.outputs]
        for each in plan.lanes:
            placed = self.sequences.place(each.lane, each.blocks, each.computed)
            self.memory.apply(placed.moves)
            missing = self.contexts[each.lane][placed.filled : each.computed]
            self.recomputed += len(missing)
            if missing:
                self.feed(each.lane, placed.filled, missing)
            assert self.memory.read(each.lane) == self.contexts[each.lane][: each.computed]

    def feed(self, lane: int, first: int, tokens: list[int]) -> None:
        self.memory.write(lane, first, tokens)
        self.sequences.wrote(lane, first + len(tokens))
        assert len(self.memory.cells) <= BLOCKS * TOKENS

    def run(self, plan: TickPlan, scheduler: Scheduler, now_ns: int) -> list[Effect]:
        """Run a plan, a lane after the other, a token each."""
        self.open(plan)
        effects: list[Effect] = []
        steps = 0
        for each in plan.lanes:
            self.feed(each.lane, each.computed, list(each.inputs))
            ids = [sum(self.memory.read(each.lane)) % 7] if each.grant else []
            self.contexts[each.lane] += ids
            fed = () if each.decoding else ((each.lane, len(each.inputs)),)
            lanes = (each.lane,) if ids else ()
            done = StepDone(plan.tick, steps, lanes, tuple(ids), fed, len(each.inputs), 1)
            effects += scheduler.receive((done,), now_ns)
            steps += 1
        outcome = TickOutcome.INTERRUPTED if plan.lanes else TickOutcome.COMPLETE
        return effects + scheduler.receive((TickDone(plan.tick, outcome, steps, 1),), now_ns)


PROMPTS = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=40)
SESSIONS = st.lists(
    st.tuples(PROMPTS, st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=14
)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(sessions=SESSIONS, shelves=st.sampled_from([0, 1, 2, 8]))
def test_under_the_real_scheduler_every_lane_reads_its_own_context(
    sessions: list[tuple[list[int], int, int]], shelves: int
) -> None:
    limits = SchedulerLimits(lanes=LANES, step_tokens=16, prefill_budget=64)
    scheduler = Scheduler(limits, PoolShape(TOKENS, BLOCKS, 64))
    twin = Twin(shelves)
    outputs: dict[int, list[int]] = {}
    waiting = list(enumerate(sessions))
    ended = now_ns = 0
    for _ in range(2_000):
        now_ns += 1_000_000
        if waiting and waiting[0][1][2] <= now_ns // 1_000_000 - len(outputs):
            number, (prompt, output, _) = waiting.pop(0)
            outputs[number] = []
            spec = SessionSpec(
                SessionKey("h", number), "m", tuple(prompt), output, sampling=SamplingParams(0.0)
            )
            scheduler.receive((Submit(spec),), now_ns)
        plan = scheduler.plan(now_ns)
        for effect in [] if plan is None else twin.run(plan, scheduler, now_ns):
            if isinstance(effect, Emits):
                for emit in effect:
                    outputs[emit.key.session].append(emit.token)
            ended += isinstance(effect, Finish)
        if ended == len(sessions):
            break
    assert ended == len(sessions)
    for number, (prompt, output, _) in enumerate(sessions):
        context = list(prompt)
        for _ in range(output):
            context.append(sum(context) % 7)
        assert outputs[number] == context[len(prompt) :]
    if shelves == 8:
        assert twin.recomputed == 0, "something was forgotten although there was a shelf for it"


def test_a_prefix_is_taken_over_in_one_move_for_each_place_that_has_it() -> None:
    held = Sequences(2, 4, TOKENS)
    held.place(0, (5, 6, 7), 0)
    held.wrote(0, 11)
    assert held.free(0) == [Tag(0, 2, 0, 8), Untag(0, 0, -1)]
    placed = held.place(1, (5, 6, 9), 8)
    assert placed == ([Tag(2, 1, 0, 8)], 8)


def test_what_is_written_over_leaves_its_shelf_first() -> None:
    held = Sequences(2, 4, TOKENS)
    held.place(0, (5, 6), 0)
    held.wrote(0, 8)
    held.free(0)
    assert held.place(1, (8, 5), 0) == ([Untag(2, 0, 4)], 0)
    # the rest of that shelf is still there
    assert held.place(0, (3, 6), 0) == ([Untag(2, 4, 8)], 0)


def test_the_shelf_that_was_of_use_longest_ago_gives_way_and_what_it_held_is_told_missing() -> None:
    held = Sequences(1, 2, TOKENS)
    for block in (4, 5):
        held.place(0, (block, 9), 0)
        held.wrote(0, 4)
        held.free(0)
    held.place(0, (4, 9), 4)
    held.free(0)
    held.place(0, (6, 9), 0)
    held.wrote(0, 4)
    assert Untag(2, 0, -1) in held.free(0)
    assert held.place(0, (4, 9), 4).filled == 4
    held.free(0)
    assert held.place(0, (5, 9), 4).filled == 0


def test_without_shelves_lanes_share_nothing() -> None:
    held = Sequences(2, 0, TOKENS)
    held.place(0, (1, 2), 0)
    held.wrote(0, 8)
    assert held.place(1, (1, 3), 4) == ([], 0)
    assert held.free(0) == [Untag(0, 0, -1)]
