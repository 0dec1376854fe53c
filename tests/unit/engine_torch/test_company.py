"""Scheduler and real engine together: preemption loses nothing, a shared beginning is computed once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from superfluid_core.clock import MS
from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.scheduler.rules import PreemptMode, Rules
from superfluid_core.session import QosClass
from tests.unit.engine_torch.box import CLOCK, Box, spec

Build = Callable[..., TorchEngine]
Tiny = Callable[[str], tuple[Path, Any]]
CHAT = 99
MODES = {
    "recompute": Rules(preempt_mode=PreemptMode.RECOMPUTE),
    "swap": Rules(preempt_mode=PreemptMode.SWAP, park=True),
}


def ids(count: int, seed: int, vocabulary: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (count,), generator=generator).tolist()


class Arrival(NamedTuple):
    """A chat came in while every lane decoded; `first_step` is the step that gave its first token."""

    box: Box
    came_step: int
    first_step: int
    ttft_ms: float
    longest_step_ms: float


def chat(vocabulary: int, prompt: int) -> Any:
    return spec(CHAT, ids(prompt, 77, vocabulary), 4, qos=QosClass.INTERACTIVE)


def agents(vocabulary: int, output: int) -> list[Any]:
    return [spec(n, ids(20 + n, n, vocabulary), output) for n in range(8)]


def chat_arrives(
    engine: TorchEngine, rules: Rules, company: list[Any], newcomer: Any, *, after: int
) -> Arrival:
    """All agents decode; when the first has `after` tokens the chat is submitted, in the middle of a tick."""
    box = Box(engine, rules)
    came: list[int] = []
    first: list[int] = []
    at_ns: list[int] = []

    def look() -> None:
        if not came and len(box.outputs[0]) == after:
            came.append(len(box.steps))
            at_ns.append(CLOCK.now_ns())
            box.submit(newcomer)
        if came and not first and box.outputs[CHAT]:
            first.append(len(box.steps))

    box.on_step = look
    box.submit(*company)
    box.finish(CHAT, *range(8))
    ttft_ms = (box.times_ns[CHAT][0] - at_ns[0]) / MS
    longest_ms = max(step.elapsed_ns for step in box.steps[came[0] - 4 : first[0]]) / MS
    return Arrival(box, came[0], first[0], ttft_ms, longest_ms)


def check_preempted(arrival: Arrival, undisturbed: dict[int, list[int]], mode: str) -> None:
    box = arrival.box
    stats = box.scheduler.stats()
    assert stats.preempted_for_class == 1
    assert stats.swapped_for_class == (mode == "swap")
    moved_out = [park for plan in box.plans for park in plan.park_out]
    moved_in = [park for plan in box.plans for park in plan.park_in]
    assert bool(moved_out) == bool(moved_in) == (mode == "swap")  # evicted prefixes move out too
    assert arrival.first_step == arrival.came_step + 1
    assert {n: box.outputs[n] for n in range(8)} == undisturbed
    assert len(box.outputs[CHAT]) == 4


def alone(engine: TorchEngine, company: list[Any]) -> dict[int, list[int]]:
    box = Box(engine)
    box.submit(*company)
    box.finish(*range(8))
    return box.outputs


@pytest.mark.parametrize("mode", MODES)
def test_a_chat_takes_a_lane_at_the_next_step_and_its_victim_loses_no_token(
    mode: str, tiny: Tiny, build_engine: Build
) -> None:
    engine = build_engine(tiny("qwen3")[0], lanes=8, kv_blocks=200, block_tokens=4)
    company = agents(300, 40)
    undisturbed = alone(engine, company)
    arrival = chat_arrives(engine, MODES[mode], company, chat(300, 30), after=9)
    check_preempted(arrival, undisturbed, mode)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", MODES)
def test_a_chat_on_the_demo_model_waits_one_step_more_than_on_an_idle_one(
    mode: str, demo_path: Path, build_engine: Build
) -> None:
    engine = build_engine(
        demo_path, lanes=8, window=256, kv_blocks=28
    )  # the chat needs the victim's
    company = agents(40_000, 12)
    undisturbed = alone(engine, company)
    idle = Box(engine)
    began_ns = CLOCK.now_ns()
    idle.submit(chat(40_000, 64))
    idle.finish(CHAT)
    idle_ms = (idle.times_ns[CHAT][0] - began_ns) / MS
    arrival = chat_arrives(engine, MODES[mode], company, chat(40_000, 64), after=5)
    check_preempted(arrival, undisturbed, mode)
    print(
        f"\n{mode}: first token after {arrival.ttft_ms:.0f} ms amid 8 agents, {idle_ms:.0f} ms idle, "
        f"a step {arrival.longest_step_ms:.0f} ms"
    )
    assert arrival.ttft_ms <= 3 * (idle_ms + arrival.longest_step_ms)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_shared_beginning_is_computed_once(
    batch_invariant: bool, tiny: Tiny, build_engine: Build
) -> None:
    engine = build_engine(tiny("llama")[0], lanes=8, kv_blocks=128, block_tokens=8)
    beginning = ids(160, 1, 300)
    tails = [ids(5, 100 + n, 300) for n in range(32)]
    box = Box(engine, prefill_budget=64)
    sessions = [
        spec(n, [*beginning, *tail], 3, batch_invariant=batch_invariant)
        for n, tail in enumerate(tails)
    ]
    box.submit(*sessions)
    box.finish(*range(32))
    computed = sum(count for step in box.steps for _, count in step.prefilled)
    assert computed == 160 + 32 * 5
    assert box.scheduler.stats().prefix_hit_tokens == 31 * 160
    fresh = build_engine(tiny("llama")[0], lanes=1, kv_blocks=30, block_tokens=8)
    for n in (0, 7, 31):
        one = Box(fresh)
        one.submit(sessions[n])
        one.finish(n)
        assert one.outputs[n] == box.outputs[n]


def test_ordinary_and_invariant_sessions_share_no_blocks(tiny: Tiny, build_engine: Build) -> None:
    engine = build_engine(tiny("llama")[0], lanes=2, kv_blocks=64, block_tokens=8)
    prompt = ids(64, 1, 300)
    box = Box(engine)
    for number, batch_invariant in enumerate((False, True, False, True)):
        box.submit(spec(number, prompt, 2, batch_invariant=batch_invariant))
        box.finish(number)
    computed = [sum(c for _, c in step.prefilled) for step in box.steps]
    assert [count for count in computed if count] == [64, 64, 8, 8]
