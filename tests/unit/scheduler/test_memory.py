"""Blocks: sharing, growth, preemption for room, the pressure ladder: S9, S14, S15."""

from __future__ import annotations

from typing import Any

import pytest

from superfluid_core.errors import ConfigError
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.plan import Accepted, Cancel, Pressure, PressureLevel, Progress
from superfluid_core.scheduler.rules import Rules
from superfluid_core.scheduler.scheduler import PoolShape, Scheduler
from superfluid_core.session import FinishReason, QosClass
from tests.unit.scheduler.rig import Rig, key, spec

CHAT, COMPLETION, AGENT, BATCH = QosClass
PREFIX = tuple(place * 5 % 47 for place in range(100))


def test_s15_sessions_that_share_a_prefix_prefill_it_once() -> None:
    limits = SchedulerLimits(lanes=8, step_tokens=64, prefill_budget=64)
    rig = Rig(limits, PoolShape(4, 200, 400))
    rig.submit(*(spec(number, (*PREFIX, number, 1, 2), 4) for number in range(8)))
    rig.run()
    assert rig.engine.prefilled_tokens == 100 + 8 * 3
    stats = rig.scheduler.stats()
    assert stats.prefix_hit_tokens == 7 * 100
    assert stats.prefix_miss_tokens == rig.engine.prefilled_tokens
    rig.expect_oracle()


def test_s15_when_the_one_that_computes_the_prefix_dies_another_goes_on() -> None:
    limits = SchedulerLimits(lanes=4, step_tokens=16, prefill_budget=16)
    rig = Rig(limits, PoolShape(4, 100, 400))
    rig.submit(*(spec(number, (*PREFIX, number), 4) for number in range(4)))
    rig.tick()
    rig.tick()
    rig.give(Cancel(key(0)))
    rig.run()
    assert rig.engine.prefilled_tokens < 100 + 40
    rig.expect_oracle()


def test_the_whole_prompt_is_never_reused_for_its_last_token_gives_the_logits() -> None:
    rig = Rig()
    rig.submit(spec(1, PREFIX[:40], 2))
    rig.run()
    rig.submit(spec(2, PREFIX[:40], 2))
    rig.launch()
    rig.step()
    assert Progress(key(2), 40, 40, 36) in rig.log
    rig.end()
    rig.run()
    rig.expect_oracle()


def test_outputs_are_reused_by_the_next_turn_of_a_conversation() -> None:
    rig = Rig()
    rig.submit(spec(1, PREFIX[:14], 10))
    rig.run()
    (accepted,) = rig.submit(spec(2, (*PREFIX[:14], *rig.output(1), 3), 2))
    assert accepted == Accepted(key(2), 0, 20)


@pytest.mark.parametrize(
    ("first", "second", "shared", "hit"),
    [
        ({}, {}, False, 36),
        ({"tenant": "a"}, {"tenant": "b"}, False, 0),
        ({"tenant": "a"}, {"tenant": "b"}, True, 36),
        ({"cache_salt": b"x"}, {"cache_salt": b"y"}, True, 0),
        ({"batch_invariant": True}, {}, False, 0),
        ({}, {"prompt_logprobs": 1}, False, 0),
    ],
)
def test_prefixes_are_shared_within_a_scope_only(
    first: dict[str, Any], second: dict[str, Any], shared: bool, hit: int
) -> None:
    rig = Rig(rules=Rules(prefix_shared=shared))
    rig.submit(spec(1, PREFIX[:40], 2, **first))
    rig.run()
    (accepted,) = rig.submit(spec(2, PREFIX[:40], 2, **second))
    assert accepted == Accepted(key(2), 0, hit)


def test_when_the_pool_is_full_the_lowest_class_last_admitted_is_computed_again() -> None:
    rig = Rig(SchedulerLimits(lanes=3, step_tokens=32), PoolShape(4, 12, 200))
    rig.submit(spec(1, 12, 30, AGENT), spec(2, 12, 9, BATCH), spec(3, 12, 9, AGENT))
    rig.run()
    stats = rig.scheduler.stats()
    assert stats.preempted_for_blocks > 0
    assert stats.recomputed_tokens > 0
    assert list(rig.finished)[-1] == key(2) or rig.reason(2) is FinishReason.LENGTH
    rig.expect_oracle()


def test_two_sessions_that_cannot_both_live_finish_one_after_the_other() -> None:
    rig = Rig(SchedulerLimits(lanes=2, step_tokens=32), PoolShape(4, 8, 200))
    rig.submit(spec(1, 14, 60), spec(2, 14, 60))
    rig.run(400)
    assert [len(rig.output(number)) for number in (1, 2)] == [33 - 14] * 2
    rig.expect_oracle()


def test_batch_invariant_lanes_alone_in_a_full_pool_do_not_stand_still() -> None:
    rig = Rig(SchedulerLimits(lanes=2, step_tokens=32), PoolShape(4, 8, 200))
    rig.submit(
        spec(1, 14, 12, batch_invariant=True),
        spec(2, 14, 12, batch_invariant=True),
    )
    rig.run(400)
    rig.expect_oracle()


def test_a_grant_shrinks_to_what_the_pool_holds() -> None:
    rig = Rig(SchedulerLimits(lanes=2, step_tokens=32), PoolShape(4, 8, 200))
    rig.state.rates.on_step(1, 0, 1_000_000)
    rig.submit(spec(1, 10, 90))
    plan = rig.launch()
    assert plan is not None
    assert 1 < plan.lanes[0].grant <= 8 * 4 + 1 - 10
    assert len(plan.lanes[0].blocks) <= 8


def test_the_pool_is_kept_below_its_marks_by_forgetting_prefixes() -> None:
    rig = Rig(shape=PoolShape(4, 20, 200))
    for number in range(6):
        rig.submit(spec(number, 16, 2))
        rig.run()
    pool = rig.state.accounts.pool
    assert (pool.total - pool.free) * 100 <= 85 * pool.total
    stats = rig.scheduler.stats()
    assert stats.prefix_evicted_blocks >= stats.evicted_for_pressure > 0


def test_marks_that_cross_are_a_start_up_error() -> None:
    with pytest.raises(ConfigError, match="pressure"):
        Scheduler(
            SchedulerLimits(),
            PoolShape(16, 9, 99),
            rules=Rules(pressure_low_pct=90, pressure_high_pct=80),
        )


def test_a_critical_host_preempts_decoding_background_lanes_and_holds_them_back() -> None:
    rig = Rig()
    rig.submit(spec(1, 10, 40, BATCH), spec(2, 10, 150))
    rig.tick()
    rig.tick()
    rig.give(Pressure(PressureLevel.CRITICAL))
    rig.tick()
    assert rig.running() == [2]
    assert rig.scheduler.stats().preempted_for_pressure == 1
    rig.give(Pressure(PressureLevel.NONE))
    rig.tick()
    assert rig.running() == [1, 2]
    rig.run()
    rig.expect_oracle()


def test_a_warning_evicts_one_round_and_preempts_nobody() -> None:
    rig = Rig(shape=PoolShape(4, 20, 200), rules=Rules(pressure_high_pct=100))
    rig.submit(spec(1, 64, 2))
    rig.run()
    rig.submit(spec(2, 3, 40, BATCH))
    rig.tick()
    before = len(rig.state.accounts.cache)
    rig.give(Pressure(PressureLevel.WARNING))
    assert len(rig.state.accounts.cache) < before
    rig.tick()
    assert rig.running() == [2]


def test_what_a_head_may_know_of_the_cache_comes_and_goes_with_it() -> None:
    rig = Rig(shape=PoolShape(4, 20, 200))
    rig.submit(spec(1, 41, 2))
    rig.run()
    added, removed = rig.scheduler.drain_prefix_changes()
    assert (len(added), removed) == (10, [])
    assert sorted(added) == sorted(rig.scheduler.prefix_names())
    assert rig.scheduler.pin_prefix(added[-1], pinned=True)
    assert not rig.scheduler.pin_prefix(b"?" * 16, pinned=True)
    assert rig.scheduler.pin_prefix(added[-1], pinned=False)
    assert rig.scheduler.drain_prefix_changes() == ([], [])
