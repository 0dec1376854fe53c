"""What every engine over a library keeps to: the torch engine's ids on the same numbers, under every cut of the work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from superfluid_core.engine.torch.drive import GREEDY, Driver
from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.errors import EngineError
from superfluid_core.scheduler.plan import (
    BlockCopy,
    LanePlan,
    LaneStart,
    Park,
    StepDone,
    TickOutcome,
    TickPlan,
)
from superfluid_core.scheduler.rules import PreemptMode, Rules
from superfluid_core.session import (
    Determinism,
    Grammar,
    GrammarKind,
    QosClass,
    SamplingParams,
    SessionKey,
    SessionSpec,
)
from tests.unit.engine_library.conftest import VOCABULARY, WINDOW, Make
from tests.unit.engine_torch.box import Box, spec

OUTPUT = 24
SAMPLED = SamplingParams(temperature=0.9, seed=11, top_p=0.95)
WAYS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "plain": SamplingParams(temperature=1.0, seed=3),
    "penalized": SamplingParams(
        temperature=0.7, seed=5, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.3
    ),
    "biased": SamplingParams(temperature=0.0, logit_bias=((40, 3.0), (41, -2.0)), bad_words=((42,), (7, 8))),
    "held": SamplingParams(temperature=1.2, seed=9, allowed_token_ids=tuple(range(30, 90))),
}  # fmt: skip


def prompt(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY - 3, (count,), generator=generator).tolist()


def answers(engine: Any, **cut: int) -> dict[str, list[int]]:
    """Every way of sampling, four lanes at a time, in blocks that lie anywhere."""
    blocks = engine.describe().blocks
    driver = Driver(engine, blocks=[(block * 7 + 5) % blocks for block in range(blocks)])
    found = {}
    names = list(WAYS)
    for some in (names[:3], names[3:]):
        sessions = {
            name: driver.open(prompt(5 + 23 * number, number), OUTPUT, WAYS[name])
            for number, name in enumerate(some)
        }
        driver.finish(**cut)
        for name, session in sessions.items():
            assert session.fault is None
            found[name] = session.outputs
            driver.close(session)
    return found


def box_of(engine: Any, rules: Rules | None = None, **limits: Any) -> Box:
    return Box(cast("TorchEngine", engine), rules, **limits)


def text_of(ids: list[int]) -> str:
    """Read the ids of the numbered texts: byte tokens come first; the last is the end."""
    return bytes(ids[:-1]).decode()


@pytest.mark.slow
def test_ids_equal_those_of_our_own_engine_however_the_work_is_cut(
    make: Make, reference: TorchEngine
) -> None:
    engine = make(kv_blocks=96)
    expected = answers(reference, steps=5)
    assert answers(engine) == expected
    assert answers(engine, steps=3, prompt_tokens=9, step_tokens=12) == expected


def test_log_probabilities_are_those_of_the_model(make: Make, reference: TorchEngine) -> None:
    told = []
    for engine in (reference, make()):
        driver = Driver(engine)
        session = driver.open(prompt(20), 8, SamplingParams(temperature=1.0, seed=2, logprobs=5))
        silent = driver.open(prompt(9), 8)
        driver.finish(steps=4)
        assert set(silent.logprobs) == {None}
        told.append([each for each in session.logprobs if each is not None])
    assert len(told[0]) == len(told[1]) == 8
    for ours, theirs in zip(*told, strict=True):
        assert theirs.logprob == pytest.approx(ours.logprob, abs=1e-3)
        assert [token for token, _ in theirs.top] == [token for token, _ in ours.top]


def test_what_one_engine_has_begun_another_goes_on_with(make: Make) -> None:
    first, second = make(), make(kv_blocks=40)
    for sampling in (GREEDY, SAMPLED, WAYS["penalized"]):
        driver = Driver(first)
        whole = driver.open(prompt(30), OUTPUT, sampling)
        driver.finish(steps=6)
        for cut in (1, 13):
            moved = Driver(second)
            rest = moved.open(prompt(30), OUTPUT, sampling, delivered=whole.outputs[:cut])
            moved.finish(steps=6)
            moved.close(rest)
            moved.tick()
            assert rest.outputs == whole.outputs
        driver.close(whole)
        driver.tick()


@pytest.mark.slow
def test_a_shared_beginning_is_computed_once_and_changes_nothing(make: Make) -> None:
    beginning = prompt(96, 4)
    specs = [spec(n, [*beginning, *prompt(5, 50 + n)], 10) for n in range(6)]
    alone = []
    for each in specs:
        box = box_of(make())
        box.submit(each)
        box.finish(each.key.session)
        alone.append(box.outputs[each.key.session])
    engine = make(kv_blocks=64)
    box = box_of(engine)
    box.submit(*specs)
    box.finish(*range(6))
    assert [box.outputs[n] for n in range(6)] == alone
    fed = sum(count for step in box.steps for _, count in step.prefilled)
    assert fed < len(beginning) + 6 * (5 + 16)


@pytest.mark.slow
def test_preempted_sessions_are_computed_again_and_lose_nothing(make: Make) -> None:
    engine = make(kv_blocks=14, lanes=3)
    company = [spec(n, prompt(40, n), 40) for n in range(3)]
    expected: dict[int, list[int]] = {}
    for each in company:
        box = box_of(engine)
        box.submit(each)
        box.finish(each.key.session)
        expected |= box.outputs
    box = box_of(engine, Rules(preempt_mode=PreemptMode.RECOMPUTE))
    box.submit(*company)
    arrived: list[int] = []

    def look() -> None:
        if not arrived and len(box.outputs[0]) == 4:
            arrived.append(len(box.steps))
            box.submit(spec(9, prompt(20, 9), 3, qos=QosClass.INTERACTIVE))

    box.on_step = look
    box.finish(9, 0, 1, 2)
    stats = box.scheduler.stats()
    assert stats.preempted_for_class + stats.preempted_for_blocks >= 2
    assert {n: box.outputs[n] for n in range(3)} == expected


@pytest.mark.slow
def test_grammars_hold_and_neighbours_draw_what_they_draw_alone(make: Make) -> None:
    engine = make()
    assert engine.describe().capabilities.structured_output
    plate = Grammar(GrammarKind.REGEX, "[A-Z]{2}-[0-9]{3}(x|yy)?")
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"], "additionalProperties": False}  # fmt: skip
    shape = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    ends = frozenset({VOCABULARY - 1})
    drawn = SamplingParams(temperature=1.3, seed=4)
    alone = box_of(make())
    alone.submit(spec(3, prompt(12), 20, sampling=SAMPLED))
    alone.finish(3)
    box = box_of(engine)
    box.submit(
        spec(1, prompt(7), 60, grammar=plate, stop_ids=ends, sampling=drawn),
        spec(2, prompt(8), 60, grammar=shape, stop_ids=ends, sampling=drawn),
        spec(3, prompt(12), 20, sampling=SAMPLED),
    )
    box.finish(1, 2, 3)
    assert re.fullmatch("[A-Z]{2}-[0-9]{3}(x|yy)?", text_of(box.outputs[1]))
    assert json.loads(text_of(box.outputs[2]))["a"] in ("x", "yy")
    assert box.outputs[3] == alone.outputs[3]


def session_of(ids: list[int], **more: Any) -> SessionSpec:
    return SessionSpec(SessionKey("h", 1), "m", tuple(ids), 50, sampling=GREEDY, **more)


def first_plan(ids: list[int], grant: int = 4, **more: Any) -> TickPlan:
    lanes = (LanePlan(0, False, 0, tuple(ids), grant, 0, (3, 1, 2)),)
    values: dict[str, Any] = {"starts": (LaneStart(0, session_of(ids), ()),)} | more
    return TickPlan(1, lanes, 16, **values)


def test_steps_are_reported_and_an_interrupt_ends_the_tick_between_two(make: Make) -> None:
    engine = make()
    ids = prompt(20)
    steps: list[StepDone] = []
    done = engine.run(first_plan(ids), steps.append, lambda: len(steps) == 3)
    assert (done.outcome, done.steps) == (TickOutcome.INTERRUPTED, 3)
    assert [step.prefilled for step in steps] == [((0, 16),), ((0, 4),), ()]
    assert [step.tokens for step in steps] == [16, 4, 1]
    drawn = [token for step in steps for token in step.ids]
    assert len(drawn) == 2
    more = LanePlan(0, True, len(ids) + 1, (drawn[-1],), 2, 2, (3, 1, 2))
    rest: list[StepDone] = []
    engine.run(TickPlan(2, (more,), 16), rest.append, lambda: False)
    driver = Driver(make())
    whole = driver.open(ids, 4)
    driver.finish()
    assert drawn + [step.ids[0] for step in rest] == whole.outputs


def test_a_stop_id_ends_its_lane_and_is_not_drawn_below_the_minimum(make: Make) -> None:
    driver = Driver(make())
    plain = driver.open(prompt(9), 8)
    driver.finish()
    stop = plain.outputs[3]
    stopped = driver.open(prompt(9), 8, stop_ids=[stop])
    later = driver.open(prompt(9), 8, stop_ids=[plain.outputs[0]], min_output=5)
    driver.finish()
    assert stopped.outputs == plain.outputs[: plain.outputs.index(stop) + 1]
    assert plain.outputs[0] not in later.outputs[:5]


def test_what_it_cannot_do_it_says_and_refuses(make: Make) -> None:
    engine = make()
    info = engine.describe()
    can = info.capabilities
    assert (can.swap, can.embeddings, can.batch_invariant, can.prompt_logprobs) == (False,) * 4
    assert info.determinism is Determinism.NONE
    assert (info.vocabulary, info.window, info.dtype) == (VOCABULARY, WINDOW, "float32")
    assert not hasattr(engine, "embed")
    ids = prompt(5)
    refused: list[dict[str, Any]] = [
        {"batch_invariant": True},
        {"park_out": (Park(1, (3,)),)},
        {"park_in": (Park(1, (3,)),)},
        {"copies": (BlockCopy(1, 2),)},
    ]
    steps: list[StepDone] = []
    for what in refused:
        done = engine.run(first_plan(ids, **what), steps.append, lambda: False)
        assert (done.outcome, steps) == (TickOutcome.REFUSED, [])
        assert engine.last_refusal
    # and it goes on
    assert engine.run(first_plan(ids), steps.append, lambda: False).steps == 4


def test_a_closed_engine_runs_nothing(make: Make) -> None:
    engine = make()
    plan = first_plan(prompt(5))
    closed_in_the_middle: Callable[[StepDone], None] = lambda _step: engine.close()  # noqa: E731
    engine.run(plan, closed_in_the_middle, lambda: False)
    with pytest.raises(EngineError, match="closed"):
        engine.run(plan, closed_in_the_middle, lambda: False)
