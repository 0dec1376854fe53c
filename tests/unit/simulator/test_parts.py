"""Draws, distributions, flags and sweeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluid_core.errors import ConfigError
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.rules import QueueOrder
from superfluid_core.session import QosClass
from superfluid_core.simulator.distribution import EXACT_MAX, Distribution
from superfluid_core.simulator.draws import Draws
from superfluid_core.simulator.flags import FLAG_TABLE, Flags, parse_setting, set_flags, shown
from superfluid_core.simulator.scenario import Arrival, Case
from superfluid_core.simulator.sweep import combine, parse_over


def test_draws_are_those_of_the_published_generator() -> None:
    draws = Draws(11)
    first = [draws.double() for _ in range(20_000)]
    assert sum(each < 0.20 for each in first) == 3_955
    assert sum(each < 0.36 for each in first) == 7_172
    assert sum(each < 0.44 for each in first) == 8_831
    assert all(0.0 <= each < 1.0 for each in first)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=200))
def test_few_values_give_exact_percentiles(values: list[int]) -> None:
    seen = Distribution()
    for value in values:
        seen.add(value)
    ranked = sorted(values)
    assert seen.percentile(50) == ranked[(len(values) + 1) // 2 - 1]
    assert seen.percentile(100) == seen.largest == ranked[-1]
    assert seen.smallest == ranked[0]
    assert seen.mean == sum(values) / len(values)


def test_many_values_are_within_one_percent_in_bounded_memory() -> None:
    seen = Distribution()
    draws = Draws(3)
    values = [round(draws.exponential(5e7)) for _ in range(4 * EXACT_MAX)]
    for value in values:
        seen.add(value)
    assert not seen.is_exact
    values.sort()
    for percent in (1, 50, 90, 99):
        exact = values[max(1, -(-len(values) * percent // 100)) - 1]
        assert seen.percentile(percent) == pytest.approx(exact, rel=0.01)
    assert seen.total == sum(values)
    assert len(seen._buckets) < 3_000


@given(st.lists(st.integers(0, 10**9), max_size=50), st.lists(st.integers(0, 10**9), max_size=50))
def test_merged_distributions_have_seen_both(left: list[int], right: list[int]) -> None:
    one, other, both = Distribution(), Distribution(), Distribution()
    for value in left:
        one.add(value)
        both.add(value)
    for value in right:
        other.add(value)
        both.add(value)
    one.merge(other)
    assert (one.count, one.total, one.largest) == (both.count, both.total, both.largest)
    assert one.percentile(90) == both.percentile(90)


def test_equal_values_may_be_added_at_once() -> None:
    seen = Distribution()
    seen.add(7, EXACT_MAX)
    seen.add(7, EXACT_MAX)
    assert (seen.count, seen.percentile(50), seen.is_exact) == (2 * EXACT_MAX, 7, False)


def test_every_limit_and_rule_can_be_set_by_the_name_of_its_flag() -> None:
    names = set(FLAG_TABLE)
    assert {"max-batch", "max-queue", "step-tokens", "prefill-budget", "starvation-ticks"} <= names
    assert {"queue-policy", "kv-reserve", "victim", "admit-after-preempt", "watermark"} <= names
    assert {"kv-blocks", "block-tokens", "max-context", "cost", "batching", "prefill-mode"} <= names


def test_flags_are_read_as_what_they_are() -> None:
    texts = ["max-batch=4", "queue-policy=fair", "admit-after-preempt=off", "kv-blocks=60"]
    texts += ["class-lanes=background=2+agent=3", "cost=stream(10, 50)"]
    flags = set_flags(Flags(), [parse_setting(each) for each in texts])
    assert flags.limits.lanes == 4
    assert flags.rules.queue_order is QueueOrder.FAIR
    assert flags.rules.admit_after_preempt is False
    assert flags.pool.blocks == 60
    assert flags.rules.class_lanes == {QosClass.BACKGROUND: 2, QosClass.AGENT: 3}
    values = shown(flags)
    assert values["max-batch"] == "4"
    assert values["admit-after-preempt"] == "off"
    assert values["class-lanes"] == "background=2+agent=3"
    assert "max-queue" not in values


@pytest.mark.parametrize(
    "text", ["max-batch", "none=1", "max-batch=x", "queue-policy=x", "admit-after-preempt=maybe"]
)
def test_a_flag_that_does_not_exist_or_parse_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        set_flags(Flags(), [parse_setting(text)])


def test_a_sweep_runs_every_combination() -> None:
    case = Case("base", Flags(), (Arrival(0, 1, 1),))
    over = parse_over(["step-tokens=128,256,512", "kv-blocks=60,180"])
    cases = combine([case], over)
    assert len(cases) == 6
    assert cases[0].label == "step-tokens=128 kv-blocks=60"
    assert cases[-1].flags.limits == SchedulerLimits(step_tokens=512)
    assert cases[-1].flags.pool.blocks == 180


def test_cases_that_differ_in_swept_flags_only_are_run_once() -> None:
    arrivals = (Arrival(0, 1, 1),)
    cases = [
        Case(name, Flags(limits=SchedulerLimits(step_tokens=tokens)), arrivals)
        for name, tokens in (("a", 64), ("b", 128))
    ]
    assert len(combine(cases, parse_over(["step-tokens=256,512"]))) == 2
    assert len(combine(cases, parse_over(["kv-blocks=60,180"]))) == 4


def test_a_sweep_has_a_bound() -> None:
    values = ",".join(str(each) for each in range(1, 41))
    with pytest.raises(ConfigError):
        parse_over([f"step-tokens={values}", f"kv-blocks={values}"])
