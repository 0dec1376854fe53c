"""The loop in virtual time: order of events, ends, determinism, and what is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_core.engine.compose import Step
from superfluid_core.errors import ConfigError
from superfluid_core.kv.blocks import PoolShape
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.plan import Cancel, Effect, Submit, TickPlan
from superfluid_core.scheduler.rules import PreemptMode, Rules
from superfluid_core.scheduler.scheduler import Scheduler
from superfluid_core.session import QosClass
from superfluid_core.simulator.flags import MS, Flags, set_flag
from superfluid_core.simulator.node import VirtualNode
from superfluid_core.simulator.records import RunResult
from superfluid_core.simulator.report import as_json
from superfluid_core.simulator.run import run_case, spec_of
from superfluid_core.simulator.scenario import Arrival, Case

FOUR = Flags(limits=SchedulerLimits(lanes=4))


def _run(*arrivals: Arrival, flags: Flags = FOUR, until_ns: int | None = None) -> RunResult:
    return run_case(Case("case", flags, arrivals, until_ns=until_ns))


def test_who_arrives_as_a_step_ends_is_part_of_the_next_step() -> None:
    result = _run(Arrival(0, 1, 10, name="a"), Arrival(3 * MS, 1, 2, name="b"))
    assert result.session("b").started_ns == 3 * MS
    assert result.session("b").ttft_ns == MS
    assert result.session("a").gap_max_ns == MS


def test_who_arrives_within_a_step_waits_for_its_end() -> None:
    result = _run(Arrival(0, 1, 10), Arrival(3 * MS + 1, 1, 2, name="b"))
    assert result.session("b").started_ns == 4 * MS


def test_idle_time_is_jumped_over() -> None:
    result = _run(Arrival(0, 1, 2), Arrival(10**15, 1, 2, name="late"))
    assert result.session("late").finished_ns == 10**15 + 2 * MS
    assert result.busy_ns == 4 * MS


def test_a_run_can_be_cut_off() -> None:
    result = _run(Arrival(0, 1, 100), Arrival(60 * MS, 1, 1), until_ns=50 * MS)
    assert result.ended_ns == 50 * MS
    assert result.stranded == 1
    assert result.all.arrived == 1
    assert result.mean_in_system == 1.0


def test_times_per_class_cohort_and_tenant_are_kept_apart() -> None:
    result = _run(
        Arrival(0, 1, 5, qos=QosClass.INTERACTIVE, tenant="a"),
        Arrival(0, 1, 9, cohort="long", tenant="b"),
    )
    assert set(result.cohorts) == {"interactive", "agent long"}
    assert result.cohorts["agent long"].output_tokens == 9
    assert set(result.tenants) == {"a", "b"}
    # the agent's prompt waits for the interactive one: 5 tokens in 5 steps against 9 in 10
    assert result.fairness == pytest.approx(1.9**2 / (2 * 1.81))


def test_goodput_counts_sessions_within_the_service_level_only() -> None:
    flags = replace(FOUR, limits=SchedulerLimits(lanes=1), slo_ttft_ms=5)
    result = _run(Arrival(0, 1, 4), Arrival(0, 1, 4), Arrival(0, 1, 4), flags=flags)
    assert result.all.good == 2
    assert result.all.good_tokens == 8


def test_a_full_queue_is_counted_as_refused() -> None:
    flags = replace(FOUR, limits=SchedulerLimits(lanes=1, queue_max=1))
    result = _run(*(Arrival(0, 1, 4) for _ in range(4)), flags=flags)
    assert (result.all.rejected, result.all.finished) == (2, 2)
    assert {each.rejected for each in result.sessions} == {None, "queue_full"}


def test_arrivals_out_of_order_are_a_fault_of_the_scenario() -> None:
    with pytest.raises(AssertionError, match="order"):
        _run(Arrival(5, 1, 1), Arrival(4, 1, 1))


def _arrival(at_ns: int, lengths: tuple[int, int], qos: QosClass, shared: int) -> Arrival:
    prompt, output = lengths
    return Arrival(at_ns, prompt, output, qos=qos, prefix=shared, prefix_tokens=shared * 20)


_MIXES = st.lists(
    st.builds(
        _arrival,
        st.integers(0, 200 * MS),
        st.tuples(st.integers(1, 120), st.integers(1, 60)),
        st.sampled_from(QosClass),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=12,
).map(lambda each: tuple(sorted(each, key=lambda arrival: arrival.at_ns)))


@settings(max_examples=40, deadline=None)
@given(_MIXES, st.integers(12, 40), st.sampled_from((8, 32, 512)))
def test_every_session_ends_with_all_its_tokens_and_the_same_way_twice(
    arrivals: tuple[Arrival, ...], blocks: int, step_tokens: int
) -> None:
    limits = SchedulerLimits(lanes=4, step_tokens=step_tokens)
    flags = Flags(limits=limits, pool=PoolShape(16, blocks, 1 << 16), cost="stream(10, 5)")
    first = run_case(Case("case", flags, arrivals))
    assert first.stranded == 0
    assert [each.output for each in first.sessions] == [each.output for each in arrivals]
    assert as_json(first, 4_096) == as_json(run_case(Case("case", flags, arrivals)), 4_096)


def test_the_timeline_says_what_each_step_was_made_of() -> None:
    result = _run(Arrival(0, 3, 2, name="a"), Arrival(MS, 2, 1, name="b"))
    first, second = result.steps
    assert (first.decoding, first.prompts, first.finished) == ((), (("a", 3),), [])
    assert (second.decoding, second.prompts, second.finished) == (("a",), (("b", 2),), ["a", "b"])
    assert first.used + first.free == FOUR.pool.blocks


class _Nobody:
    """Looks on and keeps nothing but the plans."""

    def __init__(self) -> None:
        self.plans: list[TickPlan] = []

    def on_plan(self, plan: TickPlan, scheduler: Scheduler) -> None:
        self.plans.append(plan)

    def on_step(self, step: Step, start_ns: int, end_ns: int) -> None:
        assert len(step)

    def on_effects(self, effects: Sequence[Effect], now_ns: int) -> None:
        pass


PARKING = Flags(
    limits=SchedulerLimits(lanes=1, step_tokens=64),
    rules=Rules(park=True, preempt_mode=PreemptMode.SWAP),
    pool=PoolShape(16, 64, 512, kv_bytes_per_token=1, host_copy_bytes_per_s=1e9),
)


def test_a_plan_that_only_gives_back_host_memory_is_run_without_a_step() -> None:
    watch = _Nobody()
    node = VirtualNode(PARKING, watch)
    slow = spec_of(Arrival(0, 40, 90, qos=QosClass.BACKGROUND), 1)
    chat = spec_of(Arrival(0, 40, 90, qos=QosClass.INTERACTIVE), 2)
    node.receive((Submit(slow),), 0)
    now_ns = 0
    while not any(plan.park_out for plan in watch.plans):
        assert node.proceed(now_ns)
        if len(watch.plans) == 3:
            node.receive((Submit(chat),), now_ns)
        now_ns = node.complete()
    node.receive((Cancel(slow.key), Cancel(chat.key)), now_ns)
    while node.proceed(now_ns):
        now_ns = node.complete()
    last = watch.plans[-1]
    assert last.park_drop
    assert not last.lanes
    stats = node.scheduler.stats()
    assert (stats.swapped_for_class, stats.park_bytes, stats.lanes_busy) == (1, 0, 0)


def test_parking_at_no_cost_is_refused_and_copies_take_their_time() -> None:
    free = set_flag(PARKING, "host-copy-bytes-per-s", "0")
    with pytest.raises(ConfigError, match="host-copy-bytes-per-s"):
        VirtualNode(free, _Nobody())

    def ended_ns(rate: str) -> int:
        flags = set_flag(set_flag(PARKING, "host-copy-bytes-per-s", rate), "cost", "unit")
        arrivals = (
            Arrival(0, 40, 60, qos=QosClass.BACKGROUND),
            Arrival(20 * MS, 40, 9, qos=QosClass.INTERACTIVE),
        )
        result = run_case(Case("parking", flags, arrivals))
        assert result.stats is not None
        assert result.stats.swapped_for_class == 1
        return result.ended_ns

    # at a byte a microsecond: three blocks out, and those two in again that the cache has not kept
    assert ended_ns("1000000") - ended_ns("1000000000000") >= (48 + 32) * 1_000 - 10
