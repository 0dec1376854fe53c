"""KV in host memory: swap instead of recompute, prefixes that come back, a host that is short of memory: S14."""

from __future__ import annotations

import pytest

from superfluid_core.errors import ConfigError
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.plan import Cancel, Pressure, PressureLevel, TickOutcome, TickPlan
from superfluid_core.scheduler.rules import PreemptMode, Rules
from superfluid_core.scheduler.scheduler import PoolShape, Scheduler
from superfluid_core.session import QosClass, SessionSpec
from tests.unit.scheduler.rig import MS, Rig, key, spec

CHAT, COMPLETION, AGENT, BATCH = QosClass
LIMITS = SchedulerLimits(lanes=2, step_tokens=32)
PREFIX = tuple(place * 5 % 47 for place in range(60))
MINUTE = 60_000 * MS


def swapping(
    park: int = 100,
    blocks: int = 40,
    mode: PreemptMode = PreemptMode.SWAP,
    limits: SchedulerLimits = LIMITS,
    copy_rate: float = 0.0,
) -> Rig:
    """A rig whose host holds `park` blocks; one position is a byte."""
    shape = PoolShape(4, blocks, 200, kv_bytes_per_token=1, host_copy_bytes_per_s=copy_rate)
    return Rig(limits, shape, Rules(park=True, park_bytes=park * 4, preempt_mode=mode))


def interrupted(rig: Rig, *agents: SessionSpec) -> TickPlan:
    """Two agents have decoded a little, a chat comes; returns the plan in which it has its lane."""
    rig.submit(*(agents or (spec(1, 21, 40), spec(2, 24, 40))))
    rig.tick()
    while rig.state.lanes.prefilling:
        rig.tick()
    rig.launch()
    rig.step()
    rig.submit(spec(3, 10, 3, CHAT))
    rig.end(TickOutcome.INTERRUPTED)
    plan = rig.launch()
    assert plan is not None
    assert rig.running() == [1, 3]
    return plan


def finish(rig: Rig) -> None:
    while rig.step() is not None and not rig.must_stop:
        pass
    rig.end(TickOutcome.INTERRUPTED)
    rig.run()
    rig.expect_oracle()


def test_a_victim_is_swapped_out_and_back_and_computes_nothing_twice() -> None:
    rig = swapping()
    plan = interrupted(rig)
    (out,) = plan.park_out
    assert len(out.blocks) == 7, "24 + 1 positions"
    assert rig.scheduler.stats().parked_sessions == 1
    before = rig.engine.prefilled_tokens
    finish(rig)
    stats = rig.scheduler.stats()
    assert (stats.preempted_for_class, stats.swapped_for_class) == (1, 1)
    assert stats.recomputed_tokens == 0
    assert stats.restored_tokens == 1, "its full blocks had stayed in the cache"
    assert len(rig.engine.host) == stats.parked_prefixes
    assert rig.engine.prefilled_tokens == before + 10
    assert len(rig.output(2)) == 40


def test_recompute_is_what_happens_without_a_host_or_when_told_so() -> None:
    for rig in (swapping(mode=PreemptMode.RECOMPUTE), Rig(LIMITS, PoolShape(4, 40, 200))):
        assert interrupted(rig).park_out == ()
        finish(rig)
        stats = rig.scheduler.stats()
        assert (stats.preempted_for_class, stats.swapped_for_class) == (1, 0)
        assert stats.recomputed_tokens > 0


def test_a_restored_session_decodes_at_once() -> None:
    rig = swapping()
    plan: TickPlan | None = interrupted(rig)
    while key(3) not in rig.finished:
        while rig.step() is not None and not rig.must_stop:
            pass
        rig.end(TickOutcome.INTERRUPTED)
        plan = rig.launch()
    assert plan is not None
    (back,) = plan.park_in
    (start,) = plan.starts
    assert start.spec.key == key(2)
    (lane,) = [lane for lane in plan.lanes if lane.lane == start.lane]
    assert (lane.decoding, lane.computed, len(lane.inputs)) == (True, 25, 1)
    assert back.blocks == lane.blocks[6:7]
    finish(rig)


def test_all_of_it_comes_back_from_the_host_when_the_cache_forgot() -> None:
    rig = swapping(blocks=16)
    assert len(interrupted(rig).park_out) == 1
    while rig.state.accounts.cache.evict_one(to_host=False):
        pass
    finish(rig)
    stats = rig.scheduler.stats()
    assert stats.restored_tokens >= 25
    assert stats.recomputed_tokens == 0


def test_a_full_store_falls_back_to_recompute() -> None:
    rig = swapping(park=6)
    assert interrupted(rig).park_out == ()
    finish(rig)
    stats = rig.scheduler.stats()
    assert (stats.swapped_for_class, stats.park_refused) == (0, 1)


@pytest.mark.parametrize(
    ("copy_rate", "is_swapped"), [(0.0, False), (1_000.0, False), (100_000.0, True)]
)
def test_auto_swaps_where_two_copies_take_less_than_the_prefill(
    copy_rate: float, is_swapped: bool
) -> None:
    """The rig computes about 2,400 prompt tokens a second; a token is a byte, out and in."""
    rig = swapping(mode=PreemptMode.AUTO, copy_rate=copy_rate)
    assert bool(interrupted(rig).park_out) is is_swapped
    finish(rig)


def test_what_others_hold_is_not_copied() -> None:
    rig = swapping()
    agents = (spec(1, (*PREFIX[:40], 1), 40), spec(2, (*PREFIX[:40], 2), 40))
    (out,) = interrupted(rig, *agents).park_out
    assert len(out.blocks) == 1, "ten blocks of the prefix are the other's too"
    finish(rig)
    assert rig.scheduler.stats().recomputed_tokens == 0


def test_a_session_that_ends_while_parked_leaves_nothing_in_the_host() -> None:
    rig = swapping()
    interrupted(rig)
    rig.give(Cancel(key(2)))
    finish(rig)
    assert rig.engine.host == {}
    assert rig.scheduler.stats().park_bytes == 0


def test_a_refused_plan_is_made_again_with_its_moves() -> None:
    rig = swapping()
    plan = interrupted(rig)
    rig.end(TickOutcome.REFUSED)
    again = rig.launch()
    assert again is not None
    assert again.park_out == plan.park_out
    finish(rig)
    assert rig.scheduler.stats().recomputed_tokens == 0


def test_an_evicted_prefix_is_imported_on_its_next_hit() -> None:
    rig = swapping(blocks=20)
    rig.submit(spec(1, PREFIX[:41], 2))
    rig.run()
    rig.submit(spec(2, 60, 2))
    rig.run()
    stats = rig.scheduler.stats()
    assert stats.parked_prefixes >= 10
    before = rig.engine.prefilled_tokens
    (accepted,) = rig.submit(spec(3, PREFIX[:41], 2))
    assert getattr(accepted, "cached_tokens", 0) == 40
    rig.run()
    assert rig.engine.prefilled_tokens == before + 1
    assert rig.scheduler.stats().imported_tokens > 0
    rig.expect_oracle()


def test_s15_a_prefix_that_comes_in_from_the_host_is_shared_too() -> None:
    limits = SchedulerLimits(lanes=4, step_tokens=64)
    rig = swapping(blocks=24, limits=limits)
    rig.submit(spec(1, PREFIX[:41], 2))
    rig.run()
    rig.submit(spec(2, 80, 2))
    rig.run()
    before = rig.engine.prefilled_tokens
    rig.submit(*(spec(number, (*PREFIX[:41], number, 1), 3) for number in range(3, 7)))
    rig.run()
    assert rig.engine.prefilled_tokens == before + 4 * 3
    rig.expect_oracle()


def test_a_warning_drops_host_held_prefixes_and_nothing_moves_there_for_a_minute() -> None:
    rig = swapping(blocks=20)
    rig.submit(spec(1, PREFIX[:41], 2))
    rig.run()
    rig.submit(spec(2, 60, 2))
    rig.run()
    rig.submit(spec(3, 60, 2))
    rig.tick()
    assert rig.scheduler.stats().parked_prefixes > 0
    rig.give(Pressure(PressureLevel.WARNING))
    stats = rig.scheduler.stats()
    assert (stats.parked_prefixes, stats.park_bytes) == (0, 0)
    rig.give(Pressure(PressureLevel.NONE))
    rig.run()
    rig.submit(spec(4, 70, 2))
    rig.run()
    assert rig.scheduler.stats().parked_prefixes == 0
    assert rig.engine.host == {}
    rig.now_ns += MINUTE
    rig.submit(spec(5, 70, 2))
    rig.run()
    assert rig.scheduler.stats().parked_prefixes > 0


def test_while_the_host_stays_short_nothing_moves_there_however_long() -> None:
    rig = swapping()
    rig.give(Pressure(PressureLevel.WARNING))
    rig.now_ns += 5 * MINUTE
    assert interrupted(rig).park_out == ()
    finish(rig)


def test_an_idle_engine_gives_host_memory_back_at_once() -> None:
    rig = swapping(blocks=20)
    rig.submit(spec(1, PREFIX[:41], 2))
    rig.run()
    rig.submit(spec(2, 60, 2))
    rig.run()
    assert rig.engine.host
    rig.give(Pressure(PressureLevel.CRITICAL))
    plan = rig.launch()
    assert plan is not None
    assert (plan.lanes, plan.park_in) == ((), ())
    assert plan.park_drop
    assert rig.step() is None
    rig.end()
    assert rig.engine.host == {}
    assert rig.launch() is None


def test_refused_drops_are_not_tried_again_for_ever() -> None:
    rig = swapping(blocks=20)
    rig.submit(spec(1, PREFIX[:41], 2))
    rig.run()
    rig.submit(spec(2, 60, 2))
    rig.run()
    rig.give(Pressure(PressureLevel.WARNING))
    assert rig.launch() is not None
    rig.end(TickOutcome.REFUSED)
    assert rig.launch() is None
    rig.submit(spec(3, 10, 2))
    rig.run()
    assert rig.engine.host == {}


def test_a_critical_host_recomputes_its_victims() -> None:
    rig = swapping()
    rig.submit(spec(1, 10, 60, BATCH), spec(2, 10, 60))
    rig.tick()
    rig.tick()
    rig.give(Pressure(PressureLevel.CRITICAL))
    rig.tick()
    stats = rig.scheduler.stats()
    assert (stats.preempted_for_pressure, stats.swapped_for_pressure) == (1, 0)
    rig.give(Pressure(PressureLevel.NONE))
    rig.run()
    rig.expect_oracle()


@pytest.mark.parametrize(
    ("rules", "kv_bytes", "text"),
    [
        (Rules(preempt_mode=PreemptMode.SWAP), 1, "park"),
        (Rules(park=True, park_bytes=0), 1, "park-bytes"),
        (Rules(park=True, park_bytes=15), 1, "less than one KV block"),
        (Rules(park=True), 0, "cannot move KV"),
    ],
)
def test_host_memory_that_cannot_work_is_a_start_up_error(
    rules: Rules, kv_bytes: int, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        Scheduler(LIMITS, PoolShape(16, 9, 99, kv_bytes_per_token=kv_bytes), rules=rules)
