"""What decoding lanes drew is written into the records late; nobody can tell."""

from __future__ import annotations

from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.plan import Cancel, Emits, Indices, LanePlan, LanePlans, TickOutcome
from superfluid_core.scheduler.scheduler import PoolShape
from tests.unit.scheduler.rig import Rig, key, spec

SHAPE = PoolShape(block_tokens=64, blocks=64, window=2_000)
LIMITS = SchedulerLimits(lanes=4, step_tokens=64)


def decoding(*outputs: int) -> Rig:
    """A rig with one session for each number of outputs, in the middle of a tick in which all decode."""
    rig = Rig(LIMITS, SHAPE)
    rig.state.rates.on_step(len(outputs), 0, 1_000_000)
    rig.submit(*(spec(n, 10 + n, most, tenant=f"t{n}") for n, most in enumerate(outputs)))
    rig.launch()
    for _ in outputs:
        rig.step()
    assert len(rig.state.lanes.decoding) == len(outputs)
    return rig


def test_sessions_and_tenants_are_told_as_they_are_in_the_middle_of_a_tick() -> None:
    rig = decoding(60, 60, 60)
    for _ in range(5):
        rig.step()
    said = [len(rig.output(n)) for n in range(3)]
    assert [view.output for view in rig.scheduler.sessions()] == said
    rig.step()
    told = {each.tenant: each.output for each in rig.scheduler.tenant_tokens()}
    assert told == {f"t{n}": len(rig.output(n)) for n in range(3)}


def test_a_step_that_means_nothing_more_leaves_the_records_alone() -> None:
    rig = decoding(60, 60)
    sessions = list(rig.state.lanes)
    rig.step()
    lengths = [len(each.context) for each in sessions]
    rig.step()
    assert [len(each.context) for each in sessions] == lengths
    rig.end()
    assert [each.output for each in sessions] == [len(rig.output(n)) for n in range(2)]


def test_one_that_is_cancelled_in_the_middle_takes_no_token_of_the_others_along() -> None:
    rig = decoding(60, 60, 60)
    for _ in range(3):
        rig.step()
    rig.give(Cancel(key(1)))
    rig.step()
    rig.end(TickOutcome.INTERRUPTED)
    rig.run()
    rig.expect_oracle()
    assert [len(rig.output(n)) for n in (0, 2)] == [60, 60]


def test_indices_read_like_a_list_and_do_not_change_with_later_steps() -> None:
    rig = decoding(60, 60)
    kept = []
    for _ in range(3):
        (emits,) = [each for each in rig.step() or () if isinstance(each, Emits)]
        kept.append((emits.indices, list(emits.indices)))
    for indices, before in kept:
        assert list(indices) == before
        assert [indices[place] for place in range(len(indices))] == before
    indices = Indices([-4, 0, 3], 4)
    assert (0 in indices, 4 in indices, 5 in indices) == (True, True, False)
    assert list(indices[1:]) == [4, 7]


def test_a_plan_in_columns_reads_like_its_rows() -> None:
    rows = (
        LanePlan(3, True, 9, (5,), 4, 2, (1, 2)),
        LanePlan(1, True, 20, (6,), 7, 5, (3,)),
        LanePlan(0, False, 0, (1, 2, 3), 0, 0, (4,)),
    )
    plans = LanePlans.of(rows)
    assert (tuple(plans), len(plans), plans[2], list(plans[:1])) == (rows, 3, rows[2], [rows[0]])
