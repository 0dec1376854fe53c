"""The simulated engine: what its tokens depend on, what they obey, and how long they take."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_core.engine.sim import NumberedTexts, SimEngine, SimOptions, ThreadPause
from superfluid_core.errors import EngineError
from superfluid_core.scheduler.plan import LanePlan, LaneStart, Park, TickOutcome, TickPlan
from superfluid_core.session import Determinism, SamplingParams, SessionKey
from tests.unit.engine_sim.conftest import EOS, TEXTS, Bench, VirtualTime, spec_of


def test_a_session_gets_the_same_ids_alone_and_in_a_crowd(bench: Bench) -> None:
    alone = bench.prefill([spec_of()], 12)[0]
    crowd = Bench(eos_probability=0.0).prefill(
        [spec_of("other"), spec_of(), spec_of("third one")], 12
    )
    assert crowd[1] == alone
    assert crowd[0] != alone


def test_chunked_prefill_changes_nothing(bench: Bench) -> None:
    long = spec_of(tuple(range(200)))
    whole = bench.prefill([long], 8)[0]
    assert Bench(eos_probability=0.0).prefill([long], 8, step_tokens=7)[0] == whole


@given(cut=st.integers(0, 20), seed=st.integers(0, 2**64 - 1), choice=st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_a_resumed_session_equals_the_unbroken_one(cut: int, seed: int, choice: int) -> None:
    sampling = SamplingParams(seed=seed)
    spec = spec_of(sampling=sampling, choice=choice)
    whole = Bench(eos_probability=0.0).prefill([spec], 20)[0]
    moved = spec_of(sampling=sampling, choice=choice, delivered=tuple(whole[:cut]))
    if cut < 20:
        assert whole[:cut] + Bench(eos_probability=0.0).prefill([moved], 20 - cut)[0] == whole


def test_seed_and_choice_matter_unless_greedy() -> None:
    def ids(seed: int, choice: int, temperature: float) -> list[int]:
        spec = spec_of(sampling=SamplingParams(seed=seed, temperature=temperature), choice=choice)
        return Bench(eos_probability=0.0).prefill([spec], 10)[0]

    assert len({tuple(ids(seed, choice, 1.0)) for seed in (1, 2) for choice in (0, 1)}) == 4
    assert ids(1, 0, 0.0) == ids(2, 1, 0.0)


def test_the_engine_seed_names_other_weights_and_other_ids() -> None:
    one, two = Bench(eos_probability=0.0, seed=1), Bench(eos_probability=0.0, seed=2)
    assert one.prefill([spec_of()], 8) != two.prefill([spec_of()], 8)
    first, second = one.engine.describe(), two.engine.describe()
    assert first.weights_fingerprint != second.weights_fingerprint
    assert first.determinism is Determinism.EXACT
    assert len(first.weights_fingerprint) == 16


def test_speed_and_script_do_not_change_the_fingerprint() -> None:
    plain = Bench().engine.describe()
    other = Bench('{"pieces": ["x"]}', decode_rate=5.0, prefill_rate=9.0).engine.describe()
    assert plain == other


def test_end_of_text_comes_with_its_probability_and_ends_the_lane() -> None:
    bench = Bench(eos_probability=0.5)
    ids = bench.prefill([spec_of(), spec_of("b"), spec_of("c")], 32)
    for lane in ids:
        assert lane[-1] == EOS
        assert EOS not in lane[:-1]


def test_end_of_text_waits_for_min_output_and_never_comes_when_ignored() -> None:
    waits = Bench(eos_probability=1.0).prefill([spec_of(min_output=5)], 32)[0]
    assert waits.index(EOS) == 5
    ignores = Bench(eos_probability=1.0).prefill([spec_of(stop_ids=frozenset())], 32)[0]
    assert len(ignores) == 32
    assert EOS not in ignores


def test_a_stop_id_of_the_request_ends_the_lane_but_not_before_min_output(bench: Bench) -> None:
    whole = bench.prefill([spec_of()], 12)[0]
    stop = whole[3]
    stopped = Bench(eos_probability=0.0).prefill([spec_of(stop_ids=frozenset({stop}))], 12)[0]
    assert stopped == whole[:4]
    later = Bench(eos_probability=0.0).prefill(
        [spec_of(stop_ids=frozenset({stop}), min_output=8)], 12
    )[0]
    assert stop not in later[:8]


def test_allowed_banned_and_forced_ids_are_obeyed() -> None:
    allowed = (5, 6, 7)
    only = Bench(eos_probability=0.0).prefill(
        [spec_of(sampling=SamplingParams(allowed_token_ids=allowed))], 20
    )[0]
    assert set(only) <= set(allowed)
    narrowed = SamplingParams(allowed_token_ids=allowed, logit_bias=((5, -100.0),))
    assert set(Bench(eos_probability=0.0).prefill([spec_of(sampling=narrowed)], 20)[0]) == {6, 7}
    forced = SamplingParams(logit_bias=((9, 100.0),))
    assert set(Bench(eos_probability=0.0).prefill([spec_of(sampling=forced)], 5)[0]) == {9}


def test_bad_words_of_one_and_of_two_ids_never_appear(bench: Bench) -> None:
    whole = bench.prefill([spec_of()], 10)[0]
    words = ((whole[2],), (whole[5], whole[6]))
    ids = Bench(eos_probability=0.0).prefill(
        [spec_of(sampling=SamplingParams(seed=7, bad_words=words))], 10
    )[0]
    assert whole[2] not in ids
    assert (whole[5], whole[6]) not in list(pairwise(ids))


def test_logprobs_are_ordered_finite_and_the_same_on_every_run(bench: Bench) -> None:
    spec = spec_of(sampling=SamplingParams(seed=7, logprobs=5))
    bench.prefill([spec, spec_of("plain")], 6)
    again = Bench(eos_probability=0.0)
    again.prefill([spec, spec_of("plain")], 6)
    assert [step.logprobs for step in bench.steps] == [step.logprobs for step in again.steps]
    for step in bench.steps:
        assert step.logprobs is not None
        row, none = step.logprobs
        assert none is None
        assert row is not None
        assert row.top[0] == (step.ids[0], row.logprob)
        values = [value for _, value in row.top]
        assert values == sorted(values, reverse=True)
        assert len({token for token, _ in row.top}) == 5
        assert sum(map(math.exp, values)) <= 1.0 + 1e-9


def test_zero_logprobs_asks_for_the_sampled_one_alone(bench: Bench) -> None:
    bench.prefill([spec_of(sampling=SamplingParams(logprobs=0))], 1)
    assert bench.steps[0].logprobs is not None
    assert bench.steps[0].logprobs[0] is not None
    assert bench.steps[0].logprobs[0].top == ()


def test_moving_kv_to_the_host_and_back_takes_as_long_as_its_bytes() -> None:
    bench = Bench(kv_bytes_per_token=1_000, host_copy_bytes_per_s=1e6, block_tokens=16)
    moves = TickPlan(1, (), 0, park_out=(Park(1, (3, 4)),), park_in=(Park(2, (5,)),))
    done = bench.engine.run(moves, bench.steps.append, lambda: False)
    assert done.steps == 0
    assert bench.time.slept == pytest.approx([3 * 16 * 1_000 / 1e6])
    bench.engine.run(TickPlan(2, (), 0, park_drop=(1,)), bench.steps.append, lambda: False)
    assert len(bench.time.slept) == 1
    bench.time.close()
    with pytest.raises(EngineError, match="closed"):
        bench.engine.run(moves, bench.steps.append, lambda: False)


def test_a_step_costs_prompt_tokens_over_all_lanes_and_one_decode_interval() -> None:
    bench = Bench(eos_probability=0.0, prefill_rate=1000.0, decode_rate=50.0)
    bench.prefill([spec_of((1,) * 100), spec_of((2,) * 100)], 3)
    assert bench.time.slept == pytest.approx([0.2, 0.02, 0.02])
    assert bench.steps[0].elapsed_ns == 200_000_000
    assert bench.steps[0].prefilled == ((0, 100), (1, 100))
    assert bench.steps[1].tokens == 2


def test_the_interrupt_flag_is_read_between_steps(bench: Bench) -> None:
    calls = iter((False, True))
    start = LaneStart(0, spec_of(), ())
    lane = LanePlan(0, False, 0, spec_of().prompt, 10, 0, (0,))
    done = bench.tick([lane], [start], interrupted=lambda: next(calls))
    assert done.outcome is TickOutcome.INTERRUPTED
    assert done.steps == len(bench.steps) == 2


def test_a_lane_continues_in_the_next_tick_without_a_new_start(bench: Bench) -> None:
    spec = spec_of()
    first = bench.prefill([spec], 4)[0]
    lane = LanePlan(0, True, len(spec.prompt) + 3, (first[-1],), 4, 4, (0,))
    bench.tick([lane], [])
    rest = [step.ids[0] for step in bench.steps[4:]]
    assert first + rest == Bench(eos_probability=0.0).prefill([spec], 8)[0]


def test_a_plan_that_its_blocks_do_not_cover_is_a_broken_invariant(bench: Bench) -> None:
    spec = spec_of((1,) * 40)
    lane = LanePlan(0, False, 0, spec.prompt, 1, 0, (0, 1))
    with pytest.raises(AssertionError, match="without a block"):
        bench.tick([lane], [LaneStart(0, spec, ())])


def test_closing_wakes_a_sleeping_step() -> None:
    pause = ThreadPause()
    engine = SimEngine(
        TEXTS, SimOptions(decode_rate=0.001, prefill_rate=0.1), VirtualTime(), pause=pause
    )
    engine.close()
    bench = Bench()
    bench.engine = engine
    with pytest.raises(EngineError, match="closed"):
        bench.prefill([spec_of()], 4)


def test_a_vocabulary_without_ordinary_tokens_is_refused() -> None:
    with pytest.raises(EngineError, match="ordinary"):
        SimEngine(NumberedTexts(1), SimOptions(), VirtualTime(), pause=VirtualTime())


def test_session_keys_do_not_matter(bench: Bench) -> None:
    other = spec_of(key=SessionKey("elsewhere", 99))
    assert bench.prefill([other], 6) == Bench(eos_probability=0.0).prefill([spec_of()], 6)
