"""The life of a session: S1, S2, ends, cancels, deadlines, faults, drain, refusals, resumption."""

from __future__ import annotations

import pytest

from superfluid_core.errors import ConfigError, ErrorCode
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.plan import (
    Accepted,
    Cancel,
    Drain,
    Emit,
    Emits,
    Finish,
    Interrupt,
    LaneFault,
    Progress,
    Reject,
    StepDone,
    TickDone,
    TickOutcome,
)
from superfluid_core.scheduler.scheduler import PoolShape, Scheduler
from superfluid_core.session import FinishReason, QosClass
from tests.unit.scheduler.rig import MS, Rig, key, oracle, spec

ONE_LANE = SchedulerLimits(lanes=1, step_tokens=32)


def test_a_session_is_accepted_computed_and_ends_with_length() -> None:
    rig = Rig()
    assert rig.submit(spec(1, 10, 5)) == [Accepted(key(1), 0, 0)]
    rig.run()
    assert rig.output(1) == oracle(spec(1, 10, 5), rig.shape)[0]
    assert rig.reason(1) is FinishReason.LENGTH
    assert rig.scheduler.stats().blocks_used == 0


def test_every_session_has_exactly_one_terminal_event_and_nothing_after_it() -> None:
    rig = Rig()
    rig.submit(*(spec(number, 9, 6) for number in range(12)))
    rig.run()
    ends = [effect for effect in rig.log if isinstance(effect, Finish)]
    assert sorted(end.key.session for end in ends) == list(range(12))
    rig.expect_oracle()


def test_s2_the_first_token_leaves_with_the_step_that_made_it() -> None:
    rig = Rig()
    rig.submit(spec(1, 40, 9))
    plan = rig.launch()
    assert plan is not None
    first = rig.step()
    assert first == [Progress(key(1), 32, 40, 0)]
    second = rig.step()
    assert second is not None
    assert isinstance(second[0], Progress)
    assert isinstance(second[1], Emits)
    assert [row.index for row in second[1]] == [0]


def test_who_is_cancelled_between_two_equal_steps_says_nothing_more() -> None:
    rig = Rig()
    rig.submit(spec(1, 10, 40), spec(2, 10, 40))
    # an engine that has not been measured yet gets ticks of one step
    while (plan := rig.launch()) is not None and min(each.grant for each in plan.lanes) < 5:
        while rig.step() is not None:
            pass
        rig.end()
    for _ in range(2):
        effects = rig.step()
        assert effects is not None
        assert [type(each) for each in effects] == [Emits]
    rig.give(Cancel(key(1)))
    said = len(rig.output(1)), len(rig.output(2))
    # the engine hears of it after the step that it runs now
    assert rig.step() is not None
    assert (len(rig.output(1)), len(rig.output(2))) == (said[0], said[1] + 1)
    rig.end(TickOutcome.INTERRUPTED)
    rig.run()
    rig.expect_oracle()


def test_at_most_one_plan_is_in_flight() -> None:
    rig = Rig()
    rig.submit(spec(1))
    assert rig.launch() is not None
    assert rig.scheduler.plan(rig.now_ns) is None


def test_nothing_to_do_is_no_plan() -> None:
    assert Rig().launch() is None


def test_a_stop_id_is_emitted_and_ends_the_session() -> None:
    outputs, _ = oracle(spec(1, 10, 20), PoolShape(4, 64, 200))
    rig = Rig()
    stop = outputs[3]
    rig.submit(spec(1, 10, 20, stop_ids=frozenset({stop})))
    rig.run()
    at = outputs.index(stop)
    assert rig.output(1) == outputs[: at + 1]
    assert rig.finished[key(1)] == Finish(key(1), FinishReason.STOP, stop)


def test_a_stop_id_below_min_output_is_an_ordinary_token() -> None:
    outputs, _ = oracle(spec(1, 10, 20), PoolShape(4, 64, 200))
    rig = Rig()
    rig.submit(spec(1, 10, 8, min_output=8, stop_ids=frozenset(outputs)))
    rig.run()
    assert len(rig.output(1)) == 8
    assert rig.reason(1) is FinishReason.LENGTH


def test_a_context_ends_with_length_at_the_end_of_the_window() -> None:
    rig = Rig(shape=PoolShape(4, 64, 20))
    rig.submit(spec(1, 15, 100))
    rig.run()
    assert len(rig.output(1)) == 5
    assert rig.reason(1) is FinishReason.LENGTH


def test_a_lone_session_that_outgrows_the_pool_ends_with_length() -> None:
    rig = Rig(shape=PoolShape(4, 5, 200))
    rig.submit(spec(1, 10, 100))
    rig.run()
    assert len(rig.output(1)) == 20 + 1 - 10
    assert rig.reason(1) is FinishReason.LENGTH
    rig.expect_oracle()


def test_a_resumed_session_goes_on_at_its_next_index() -> None:
    whole = spec(1, 10, 12)
    outputs, _ = oracle(whole, PoolShape(4, 64, 200))
    rig = Rig()
    rig.submit(spec(1, 10, 12, delivered=tuple(outputs[:7])))
    rig.run()
    assert rig.output(1) == outputs[7:]
    first = next(effect for effect in rig.log if isinstance(effect, Emit))
    assert first.index == 7


def test_a_session_with_all_its_tokens_delivered_ends_at_once_with_length() -> None:
    rig = Rig()
    effects = rig.submit(spec(1, 10, 3, delivered=(1, 2, 3)))
    assert effects == [Accepted(key(1), 0, 0), Finish(key(1), FinishReason.LENGTH)]
    assert rig.launch() is None


def test_a_session_whose_last_delivered_id_stops_it_ends_at_once_with_stop() -> None:
    rig = Rig()
    rig.submit(spec(1, 10, 9, delivered=(1, 2, 3), stop_ids=frozenset({3})))
    assert rig.finished[key(1)] == Finish(key(1), FinishReason.STOP, 3)


def test_a_move_that_only_fits_a_smaller_window_ends_with_length() -> None:
    rig = Rig(shape=PoolShape(4, 64, 16))
    rig.submit(spec(1, 10, 30, delivered=(1, 2, 3, 4, 5, 6, 7)))
    assert rig.reason(1) is FinishReason.LENGTH


def test_a_queued_session_can_be_cancelled() -> None:
    rig = Rig(ONE_LANE)
    rig.submit(spec(1), spec(2), spec(3))
    rig.launch()
    assert rig.give(Cancel(key(2))) == [Finish(key(2), FinishReason.CANCELLED)]
    rig.end(TickOutcome.INTERRUPTED)
    rig.run()
    assert rig.order() == [1, 3]


def test_a_running_session_can_be_cancelled_and_its_later_tokens_are_discarded() -> None:
    rig = Rig()
    rig.submit(spec(1, 10, 50), spec(2, 10, 50))
    rig.tick()
    rig.tick()
    plan = rig.launch()
    assert plan is not None
    effects = rig.give(Cancel(key(1), FinishReason.STOP))
    assert effects == [Finish(key(1), FinishReason.STOP), Interrupt(plan.tick)]
    before = rig.output(1).copy()
    rig.step()
    assert rig.output(1) == before
    rig.end(TickOutcome.INTERRUPTED)
    rig.run()
    assert rig.output(1) == before
    assert rig.output(2) == oracle(spec(2, 10, 50), rig.shape)[0]


def test_a_prefilling_session_can_be_cancelled() -> None:
    rig = Rig()
    rig.submit(spec(1, 60, 5))
    rig.launch()
    rig.step()
    rig.give(Cancel(key(1)))
    assert rig.must_stop
    rig.end(TickOutcome.INTERRUPTED)
    assert rig.launch() is None
    assert rig.scheduler.stats().blocks_used == 0


def test_cancelling_an_unknown_session_does_nothing() -> None:
    assert Rig().give(Cancel(key(9))) == []


def test_a_key_can_be_used_again_in_the_tick_that_its_old_session_was_cancelled_in() -> None:
    rig = Rig()
    rig.submit(spec(1, 10, 50))
    rig.tick()
    rig.launch()
    rig.give(Cancel(key(1)))
    del rig.finished[key(1)], rig.emitted[key(1)], rig.specs[key(1)]
    rig.submit(spec(1, 12, 4))
    rig.step()
    assert rig.output(1) == []
    rig.end(TickOutcome.INTERRUPTED)
    rig.run()
    assert len(rig.output(1)) == 4


def test_a_deadline_ends_queued_and_running_sessions_with_the_next_step() -> None:
    rig = Rig(ONE_LANE)
    rig.submit(
        spec(1, 10, 90, deadline_ns=rig.now_ns + 50 * MS),
        spec(2, deadline_ns=rig.now_ns + 30 * MS),
        spec(3, deadline_ns=rig.now_ns + 3_000_000 * MS),
    )
    rig.run()
    assert rig.finished[key(1)].code is ErrorCode.DEADLINE_EXCEEDED
    assert rig.reason(1) is FinishReason.DEADLINE
    assert rig.output(2) == []
    assert rig.reason(2) is FinishReason.DEADLINE
    assert rig.reason(3) is FinishReason.LENGTH
    assert rig.output(1)


def test_a_deadline_is_reaped_without_any_input() -> None:
    rig = Rig()
    rig.submit(spec(1, deadline_ns=rig.now_ns + MS))
    rig.now_ns += MS
    assert rig.give()[0] == Finish(key(1), FinishReason.DEADLINE, code=ErrorCode.DEADLINE_EXCEEDED)


def test_a_fault_ends_its_lane_only() -> None:
    rig = Rig()
    rig.submit(spec(1, 10, 8), spec(2, 10, 8))
    rig.tick()
    lane = next(each.lane for each in rig.state.lanes if each.key == key(1))
    rig.launch()
    rig.step(LaneFault(lane, ErrorCode.LANE_FAULT, "broken"))
    rig.end()
    assert rig.finished[key(1)] == Finish(
        key(1), FinishReason.ERROR, None, ErrorCode.LANE_FAULT, "broken"
    )
    rig.run()
    assert rig.reason(2) is FinishReason.LENGTH
    rig.expect_oracle()


def test_nan_logits_withdraw_the_blocks_that_led_to_them() -> None:
    rig = Rig()
    rig.submit(spec(1, 16, 8), spec(2, 16, 2))
    rig.tick()
    lane = next(each.lane for each in rig.state.lanes if each.key == key(1))
    rig.launch()
    rig.step(LaneFault(lane, ErrorCode.NAN_LOGITS, "nan"))
    rig.end()
    rig.run()
    effects = rig.submit(spec(3, spec(1, 16).prompt), spec(4, spec(2, 16).prompt))
    assert effects[0] == Accepted(key(3), 0, 0)
    assert effects[1] == Accepted(key(4), 1, 12)
    rig.run()


def test_draining_refuses_newcomers_and_lets_the_others_run_on() -> None:
    rig = Rig()
    rig.submit(spec(1))
    rig.give(Drain())
    (reject,) = rig.submit(spec(2))
    assert isinstance(reject, Reject)
    assert (reject.code, reject.retryable) == (ErrorCode.DRAINING, True)
    rig.run()
    assert rig.reason(1) is FinishReason.LENGTH
    assert rig.scheduler.stats().draining
    rig.give(Drain(is_over=True))
    rig.submit(spec(3))
    rig.run()
    assert rig.reason(3) is FinishReason.LENGTH
    assert not rig.scheduler.stats().draining


def test_what_an_interrupted_tick_did_not_reach_is_planned_again() -> None:
    rig = Rig()
    rig.submit(spec(1, 100, 5))
    rig.launch()
    rig.step()
    rig.end(TickOutcome.INTERRUPTED)
    plan = rig.launch()
    assert plan is not None
    assert plan.lanes[0].computed == 32
    rig.step()
    rig.end(TickOutcome.INTERRUPTED)
    rig.run()
    rig.expect_oracle()


def test_a_refused_plan_is_made_again_with_its_lane_starts() -> None:
    rig = Rig()
    rig.submit(spec(1), spec(2))
    first = rig.launch()
    assert first is not None
    rig.end(TickOutcome.REFUSED)
    second = rig.launch()
    assert second is not None
    assert [start.lane for start in second.starts] == [0, 1]
    rig.end(TickOutcome.REFUSED)
    rig.run()
    assert rig.scheduler.stats().refused_plans == 2
    rig.expect_oracle()


def test_a_session_that_the_engine_refuses_alone_ends_with_an_error() -> None:
    rig = Rig()
    rig.submit(spec(1))
    for _ in range(3):
        assert rig.launch() is not None
        rig.end(TickOutcome.REFUSED)
    assert rig.finished[key(1)].code is ErrorCode.PREEMPT_FAILED
    assert rig.launch() is None


def test_reports_of_a_tick_that_is_not_in_flight_are_ignored() -> None:
    rig = Rig()
    assert rig.give(StepDone(7, 1, [0], [1], [], 1, MS)) == []
    rig.submit(spec(1))
    plan = rig.launch()
    assert plan is not None
    assert rig.give(StepDone(plan.tick + 1, 1, [0], [1], [], 1, MS)) == []
    assert rig.give(TickDone(plan.tick + 1, TickOutcome.COMPLETE, 1, MS)) == []
    assert rig.state.flight is not None


def test_a_second_session_of_a_running_key_is_refused() -> None:
    rig = Rig()
    rig.submit(spec(1))
    (reject,) = rig.submit(spec(1))
    assert isinstance(reject, Reject)
    assert not reject.retryable


def test_an_empty_prompt_is_refused() -> None:
    rig = Rig()
    (reject,) = rig.submit(spec(1, ()))
    assert isinstance(reject, Reject)
    assert reject.code is ErrorCode.INVALID_REQUEST


def test_a_step_too_small_for_the_lanes_is_refused_at_construction() -> None:
    with pytest.raises(ConfigError, match="step-tokens"):
        Scheduler(SchedulerLimits(lanes=8, step_tokens=8), PoolShape(16, 10, 100))


def test_stats_and_sessions_tell_the_moment() -> None:
    rig = Rig(ONE_LANE)
    rig.submit(spec(1, 10, 9, tenant="a"), spec(2, 7, qos=QosClass.BACKGROUND))
    rig.tick()
    stats = rig.scheduler.stats()
    assert (stats.lanes_busy, stats.lanes_decoding, stats.queued) == (1, 1, (0, 0, 0, 1))
    assert stats.queued_tokens == 7
    assert stats.output_tokens == len(rig.output(1))
    views = rig.scheduler.sessions()
    assert [(view.key, view.state, view.tenant) for view in views] == [
        (key(1), "decoding", "a"),
        (key(2), "queued", "anonymous"),
    ]
    rig.run()
    assert dict(rig.scheduler.stats().finished)[FinishReason.LENGTH] == 2
