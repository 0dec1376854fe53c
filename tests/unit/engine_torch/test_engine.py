"""Ticks: what is reported, what ends a lane, what is refused, what moves in the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from superfluid_core.engine.compose import StepRow
from superfluid_core.engine.torch.drive import GREEDY, Driver
from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.errors import ConfigError, EngineError, ErrorCode
from superfluid_core.scheduler.plan import (
    BlockCopy,
    LanePlan,
    LaneStart,
    Park,
    StepDone,
    TickDone,
    TickOutcome,
    TickPlan,
)
from superfluid_core.session import (
    Determinism,
    Grammar,
    GrammarKind,
    SamplingParams,
    SessionKey,
    SessionSpec,
)

PROMPT = [5, 9, 200, 31, 7, 7, 120]


@pytest.fixture
def engine(
    tiny: Callable[[str], tuple[Path, Any]], build_engine: Callable[..., TorchEngine]
) -> TorchEngine:
    return build_engine(tiny("llama")[0], kv_blocks=32, block_tokens=4, lanes=4)


def spec(prompt: Sequence[int] = PROMPT, **more: Any) -> SessionSpec:
    values: dict[str, Any] = {
        "key": SessionKey("h", 1),
        "model": "m",
        "prompt": tuple(prompt),
        "max_output": 50,
        "sampling": GREEDY,
    }
    return SessionSpec(**(values | more))


def first_plan(
    blocks: Sequence[int] = (3, 8, 1, 9), grant: int = 4, lane: int = 0, **more: Any
) -> TickPlan:
    values: dict[str, Any] = {
        "tick": 1,
        "lanes": (LanePlan(lane, False, 0, tuple(PROMPT), grant, 0, tuple(blocks)),),
        "step_tokens": 64,
        "starts": (LaneStart(lane, spec(), ()),),
    }
    return TickPlan(**(values | more))


def run(
    engine: TorchEngine, plan: TickPlan, interrupted: Callable[[], bool] = lambda: False
) -> tuple[TickDone, list[StepDone]]:
    steps: list[StepDone] = []
    return engine.run(plan, steps.append, interrupted), steps


def greedy_ids(engine: TorchEngine, count: int) -> list[int]:
    driver = Driver(engine)
    session = driver.open(PROMPT, count)
    driver.finish()
    driver.close(session)
    driver.tick()
    return session.outputs


def test_every_step_is_reported_with_its_rows_and_ids(engine: TorchEngine) -> None:
    expected = greedy_ids(engine, 4)
    done, steps = run(engine, first_plan(step_tokens=5))
    assert done.outcome is TickOutcome.COMPLETE
    assert done.steps == len(steps) == 5
    assert [step.prefilled for step in steps] == [((0, 5),), ((0, 2),), (), (), ()]
    assert [step.tokens for step in steps] == [5, 2, 1, 1, 1]
    assert [list(step.ids) for step in steps] == [[], *[[token] for token in expected]]
    assert [step.step for step in steps] == list(range(5))
    assert all(step.elapsed_ns > 0 for step in steps)
    assert done.elapsed_ns >= sum(step.elapsed_ns for step in steps)


def test_an_interrupt_ends_the_tick_between_steps(engine: TorchEngine) -> None:
    expected = greedy_ids(engine, 6)
    asked: list[bool] = []

    def interrupted() -> bool:
        asked.append(True)
        return len(asked) == 2

    done, steps = run(engine, first_plan(), interrupted)
    assert (done.outcome, done.steps) == (TickOutcome.INTERRUPTED, 2)
    assert [list(step.ids) for step in steps] == [[expected[0]], [expected[1]]]
    more = LanePlan(0, True, len(PROMPT) + 1, (expected[1],), 4, 2, (3, 8, 1, 9))
    _, steps = run(engine, TickPlan(2, (more,), 64))
    assert [step.ids[0] for step in steps] == expected[2:]


def test_a_stop_id_ends_its_lane_and_no_other(engine: TorchEngine) -> None:
    expected = greedy_ids(engine, 8)
    stop = expected[3]
    driver = Driver(engine)
    stopped = driver.open(PROMPT, 8, stop_ids=[stop])
    free = driver.open(PROMPT, 8)
    driver.tick(steps=8)
    assert stopped.outputs == expected[: expected.index(stop) + 1]
    assert free.outputs == expected


def test_a_stop_id_is_not_drawn_below_the_minimum(engine: TorchEngine) -> None:
    expected = greedy_ids(engine, 1)
    driver = Driver(engine)
    session = driver.open(PROMPT, 8, stop_ids=[expected[0]], min_output=5)
    driver.finish()
    assert expected[0] not in session.outputs[:5]
    assert len(session.outputs) >= 5


def test_logits_that_are_not_finite_end_their_lane_only(engine: TorchEngine) -> None:
    expected = greedy_ids(engine, 6)

    def spoil(rows: Sequence[StepRow], logits: torch.Tensor) -> None:
        for number, row in enumerate(rows):
            if row.lane == lanes[1] and row.output_index == 2:
                logits[number, 11] = torch.nan

    driver = Driver(engine)
    sessions = [driver.open(PROMPT, 6) for _ in range(3)]
    lanes = [session.lane for session in sessions]
    engine.on_logits = spoil
    driver.finish()
    assert [session.outputs for session in sessions] == [expected, expected[:2], expected]
    fault = sessions[1].fault
    assert fault is not None
    assert fault.code is ErrorCode.NAN_LOGITS
    assert [session.fault for session in sessions[::2]] == [None, None]


def test_stale_rows_of_a_block_never_reach_its_next_owner(engine: TorchEngine) -> None:
    expected = greedy_ids(engine, 6)
    with torch.inference_mode():
        engine._pool._slab.fill_(torch.nan)
    driver = Driver(engine)
    sessions = [driver.open(PROMPT, 6), driver.open(PROMPT[:3], 6), driver.open(PROMPT, 6)]
    driver.finish(steps=2, prompt_tokens=3)
    assert [session.fault for session in sessions] == [None] * 3
    assert sessions[0].outputs == sessions[2].outputs == expected


def test_a_session_resumes_elsewhere_with_the_same_ids(engine: TorchEngine) -> None:
    params = SamplingParams(seed=77, temperature=0.9, top_p=0.95, repetition_penalty=1.2)
    driver = Driver(engine)
    whole = driver.open(PROMPT, 20, params)
    driver.finish()
    driver.close(whole)
    moved = driver.open(PROMPT, 20, params, delivered=whole.outputs[:9])
    neighbour = driver.open([8] * 13, 20, SamplingParams(seed=1))
    driver.finish(steps=3, prompt_tokens=4)
    assert moved.outputs == whole.outputs
    assert len(neighbour.outputs) == 20


def test_logprobs_go_with_the_lanes_that_asked(engine: TorchEngine) -> None:
    driver = Driver(engine)
    asked = driver.open(PROMPT, 3, replace(GREEDY, logprobs=2))
    other = driver.open(PROMPT, 3)
    driver.finish()
    assert other.logprobs == [None] * 3
    for token, logprobs in zip(asked.outputs, asked.logprobs, strict=True):
        assert logprobs is not None
        assert logprobs.top[0][0] == token
        assert logprobs.top[0][1] == pytest.approx(logprobs.logprob)
    driver.close(asked)
    driver.close(other)
    driver.open(PROMPT, 1)
    driver.finish()
    assert driver.steps[-1].logprobs is None


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (first_plan(blocks=(3, 8, 1, 32)), "block outside"),
        (first_plan(blocks=(3, 8, -1, 9)), "block outside"),
        (first_plan(blocks=(3, 8)), "into 2 blocks"),
        (first_plan(grant=300, blocks=[0] * 99), "window"),
        (first_plan(lane=4), "lane outside"),
        (first_plan(starts=()), "no session"),
        (first_plan(copies=(BlockCopy(0, 32),)), "block outside"),
        (first_plan(park_out=(Park(1, (99,)),)), "block outside"),
        (first_plan(park_in=(Park(1, (2,)),)), "ticket 1"),
        (first_plan(lanes=(*first_plan().lanes,) * 2), "twice"),
        (first_plan(lanes=(LanePlan(0, False, 0, (), 1, 0, (1,)),)), "no inputs"),
        (first_plan(lanes=(LanePlan(0, True, 0, (1, 2), 1, 0, (1,)),)), "decodes with 2"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_anything_moves(
    engine: TorchEngine, plan: TickPlan, why: str
) -> None:
    before = engine._pool._slab.clone()
    done, steps = run(engine, plan)
    assert (done.outcome, done.steps, steps) == (TickOutcome.REFUSED, 0, [])
    assert why in engine.last_refusal
    assert torch.equal(engine._pool._slab, before)
    assert run(engine, first_plan())[0].outcome is TickOutcome.COMPLETE


def test_a_session_that_this_engine_cannot_run_faults_alone(engine: TorchEngine) -> None:
    expected = greedy_ids(engine, 2)
    grammar = Grammar(GrammarKind.REGEX, "a+")
    wild = (300,)
    plan = TickPlan(
        tick=1,
        lanes=(
            LanePlan(0, False, 0, tuple(PROMPT), 2, 0, (0, 1, 2)),
            LanePlan(1, False, 0, tuple(PROMPT), 2, 0, (3, 4, 5)),
            LanePlan(2, False, 0, wild, 2, 0, (6, 7, 8)),
        ),
        step_tokens=64,
        starts=(
            LaneStart(0, spec(), ()),
            LaneStart(1, spec(grammar=grammar), ()),
            LaneStart(2, spec(wild), ()),
        ),
    )
    done, steps = run(engine, plan)
    assert done.outcome is TickOutcome.COMPLETE
    assert [(fault.lane, fault.code) for fault in steps[0].faults] == [
        (1, ErrorCode.UNSUPPORTED),
        (2, ErrorCode.INVALID_REQUEST),
    ]
    assert [list(step.ids) for step in steps] == [[token] for token in expected]
    assert not steps[1].faults


def test_faults_are_reported_even_when_no_lane_is_left_to_step(engine: TorchEngine) -> None:
    grammar = Grammar(GrammarKind.REGEX, "a+")
    done, steps = run(engine, first_plan(starts=(LaneStart(0, spec(grammar=grammar), ()),)))
    assert done.outcome is TickOutcome.COMPLETE
    assert [len(step.faults) for step in steps] == [1]
    assert (steps[0].tokens, list(steps[0].lanes)) == (0, [])


def test_parked_and_copied_blocks_continue_the_session(engine: TorchEngine) -> None:
    expected = greedy_ids(engine, 8)
    _, steps = run(engine, first_plan(blocks=(3, 8, 1, 9), grant=4))
    said = [step.ids[0] for step in steps]
    run(engine, TickPlan(2, (), 64, frees=(0,), park_out=(Park(9, (3, 8, 1)),)))
    with torch.inference_mode():
        engine._pool._slab.zero_()
    plan = TickPlan(
        tick=3,
        lanes=(LanePlan(2, True, len(PROMPT) + 3, (said[-1],), 4, 4, (20, 22, 30, 31)),),
        step_tokens=64,
        starts=(LaneStart(2, spec(), tuple(said)),),
        park_in=(Park(9, (20, 21, 30)),),
        copies=(BlockCopy(21, 22),),
    )
    _, steps = run(engine, plan)
    assert said + [step.ids[0] for step in steps] == expected
    assert run(engine, TickPlan(4, (), 64, park_in=(Park(9, (1,)),)))[0].outcome is (
        TickOutcome.REFUSED
    )


def test_a_dropped_ticket_is_gone(engine: TorchEngine) -> None:
    run(engine, TickPlan(1, (), 64, park_out=(Park(1, (0, 1)), Park(2, (2,)))))
    assert engine._pool.parked() == {1: 2, 2: 1}
    run(engine, TickPlan(2, (), 64, park_drop=(1, 77)))
    assert engine._pool.parked() == {2: 1}


def test_a_failure_of_torch_is_an_engine_error(engine: TorchEngine) -> None:
    def fail(rows: Sequence[StepRow], logits: torch.Tensor) -> None:
        raise RuntimeError("out of memory\nand more")

    engine.on_logits = fail
    with pytest.raises(EngineError, match=r"^torch: out of memory$"):
        run(engine, first_plan())


def test_the_description_says_what_is_there(engine: TorchEngine) -> None:
    info = engine.describe()
    assert (info.vocabulary, info.window, info.lanes) == (300, 256, 4)
    assert (info.blocks, info.block_tokens, info.dtype) == (32, 4, "float32")
    assert info.weights_fingerprint == "0123456789abcdef"
    assert torch.__version__ in info.engine_build
    assert info.determinism is Determinism.BATCH_INVARIANT
    assert info.capabilities.swap
    assert info.capabilities.penalties
    assert not info.capabilities.structured_output
    assert info.capabilities.batch_invariant
    assert (
        info.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4
    )  # layers, keys and values, heads, width, float32
    assert info.host_copy_bytes_per_s > 1e6
    assert 0 <= info.host_copy_overhead_ns < 1_000_000_000


def test_a_closed_engine_runs_nothing(engine: TorchEngine) -> None:
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        run(engine, first_plan())


def test_options_that_do_not_fit_the_model_are_refused(
    tiny: Callable[[str], tuple[Path, Any]], build_engine: Callable[..., TorchEngine]
) -> None:
    path = tiny("llama")[0]
    with pytest.raises(ConfigError, match="at most 256"):
        build_engine(path, window=257)
    with pytest.raises(ConfigError, match="no attention backend 'magic'"):
        build_engine(path, attention="magic", kv_blocks=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_stays_near_float32(
    dtype: str,
    engine: TorchEngine,
    tiny: Callable[[str], tuple[Path, Any]],
    build_engine: Callable[..., TorchEngine],
) -> None:
    low = build_engine(tiny("llama")[0], kv_blocks=32, block_tokens=4, dtype=dtype)
    plan = first_plan()
    exact, near = engine.forward_only(plan), low.forward_only(plan)
    assert near.dtype is torch.float32
    assert float((exact - near).abs().max()) < 0.05 * float(exact.abs().max())
    assert len(greedy_ids(low, 5)) == 5
