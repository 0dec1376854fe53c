"""How long a tick is, what is in it, and what stops it: tick length, budgets, S12, S13, interrupts."""

from __future__ import annotations

import pytest

from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler import budgets
from superfluid_core.scheduler.plan import Cancel, Interrupt, StepDone, TickOutcome, TickPlan
from superfluid_core.scheduler.rates import Rates
from superfluid_core.scheduler.scheduler import PoolShape
from superfluid_core.session import QosClass
from tests.unit.scheduler.rig import MS, Rig, key, spec

CHAT, COMPLETION, AGENT, BATCH = QosClass
LIMITS = SchedulerLimits()


def chunks(plan: TickPlan | None) -> dict[int, int]:
    """Prompt tokens per lane of a plan."""
    assert plan is not None
    return {lane.lane: len(lane.inputs) for lane in plan.lanes if not lane.decoding}


def warm(rig: Rig, decoded: int = 1, prefill_per_second: int = 0, step_ms: int = 10) -> None:
    """Teach the rates as if the engine had run for a while."""
    for _ in range(3):
        rig.state.rates.on_step(decoded, 0, step_ms * MS)
        if prefill_per_second:
            rig.state.rates.on_step(0, prefill_per_second, 1000 * MS)


def test_tick_targets_follow_the_table() -> None:
    def target_ms(*, is_open: bool, cuts_are_free: bool) -> int:
        return budgets.tick_target_ns(LIMITS, is_open=is_open, cuts_are_free=cuts_are_free) // MS

    assert target_ms(is_open=True, cuts_are_free=False) == 250
    assert target_ms(is_open=False, cuts_are_free=False) == 2000
    assert target_ms(is_open=True, cuts_are_free=True) == 50
    assert target_ms(is_open=False, cuts_are_free=True) == 250


def test_a_tick_is_as_many_steps_as_fit_into_its_target() -> None:
    for lanes, target_ms in ((2, 250), (1, 2000)):
        rig = Rig(SchedulerLimits(lanes=lanes, step_tokens=32), PoolShape(16, 400, 4000))
        warm(rig)
        rig.submit(spec(1, 10, 3000))
        rig.tick()
        plan = rig.launch()
        assert plan is not None
        step_ms = rig.state.rates.step_ns(1) / MS
        assert plan.lanes[0].grant == target_ms // step_ms > 1


def test_a_tick_is_one_step_while_nothing_is_known() -> None:
    rig = Rig()
    rig.submit(spec(1, 10, 50))
    plan = rig.launch()
    assert plan is not None
    assert plan.lanes[0].grant == 1


def test_a_lane_about_to_finish_makes_the_tick_short() -> None:
    rig = Rig(SchedulerLimits(lanes=2, step_tokens=32), PoolShape(16, 400, 4000))
    warm(rig, 2)
    rig.submit(spec(1, 10, 3000), spec(2, 10, 20))
    plan = rig.launch()
    while rig.step():
        pass
    rig.end()
    plan = rig.launch()
    assert plan is not None
    assert max(lane.grant for lane in plan.lanes) <= 25


def test_a_grant_never_exceeds_what_is_left() -> None:
    rig = Rig()
    warm(rig)
    rig.submit(spec(1, 10, 7))
    plan = rig.launch()
    assert plan is not None
    assert plan.lanes[0].grant == 7


def test_the_decode_budget_bounds_the_grants_of_all_lanes() -> None:
    limits = SchedulerLimits(lanes=4, step_tokens=32, decode_budget=12)
    rig = Rig(limits)
    warm(rig, 3)
    rig.submit(*(spec(number, 4, 50) for number in range(3)))
    plan = rig.launch()
    assert plan is not None
    assert [lane.grant for lane in plan.lanes] == [4, 4, 4]


def test_the_prefill_budget_bounds_the_prompt_tokens_of_a_tick() -> None:
    rig = Rig(SchedulerLimits(lanes=4, step_tokens=32, prefill_budget=64))
    rig.submit(spec(1, 100), spec(2, 50))
    assert chunks(rig.launch()) == {1: 50, 0: 14}


def test_an_adaptive_prefill_budget_lands_near_the_tick_target() -> None:
    limits = SchedulerLimits(prefill_budget=0)
    rates = Rates()
    assert budgets.prefill_cap(limits, rates, is_open=False).tokens == 256
    rates.on_step(0, 500, 1000 * MS)
    assert budgets.prefill_cap(limits, rates, is_open=False).tokens == 1000
    fast = Rates()
    fast.on_step(0, 50_000, 1000 * MS)
    assert budgets.prefill_cap(limits, fast, is_open=False).tokens == 4096


def test_s13_while_a_newcomer_could_come_in_a_tick_has_half_a_second_of_prompt() -> None:
    rates = Rates()
    rates.on_step(0, 3000, 1000 * MS)
    assert budgets.prefill_cap(LIMITS, rates, is_open=True) == (1024, 512)
    assert budgets.prefill_cap(LIMITS, rates, is_open=False) == (4096, 512)


def test_s13_a_slow_engine_takes_small_chunks_in_small_steps() -> None:
    rates = Rates()
    rates.on_step(0, 600, 1000 * MS)
    assert budgets.prefill_cap(LIMITS, rates, is_open=True) == (256, 128)
    crawl = Rates()
    crawl.on_step(0, 60, 1000 * MS)
    assert budgets.prefill_cap(LIMITS, crawl, is_open=True) == (128, 128)
    assert budgets.prefill_cap(LIMITS, crawl, is_open=False).tokens == 384


def test_s13_prompt_tokens_go_by_class_then_to_the_shortest_remaining_prompt() -> None:
    rig = Rig(SchedulerLimits(lanes=4, step_tokens=32, prefill_budget=64))
    rig.submit(spec(1, 30, qos=BATCH), spec(2, 50), spec(3, 20), spec(4, 60, qos=BATCH))
    plan = rig.launch()
    assert plan is not None
    assert list(chunks(plan).items()) == [(1, 20), (0, 44)]


def test_s13_starving_sessions_come_first() -> None:
    rig = Rig(SchedulerLimits(lanes=2, step_tokens=32, prefill_budget=64))
    rig.submit(spec(1, 60, qos=BATCH))
    rig.now_ns += 16_000 * MS
    rig.submit(spec(2, 30, qos=AGENT))
    assert list(chunks(rig.launch()).values()) == [60, 4]


def test_s13_a_tick_in_which_an_urgent_prompt_finishes_prefills_nothing_of_a_lower_class() -> None:
    rig = Rig(SchedulerLimits(lanes=4, step_tokens=32, prefill_budget=64))
    rig.submit(spec(1, 30), spec(2, 20, qos=COMPLETION), spec(3, 10, qos=CHAT))
    plan = rig.launch()
    assert plan is not None
    assert {start.lane: start.spec.key.session for start in plan.starts} == {0: 3, 1: 2, 2: 1}
    assert chunks(plan) == {0: 10}
    rig.step()
    rig.end()
    assert chunks(rig.launch()) == {1: 20}


def test_decode_lanes_get_a_token_in_every_step_that_carries_prompt() -> None:
    rig = Rig(SchedulerLimits(lanes=2, step_tokens=16))
    rig.submit(spec(1, 10, 90))
    rig.tick()
    rig.submit(spec(2, 75, 90))
    before = len(rig.output(1))
    plan = rig.launch()
    assert plan is not None
    steps = 0
    while not rig.output(2):
        assert rig.step()
        steps += 1
    assert steps == 5
    assert len(rig.output(1)) == before + 5


def test_a_tick_whose_prompts_do_not_finish_is_only_as_long_as_their_chunks() -> None:
    rig = Rig(SchedulerLimits(lanes=2, step_tokens=17, prefill_budget=64))
    warm(rig, 1)
    rig.submit(spec(1, 10, 90))
    rig.tick()
    rig.submit(spec(2, 150, 9))
    plan = rig.launch()
    assert plan is not None
    assert [lane.grant for lane in plan.lanes] == [4, 0]


def test_an_urgent_session_interrupts_the_tick_in_flight_once() -> None:
    rig = Rig(SchedulerLimits(lanes=1, step_tokens=32))
    rig.submit(spec(1, 10, 50))
    rig.tick()
    plan = rig.launch()
    assert plan is not None
    assert rig.submit(spec(2, qos=COMPLETION))[-1] == Interrupt(plan.tick)
    assert not any(isinstance(effect, Interrupt) for effect in rig.submit(spec(3, qos=CHAT)))


def test_an_agent_interrupts_only_when_a_lane_is_free_for_it() -> None:
    for lanes, expected in ((1, False), (2, True)):
        rig = Rig(SchedulerLimits(lanes=lanes, step_tokens=32))
        rig.submit(spec(1, 10, 50))
        rig.tick()
        rig.launch()
        rig.submit(spec(2))
        assert rig.must_stop is expected


def test_a_lane_that_ends_while_sessions_wait_stops_the_tick() -> None:
    rig = Rig(SchedulerLimits(lanes=2, step_tokens=32))
    warm(rig, 2)
    rig.submit(spec(1, 10, 3), spec(2, 10, 50), spec(3, 10, 3))
    rig.launch()
    while not rig.finished:
        rig.step()
    assert rig.must_stop


def test_a_tick_whose_lanes_have_all_ended_is_stopped() -> None:
    rig = Rig()
    warm(rig)
    rig.submit(spec(1, 10, 50))
    rig.tick()
    rig.launch()
    rig.give(Cancel(key(1)))
    assert rig.must_stop


def test_a_newcomer_gets_its_lane_within_one_step_and_one_plan() -> None:
    rig = Rig(SchedulerLimits(lanes=1, step_tokens=32), PoolShape(16, 400, 4000))
    warm(rig)
    rig.submit(spec(1, 10, 3000))
    rig.tick()
    rig.launch()
    rig.step()
    rig.submit(spec(2, 10, 5, CHAT))
    assert rig.must_stop
    rig.step()
    rig.end(TickOutcome.INTERRUPTED)
    rig.launch()
    assert rig.running() == [2]


def test_rates_follow_the_engine_and_forget_a_slow_start() -> None:
    rates = Rates()
    assert (rates.step_ns(4), rates.prefill_rate, rates.prefill_ns(9)) == (0, 0.0, 0)
    rates.on_step(4, 0, 1000 * MS)
    for _ in range(40):
        rates.on_step(4, 0, 10 * MS)
    assert rates.step_ns(4) < 11 * MS
    assert rates.step_ns(2) == rates.step_ns(9) == rates.step_ns(4)
    rates.on_step(8, 0, 20 * MS)
    assert rates.step_ns(5) == 20 * MS
    assert rates.decode_rates()[1] == (8, 400.0)
    rates.on_step(0, 100, 100 * MS)
    assert rates.prefill_rate == 1000.0
    assert rates.prefill_ns(500) == rates.prefill_added_ns(500) == 500 * MS
    rates.on_step(1, 0, 0)
    assert rates.decode_rates()[0][0] == 4


def test_prompts_that_ride_on_decode_steps_cost_what_they_add_to_them() -> None:
    rates = Rates()
    rates.on_step(60, 0, 100 * MS)
    for _ in range(60):
        rates.on_step(60, 400, 120 * MS)
    assert rates.prefill_added_ns(400) == pytest.approx(20 * MS, rel=1e-6)
    assert rates.prefill_rate == pytest.approx(400 / 0.120)
    assert rates.prefill_ns(400) == pytest.approx(120 * MS, rel=1e-6)
    for _ in range(60):
        rates.on_step(
            60, 8, 100 * MS
        )  # nothing to be seen: an eighth of the step is held against it
    assert rates.prefill_added_ns(8) == pytest.approx(12.5 * MS, rel=0.1)


def test_nodes_are_compared_by_steps_that_are_mostly_prompt() -> None:
    # fifty equal nodes said 580 to 20,000 tokens a second: some had computed short prompts one by one beside decode steps of 100 ms
    rates = Rates()
    rates.on_step(8, 60, 103 * MS)
    assert rates.prompt_rate == 0.0, "nobody knows what the decoding took of it"
    rates.on_step(8, 0, 100 * MS)
    rates.on_step(8, 60, 103 * MS)
    rates.on_step(0, 60, 3 * MS)
    assert rates.prompt_rate == 0.0, "too short, or too little of the step"
    rates.on_step(0, 240, 12 * MS)
    rates.on_step(8, 4_000, 300 * MS)
    assert rates.prompt_rate == 20_000.0
    for _ in range(3):
        rates.on_step(0, 240, 12 * MS)
    rates.on_step(0, 240, 400 * MS)
    assert rates.prompt_rate == 20_000.0, "a step that stalled"
    for _ in range(9):
        rates.on_step(0, 240, 24 * MS)
    assert rates.prompt_rate == 10_000.0, "it has become slower"


def test_a_tick_beside_slow_decode_steps_carries_what_adds_half_a_second() -> None:
    rates = Rates()
    rates.on_step(60, 0, 1000 * MS)
    for _ in range(60):
        rates.on_step(60, 400, 1150 * MS)
    cap = budgets.prefill_cap(SchedulerLimits(lanes=64), rates, is_open=True)
    assert cap.tokens == 1024  # 512 tokens add 192 ms to a step that takes a second anyway


def test_the_predicted_step_is_that_of_the_tick_in_flight() -> None:
    rig = Rig(SchedulerLimits(lanes=2, step_tokens=32), PoolShape(16, 400, 4000))
    assert rig.scheduler.stats().step_predicted_ns == 0
    warm(rig, 1, prefill_per_second=1000)
    rig.submit(spec(1, 100, 50))
    rig.launch()
    assert rig.scheduler.stats().step_predicted_ns == 32 * MS
    while rig.step():
        pass
    rig.end()
    rig.launch()
    assert 10 * MS <= rig.scheduler.stats().step_predicted_ns <= 11 * MS


def test_steps_of_an_interrupted_tick_count_and_the_rest_is_planned_again() -> None:
    rig = Rig()
    warm(rig)
    rig.submit(spec(1, 10, 40))
    plan = rig.launch()
    assert plan is not None
    for _ in range(5):
        rig.step()
    rig.end(TickOutcome.INTERRUPTED)
    again = rig.launch()
    assert again is not None
    assert again.lanes[0].output_index == 5
    assert rig.give(StepDone(plan.tick, 6, [0], [1], [], 1, MS)) == []
    rig.end(TickOutcome.INTERRUPTED)
    rig.run()
    rig.expect_oracle()
