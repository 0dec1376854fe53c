"""What an operator may choose beside the defaults: batching, prefill modes, policies that follow the cache; deadlines, counters."""

from __future__ import annotations

import pytest

from superfluid_core.errors import ConfigError, ErrorCode
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.plan import Finish, Interrupt, Reject, TickOutcome, TickPlan
from superfluid_core.scheduler.rules import Batching, PrefillMode, QueueOrder, Reserve, Rules
from superfluid_core.scheduler.scheduler import PoolShape, Scheduler
from superfluid_core.scheduler.stats import OTHER_TENANTS, TENANTS_MAX, TenantTokens
from superfluid_core.session import FinishReason, QosClass
from tests.unit.scheduler.rig import MS, Rig, key, spec

CHAT, COMPLETION, AGENT, BATCH = QosClass
PREFIX = tuple(place * 5 % 47 for place in range(100))


def kinds(plan: TickPlan | None) -> tuple[int, int]:
    """Decoding lanes and prompts of a plan."""
    assert plan is not None
    decoding = sum(lane.decoding for lane in plan.lanes)
    return decoding, len(plan.lanes) - decoding


# --- batching -------------------------------------------------------------------------------------


def test_a_static_batch_takes_nobody_in_until_its_longest_has_ended() -> None:
    rig = Rig(SchedulerLimits(lanes=2, step_tokens=32), rules=Rules(batching=Batching.STATIC))
    rig.submit(spec(1, 6, 3), spec(2, 6, 9), spec(3, 6, 2), spec(4, 6, 2, CHAT))
    rig.tick()
    assert rig.running() == [1, 4], "the best of those who are there"
    rig.launch()
    effects = rig.submit(spec(5, 6, 2, CHAT))
    assert not any(isinstance(each, Interrupt) for each in effects), "he cannot come in"
    rig.step()
    rig.end(TickOutcome.INTERRUPTED)
    while rig.running():
        assert set(rig.running()) <= {1, 4}
        rig.tick()
    rig.launch()
    assert rig.running() == [2, 5]
    rig.step()
    rig.end(TickOutcome.INTERRUPTED)
    rig.run()
    rig.expect_oracle()


def test_static_batching_runs_in_groups_and_continuous_does_not() -> None:
    steps = {}
    for batching in Batching:
        rig = Rig(
            SchedulerLimits(lanes=4, step_tokens=512),
            PoolShape(16, 400, 4000),
            Rules(batching=batching),
        )
        outputs = (12, 3, 7, 20, 5, 9, 4, 15)
        rig.submit(*(spec(number, 4, output) for number, output in enumerate(outputs)))
        rig.run()
        steps[batching] = rig.scheduler.stats().steps
    assert steps == {Batching.STATIC: 20 + 15, Batching.CONTINUOUS: 27}


# --- prefill modes --------------------------------------------------------------------------------


def test_monolithic_computes_a_whole_prompt_in_one_step_beside_who_decodes() -> None:
    limits = SchedulerLimits(lanes=4, step_tokens=32, prefill_budget=64)
    rig = Rig(limits, rules=Rules(prefill_mode=PrefillMode.MONOLITHIC))
    rig.submit(spec(1, 10, 20))
    rig.tick()
    rig.submit(spec(2, 150, 3), spec(3, 20, 3), spec(4, 30, 3))
    plan = rig.launch()
    assert kinds(plan) == (1, 2), "what goes beyond the budget waits, unless it is the first"
    rig.step()
    assert len(rig.output(3)) == len(rig.output(4)) == 1
    rig.end(TickOutcome.INTERRUPTED)
    plan = rig.launch()
    assert plan is not None
    assert plan.step_tokens == 3 + 150
    rig.step()
    assert len(rig.output(2)) == 1
    rig.end(TickOutcome.INTERRUPTED)
    rig.run()
    rig.expect_oracle()


def test_alternating_gives_prompts_and_decoding_lanes_a_pass_each() -> None:
    limits = SchedulerLimits(lanes=4, step_tokens=32, prefill_budget=64)
    rig = Rig(limits, rules=Rules(prefill_mode=PrefillMode.ALTERNATING))
    rig.submit(spec(1, 10, 20))
    rig.tick()
    rig.submit(spec(2, 90, 3))
    seen = []
    for _ in range(6):
        plan = rig.tick()
        seen.append(kinds(plan))
    assert seen == [(0, 1), (1, 0), (0, 1), (1, 0), (0, 1), (2, 0)]
    rig.run()
    rig.expect_oracle()


def test_disaggregated_is_refused_by_name_at_construction() -> None:
    with pytest.raises(ConfigError, match="disaggregated"):
        Scheduler(
            SchedulerLimits(),
            PoolShape(16, 9, 99),
            rules=Rules(prefill_mode=PrefillMode.DISAGGREGATED),
        )


def test_a_kv_that_was_computed_elsewhere_comes_through_the_door_to_decoding() -> None:
    rig = Rig()
    of = spec(1, 30, 6)
    rig.submit(of)
    rig.launch()
    assert not rig.scheduler.promote_to_decode(key(1), 29), "it is being computed here"
    rig.end(TickOutcome.INTERRUPTED)
    session = rig.state.sessions[key(1)]
    for place, token in enumerate(of.prompt[:29]):
        rig.engine.kv[session.blocks[place // 4], place % 4] = token
    assert not rig.scheduler.promote_to_decode(key(1), 30)
    assert not rig.scheduler.promote_to_decode(key(2), 29)
    assert rig.scheduler.promote_to_decode(key(1), 29)
    assert not rig.scheduler.promote_to_decode(key(1), 29)
    assert kinds(rig.tick()) == (1, 0)
    rig.run()
    assert rig.engine.prefilled_tokens == 0
    rig.expect_oracle()


# --- policies that follow the cache ---------------------------------------------------------------


def one_lane(policy: QueueOrder) -> Rig:
    limits = SchedulerLimits(lanes=1, step_tokens=128)
    return Rig(limits, PoolShape(4, 80, 300), Rules(queue_order=policy))


def test_prefix_follows_what_was_cached_after_the_arrival() -> None:
    rig = one_lane(QueueOrder.PREFIX)
    rig.submit(spec(1, PREFIX[:60], 4))
    rig.tick()
    rig.submit(spec(2, 20, 2), spec(3, 30, 2), spec(4, (*PREFIX[:60], 1, 2), 2))
    rig.run()
    assert rig.order() == [1, 4, 2, 3]
    rig.expect_oracle()


def test_prefix_follows_what_was_forgotten_after_the_arrival() -> None:
    rig = one_lane(QueueOrder.PREFIX)
    rig.submit(spec(1, PREFIX[:40], 2))
    rig.run()
    rig.submit(spec(2, (1, 2, 3, *PREFIX[:60]), 2))
    rig.run()
    rig.submit(spec(3, 20, 8))
    rig.tick()
    rig.submit(spec(4, 20, 2), spec(5, (*PREFIX[:40], 1, 2), 2))
    assert (
        rig.state.queues.head(AGENT, rig.now_ns, rig.state.is_capped) is rig.state.sessions[key(5)]
    )
    while rig.state.accounts.cache.evict_one():
        pass
    rig.run()
    assert rig.order()[-2:] == [4, 5]


def test_shortest_counts_what_is_left_to_compute_now() -> None:
    rig = one_lane(QueueOrder.SHORTEST)
    rig.submit(spec(1, PREFIX[:60], 4))
    rig.tick()
    rig.submit(spec(2, 20, 2), spec(3, (*PREFIX[:60], 1, 2), 2))
    rig.run()
    assert rig.order() == [1, 3, 2]


def test_placing_waiting_sessions_anew_is_bounded_per_tick() -> None:
    rig = one_lane(QueueOrder.PREFIX)
    rig.submit(spec(1, PREFIX, 2))
    rig.tick()
    rig.submit(*(spec(number, (*PREFIX, number), 1) for number in range(2, 62)))
    hits = rig.state.hits
    assert hits is not None
    hits.settle()
    known = [each.hit_tokens for each in rig.state.queues]
    assert 0 < sum(count == 100 for count in known) <= 60
    rig.run()
    assert len(rig.finished) == 61
    assert not hits._groups
    assert not rig.state.accounts.cache.wanted


# --- deadlines ------------------------------------------------------------------------------------


def test_a_completion_that_has_not_started_in_time_ends() -> None:
    rig = Rig(SchedulerLimits(lanes=1, step_tokens=32))
    rig.submit(spec(1, 10, 50, CHAT))
    rig.tick()
    late = rig.now_ns + 100 * MS
    rig.submit(spec(2, 10, 50, COMPLETION, start_deadline_ns=late))
    rig.now_ns = late
    (finish,) = rig.give()
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.code) == (FinishReason.DEADLINE, ErrorCode.DEADLINE_EXCEEDED)


def test_one_that_had_a_lane_in_time_goes_on_even_when_it_waits_again() -> None:
    rig = Rig(SchedulerLimits(lanes=1, step_tokens=32))
    rig.submit(spec(1, 10, 30, AGENT, start_deadline_ns=rig.now_ns + 100 * MS))
    rig.tick()
    rig.submit(spec(2, 10, 30, CHAT))
    rig.tick()
    assert rig.running() == [2]
    rig.now_ns += 200 * MS
    rig.run()
    assert rig.reason(1) is FinishReason.LENGTH
    rig.expect_oracle()


# --- what is told ---------------------------------------------------------------------------------


def test_tokens_are_counted_per_tenant() -> None:
    rig = Rig()
    rig.submit(spec(1, 10, 3, tenant="a"), spec(2, 12, 4, tenant="b"), spec(3, 7, 1, tenant="a"))
    rig.run()
    assert rig.scheduler.tenant_tokens() == [TenantTokens("a", 17, 4), TenantTokens("b", 12, 4)]


def test_tenants_beyond_the_bound_are_counted_together() -> None:
    rig = Rig(SchedulerLimits(lanes=4, step_tokens=32, queue_max=400))
    rig.submit(*(spec(n, 1, 1, tenant=f"t{n}") for n in range(TENANTS_MAX + 5)))
    rig.run()
    meters = rig.scheduler.tenant_tokens()
    assert len(meters) == TENANTS_MAX + 1
    assert meters[-1] == TenantTokens(OTHER_TENANTS, 5, 5)


def test_refusals_are_counted_by_their_code() -> None:
    rig = Rig(SchedulerLimits(lanes=1, step_tokens=32, queue_max=0), PoolShape(4, 64, 20))
    rig.submit(spec(1), spec(2), spec(3), spec(4, 20))
    assert all(isinstance(each, Reject) for each in rig.rejected.values())
    refused = dict(rig.scheduler.stats().refused)
    assert refused == {ErrorCode.QUEUE_FULL: 2, ErrorCode.CONTEXT_LENGTH_EXCEEDED: 1}


def test_g4_holds_are_told_from_those_of_g3() -> None:
    limits = SchedulerLimits(lanes=4, step_tokens=64, watermark_pct=0)
    rig = Rig(limits, PoolShape(4, 16, 100), Rules(reserve=Reserve.FULL))
    rig.submit(spec(1, 8, 40), spec(2, 8, 40), spec(3, 60, 2, BATCH))
    rig.tick()
    stats = rig.scheduler.stats()
    assert (stats.held_reservation, stats.held_blocks) == (1, 1)
    assert stats.kv_reserved_tokens == 4 * stats.reserved_blocks == 48
    rig.run()


def test_g6_tells_its_ratio_and_how_often_it_closed() -> None:
    limits = SchedulerLimits(
        lanes=4, step_tokens=64, tick_target_ms=100, starvation_ticks=1, queue_max=500
    )
    rig = Rig(limits, PoolShape(4, 20, 100))
    rig.submit(*(spec(number, 16, 40) for number in range(60)))
    seen: set[tuple[int, bool]] = set()
    while rig.tick() is not None:
        stats = rig.scheduler.stats()
        seen.add((stats.thrash_lanes, stats.recompute_ratio > 0.2))
    assert rig.scheduler.stats().thrash_trips > 0
    assert any(lanes < 4 and is_over for lanes, is_over in seen)
