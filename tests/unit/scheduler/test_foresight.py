"""The tick behind the one in flight is foreseen exactly or not at all, whatever comes between its beginning and its telling."""

from __future__ import annotations

from dataclasses import replace

import pytest

from superfluid_core.errors import ErrorCode
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.foresight import Foreseen
from superfluid_core.scheduler.plan import (
    Cancel,
    Interrupt,
    LaneFault,
    LanePlans,
    Pressure,
    PressureLevel,
    StepDone,
    TickOutcome,
)
from superfluid_core.scheduler.rules import PreemptMode, Rules
from superfluid_core.scheduler.scheduler import PoolShape
from superfluid_core.session import QosClass
from tests.unit.scheduler.rig import Rig, key, spec

LIMITS = SchedulerLimits(lanes=4, step_tokens=32, tick_target_ms=60)


def rig_of(*numbers: int, max_output: int = 60, **more: object) -> Rig:
    """Sessions that decode, in the last step of a tick, with the next one foreseen."""
    rig = Rig(LIMITS, foresees=True)
    rig.submit(*(spec(number, 10, max_output, **more) for number in numbers))  # type: ignore[arg-type]
    rig.tick()
    rig.launch()
    while rig.foreseen is None:
        assert rig.step() is not None
    return rig


def finish(rig: Rig) -> None:
    """Run everything to its end; every token was judged on its way."""
    while rig.engine.plan is not None:
        if (rig.must_stop and rig.engine.steps) or rig.step() is None:
            rig.end(TickOutcome.INTERRUPTED if rig.must_stop else TickOutcome.COMPLETE)
    rig.run()
    rig.expect_oracle()
    assert rig.scheduler.stats().blocks_used == 0


def cross(rig: Rig) -> None:
    """Have the engine pass from the tick into the foreseen one, untold."""
    before = rig.followed
    rig.step()
    assert rig.followed == before + 1
    assert rig.unheard


def test_a_steady_batch_is_planned_once_and_foreseen_from_then_on() -> None:
    rig = rig_of(1, 2, 3)
    ticks = rig.state.counters.ticks
    cross(rig)
    rig.hear()
    assert rig.state.counters.ticks == ticks + 1
    assert rig.state.flight is not None
    assert rig.engine.plan is not None
    assert rig.state.flight.plan.tick == rig.engine.plan.tick
    finish(rig)
    assert rig.followed >= 2


def test_nothing_is_foreseen_before_the_last_step_or_while_somebody_waits() -> None:
    rig = Rig(LIMITS)
    rig.submit(spec(1, 10, 60))
    rig.launch()
    assert rig.scheduler.foresee() is None, "a prompt is computed"
    rig.step()
    rig.end()
    rig.tick()  # measures what a step costs
    rig.launch()
    assert rig.state.flight is not None
    assert rig.state.flight.rounds > 1
    assert rig.scheduler.foresee() is None, "more than one step is to come"
    crowd = rig_of(1, 2, 3, 4)
    crowd.foreseen = crowd.state.foreseen = None
    crowd.submit(spec(9))
    assert crowd.scheduler.foresee() is None, "somebody waits"


def test_who_ends_for_certain_in_the_last_step_is_left_out() -> None:
    rig = rig_of(1, 2)
    short = rig.state.sessions[key(2)]
    rig.foreseen = rig.state.foreseen = None
    short.context_limit = len(short.context) + 1
    found = rig.scheduler.foresee()
    assert found is not None
    assert [lane.lane for lane in found.plan.lanes] == [rig.state.sessions[key(1)].lane]


@pytest.mark.parametrize("pool", [20, 24, 28, 40])
def test_blocks_are_taken_only_where_they_are_free(pool: int) -> None:
    rig = Rig(LIMITS, PoolShape(block_tokens=4, blocks=pool, window=200), foresees=True)
    rig.submit(*(spec(number, 10, 60) for number in (1, 2, 3)))
    while rig.state.sessions:
        rig.tick()
    rig.expect_oracle()
    assert rig.followed


def test_nothing_is_pushed_out_of_the_cache_for_a_promise() -> None:
    """A block that goes to the host is copied by the next plan made in full: nobody may write into it before."""
    shape = PoolShape(4, 20, 200, kv_bytes_per_token=1, host_copy_bytes_per_s=1e9)
    rules = Rules(
        park=True,
        park_bytes=4 * 60,
        preempt_mode=PreemptMode.SWAP,
        pressure_high_pct=100,
        pressure_low_pct=99,
    )
    rig = Rig(LIMITS, shape, rules, foresees=True)
    cache, inner = rig.state.accounts.cache, rig.scheduler.foresee

    def watched() -> Foreseen | None:
        before, moves = cache.evicted, rig.state.accounts.park.has_moves
        found = inner()
        assert cache.evicted == before
        assert not (found and moves)
        return found

    rig.scheduler.foresee = watched  # type: ignore[method-assign] # looks on
    rig.submit(spec(1, 10, 30))
    rig.run()
    rig.submit(spec(2, 10, 60))
    while cache.evicted < 3:
        assert rig.tick() is not None
    rig.launch()
    cache.evict_one()
    assert rig.state.accounts.park.has_moves
    rig.foreseen = rig.state.foreseen = None
    while rig.step() is not None:
        assert rig.foreseen is None
    rig.end()
    rig.run()
    rig.expect_oracle()
    assert rig.followed


def last(rig: Rig, **changes: object) -> StepDone:
    """Make the tick's last step as the engine would, then change it."""
    done = rig.engine.step()
    assert done is not None
    return replace(done, **changes)  # type: ignore[arg-type]


def test_a_fault_a_stop_or_a_missing_lane_makes_the_foreseen_plan_void() -> None:
    rig = rig_of(1, 2, stop_ids=frozenset({7}))
    foreseen = rig.foreseen
    assert foreseen is not None
    good = last(rig, ids=[3, 4])
    plan = foreseen.complete(good)
    assert plan is not None
    assert [lane.inputs for lane in plan.lanes] == [(3,), (4,)]
    turned = foreseen.complete(replace(good, lanes=good.lanes[::-1]))
    assert turned is not None
    assert [lane.inputs for lane in turned.lanes] == [(4,), (3,)]
    assert foreseen.complete(replace(good, ids=[3, 7])) is None
    assert foreseen.complete(replace(good, lanes=good.lanes[:1], ids=[3])) is None
    fault = LaneFault(good.lanes[0], ErrorCode.LANE_FAULT, "planted")
    assert foreseen.complete(replace(good, faults=(fault,))) is None
    assert foreseen.complete(replace(good, tick=good.tick - 1)) is None
    assert isinstance(foreseen.plan.lanes, LanePlans)
    assert [lane.inputs for lane in foreseen.plan.lanes] != [(3,), (4,)], "it is not changed"


def test_a_cancel_between_beginning_and_telling_ends_the_tick_that_runs_now() -> None:
    rig = rig_of(1, 2)
    cross(rig)
    rig.give(Cancel(key(1)))
    assert rig.must_stop, "the loop believes the tick before in flight, and the flag is one"
    said = len(rig.output(1))
    rig.hear()
    flight = rig.state.flight
    assert flight is not None
    assert flight.is_interrupted
    assert [each.key for each in flight.lanes.values()] == [key(2)]
    assert isinstance(rig.log[-1], Interrupt)
    finish(rig)
    assert len(rig.output(1)) == said


def test_a_chat_between_beginning_and_telling_waits_for_one_step() -> None:
    rig = rig_of(1, 2)
    cross(rig)
    rig.submit(spec(9, 4, 2, QosClass.INTERACTIVE))
    assert rig.must_stop
    rig.step()
    rig.end(TickOutcome.INTERRUPTED)
    plan = rig.launch()
    assert plan is not None
    assert [start.spec.key for start in plan.starts] == [key(9)]
    finish(rig)


def test_a_host_in_need_ends_a_tick_that_was_begun_before_it_was_heard() -> None:
    rig = rig_of(1, 2, qos=QosClass.BACKGROUND)
    cross(rig)
    rig.give(Pressure(PressureLevel.CRITICAL))
    asked = [rig.must_stop]
    rig.hear()
    asked.append(rig.must_stop)
    assert asked == [False, True]
    finish(rig)


def test_a_promise_that_is_not_kept_leaves_frees_to_the_next_plan() -> None:
    rig = rig_of(1, 2, 3)
    rig.foreseen = rig.state.foreseen = None
    rig.state.lanes.restore_changes((), (3,))
    rig.foreseen = rig.scheduler.foresee()
    assert rig.foreseen is not None
    assert rig.foreseen.plan.frees == (3,)
    rig.foreseen = None
    assert rig.step() is not None
    rig.end()
    plan = rig.launch()
    assert plan is not None
    assert plan.frees == (3,)
    finish(rig)
