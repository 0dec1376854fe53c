"""Who may come in: G1 to G6."""

from __future__ import annotations

from superfluid_core.errors import ErrorCode
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.plan import Accepted, Reject
from superfluid_core.scheduler.rules import Reserve, Rules
from superfluid_core.scheduler.scheduler import PoolShape
from superfluid_core.scheduler.thrash import Thrash
from superfluid_core.session import QosClass
from tests.unit.scheduler.rig import MS, Rig, key, spec

SECOND = 1000 * MS


def refusal(rig: Rig, *args: object, **more: object) -> Reject:
    (reject,) = rig.submit(spec(*args, **more))  # type: ignore[arg-type]
    assert isinstance(reject, Reject)
    return reject


def test_g1_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    rig = Rig(SchedulerLimits(lanes=1, step_tokens=32, queue_max=2))
    rig.submit(spec(1, 10, 50))
    rig.tick()
    rig.submit(spec(2), spec(3))
    reject = refusal(rig, 4)
    assert (reject.code, reject.retryable) == (ErrorCode.QUEUE_FULL, True)
    assert reject.retry_after_ms is not None
    assert reject.retry_after_ms >= 1000
    rig.run()
    assert rig.scheduler.stats().rejected == 1


def test_g1_the_hint_grows_with_the_measured_drain_time() -> None:
    rig = Rig(SchedulerLimits(lanes=1, step_tokens=32, queue_max=8))
    rig.submit(spec(1, 10, 180))
    rig.run()
    rig.submit(*(spec(number, 10, 180) for number in range(2, 11)))
    (reject,) = rig.submit(spec(20))
    assert isinstance(reject, Reject)
    service_ms = rig.state.rates.service_ns / MS
    assert reject.retry_after_ms == int(service_ms * 9)


def test_g1_sessions_for_free_lanes_do_not_count_as_waiting() -> None:
    rig = Rig(SchedulerLimits(lanes=4, step_tokens=32, queue_max=0))
    effects = rig.submit(*(spec(number) for number in range(5)))
    assert [type(effect) for effect in effects] == [Accepted] * 4 + [Reject]


def test_g1_queued_tokens_can_be_bounded_too() -> None:
    rig = Rig(SchedulerLimits(lanes=1, step_tokens=32, queued_tokens_max=50))
    rig.submit(spec(1, 30))
    assert refusal(rig, 2, 30).code is ErrorCode.QUEUE_FULL
    assert isinstance(rig.submit(spec(3, 20))[0], Accepted)


def test_g2_a_prompt_that_leaves_no_room_in_the_window_can_never_fit() -> None:
    rig = Rig(shape=PoolShape(4, 64, 20))
    reject = refusal(rig, 1, 20)
    assert (reject.code, reject.retryable) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, False)
    assert isinstance(rig.submit(spec(2, 19))[0], Accepted)


def test_g2_a_prompt_larger_than_the_pool_can_never_fit() -> None:
    rig = Rig(shape=PoolShape(4, 5, 200))
    assert refusal(rig, 1, 21).code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    rig.submit(spec(2, 20, 9))
    rig.run()
    assert len(rig.output(2)) == 1


def test_g2_refuses_before_a_full_queue_does_for_no_retry_can_help() -> None:
    rig = Rig(SchedulerLimits(lanes=1, step_tokens=32, queue_max=0), PoolShape(4, 5, 200))
    rig.submit(spec(1, 4, 9))
    assert refusal(rig, 2, 21).code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_g3_the_watermark_is_kept_free_for_those_who_decode() -> None:
    limits = SchedulerLimits(lanes=2, step_tokens=32, watermark_pct=20)
    rig = Rig(limits, PoolShape(4, 10, 100))
    rig.submit(spec(1, 16, 4), spec(2, 20, 4))
    rig.launch()
    assert rig.running() == [1]
    assert rig.scheduler.stats().held_blocks == 1


def test_g3_a_prompt_of_the_whole_pool_gets_in_when_nobody_else_is_there() -> None:
    limits = SchedulerLimits(lanes=2, step_tokens=32, watermark_pct=50)
    rig = Rig(limits, PoolShape(4, 10, 100))
    rig.submit(spec(1, 40, 1))
    rig.run()
    assert len(rig.output(1)) == 1


def test_g3_cached_blocks_in_use_by_others_cost_nothing() -> None:
    rig = Rig(SchedulerLimits(lanes=2, step_tokens=64), PoolShape(4, 12, 100))
    first = spec(1, 36, 8)
    rig.submit(first)
    rig.tick()
    rig.submit(spec(2, (*first.prompt[:32], 49, 48), 2))
    rig.launch()
    assert rig.running() == [1, 2]


def test_g4_a_full_reservation_never_preempts_for_blocks() -> None:
    rules = Rules(reserve=Reserve.FULL)
    rig = Rig(SchedulerLimits(lanes=4, step_tokens=32), PoolShape(4, 16, 100), rules)
    rig.submit(*(spec(number, 8, 20) for number in range(8)))
    rig.run()
    assert rig.scheduler.stats().preempted_for_blocks == 0
    prompt = Rig(SchedulerLimits(lanes=4, step_tokens=32), PoolShape(4, 16, 100))
    prompt.submit(*(spec(number, 8, 20) for number in range(8)))
    prompt.run()
    assert prompt.scheduler.stats().preempted_for_blocks > 0
    prompt.expect_oracle()


def test_g5_a_hopeless_wait_is_refused_at_submit_only_with_an_slo() -> None:
    limits = SchedulerLimits(lanes=1, step_tokens=32)
    for slo_ms, is_refused in ((0, False), (50, True), (60_000, False)):
        rig = Rig(limits, rules=Rules(ttft_slo_ms=slo_ms))
        rig.submit(spec(1, 10, 50))
        rig.run()
        rig.submit(spec(2, 10, 50), spec(3, 10, 50))
        (answer,) = rig.submit(spec(4))
        assert isinstance(answer, Reject) is is_refused
        if isinstance(answer, Reject):
            assert answer.code is ErrorCode.SLO_UNATTAINABLE
            assert answer.retry_after_ms is not None


def test_g5_an_unmeasured_engine_refuses_nobody() -> None:
    rig = Rig(rules=Rules(ttft_slo_ms=1))
    assert isinstance(rig.submit(spec(1))[0], Accepted)


def test_g6_lanes_are_taken_away_while_work_is_done_twice_and_given_back_after() -> None:
    gate = Thrash(4, 20, SECOND)
    gate.on_tokens(1000, 500, 0)
    assert [gate.lanes_allowed(second * SECOND) for second in range(5)] == [3, 2, 1, 1, 1]
    assert gate.trips == 1
    gate.on_tokens(10_000, 0, 6 * SECOND)
    assert [gate.lanes_allowed((7 + second) * SECOND) for second in range(4)] == [2, 3, 4, 4]


def test_g6_forgets_what_is_older_than_its_window() -> None:
    gate = Thrash(4, 20, SECOND)
    gate.on_tokens(1000, 900, 0)
    gate.on_tokens(1, 0, 40 * SECOND)
    assert gate.ratio == 0.0


def test_g6_a_thrashing_pool_admits_fewer_lanes() -> None:
    limits = SchedulerLimits(
        lanes=4, step_tokens=64, tick_target_ms=100, starvation_ticks=1, queue_max=500
    )
    shape = PoolShape(4, 20, 100)
    costs = []
    for thrash_pct in (0, 20):
        rig = Rig(limits, shape, Rules(thrash_pct=thrash_pct))
        rig.submit(*(spec(number, 16, 40) for number in range(60)))
        rig.run()
        rig.expect_oracle()
        costs.append(rig.scheduler.stats().recomputed_tokens)
    assert costs[1] < costs[0]


def test_accepted_tells_the_place_in_line_and_the_cached_tokens() -> None:
    rig = Rig(SchedulerLimits(lanes=1, step_tokens=64))
    rig.submit(spec(1, 40, 2))
    rig.run()
    effects = rig.submit(spec(2, 40, qos=QosClass.BACKGROUND), spec(3, spec(1, 40).prompt), spec(4))
    assert effects == [Accepted(key(2), 0, 0), Accepted(key(3), 0, 36), Accepted(key(4), 1, 0)]
