"""Slots of what readers feel: right within a bucket, bounded in time, and alike however the slots fall."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from superfluid_core.clock import SECOND
from superfluid_head.vitals import (
    BOUNDS_MS,
    GROWTH,
    NODES_MAX,
    OTHERS,
    SLOT_S,
    SLOTS_MAX,
    Spread,
    Vitals,
)

CALM = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
START = 1_000 * SLOT_S * SECOND


def at(seconds: float) -> int:
    return START + int(seconds * SECOND)


@CALM
@given(st.lists(st.floats(0.2, 500_000), min_size=1, max_size=200), st.sampled_from([50, 95, 99]))
def test_a_quantile_is_within_a_bucket_of_the_true_one(values: list[float], percent: int) -> None:
    spread = Spread()
    for value in values:
        spread.add(value)
    rank = max(1, -(-len(values) * percent // 100))
    true = sorted(values)[rank - 1]
    found = spread.quantile_ms(percent)
    assert found is not None
    assert true / GROWTH - 1e-6 <= found <= true * GROWTH + 1e-6
    assert found <= max(values)


@CALM
@given(st.lists(st.floats(0.0, 1e7), max_size=40), st.integers(0, 40))
def test_merged_spreads_are_the_spread_of_all(values: list[float], cut: int) -> None:
    whole, one, other = Spread(), Spread(), Spread()
    for place, value in enumerate(values):
        whole.add(value)
        (one if place < cut else other).add(value)
    one.merge(other)
    assert one == whole


def test_nothing_measured_has_no_quantiles() -> None:
    assert Spread().shown() == {"count": 0, "p50": None, "p95": None, "p99": None}
    assert Vitals().points(at(0), 1_700_000_000) == []
    assert Vitals().summary(at(0))["tokens_per_s"] == 0


def test_what_lasts_longer_than_every_bucket_is_shown_as_it_was() -> None:
    spread = Spread()
    spread.add(BOUNDS_MS[-1] * 3)
    assert spread.shown()["p99"] == pytest.approx(BOUNDS_MS[-1] * 3, rel=0.01)


def test_a_point_tells_of_its_own_slot_and_when_that_began() -> None:
    vitals = Vitals()
    vitals.first_token(at(1), 0.2)
    vitals.tokens(at(1), "a", 30)
    vitals.next_token(at(2), 0.04)
    vitals.tokens(at(2), "b", 20)
    vitals.moved(at(2))
    vitals.tokens(at(6), "a", 8)
    first, second = vitals.points(at(7), 1_700_000_007)
    assert (first["at"], second["at"]) == (1_700_000_000, 1_700_000_005)
    assert second["slot"] == first["slot"] + 1
    assert (first["tokens_per_s"], first["moves"]) == (10.0, 1)
    assert (first["ttft_ms"]["count"], first["itl_ms"]["count"]) == (1, 1)
    assert 200 / GROWTH <= first["ttft_ms"]["p50"] <= 200
    assert second["tokens_per_s"] == 4.0, "two seconds of it have passed"
    assert second["ttft_ms"]["p50"] is None


def test_rates_are_those_of_the_last_seconds_by_node() -> None:
    vitals = Vitals()
    vitals.tokens(at(0), "old", 1_000)
    for second in range(10, 18):
        vitals.tokens(at(second), "a", 20)
    assert vitals.rates(at(18)) == {"a": 20.0}
    assert vitals.summary(at(18))["tokens_per_s"] == 20.0
    assert vitals.rates(at(60)) == {}


def test_slots_are_bounded_and_old_ones_are_told_no_more() -> None:
    vitals, draw = Vitals(), random.Random(1)
    for slot in range(3 * SLOTS_MAX):
        vitals.tokens(at(slot * SLOT_S), f"n{slot % 7}", draw.randrange(9))
    now = at(3 * SLOTS_MAX * SLOT_S - 1)
    points = vitals.points(now, 1_700_000_000)
    assert [point["slot"] for point in points] == list(
        range(points[0]["slot"], points[0]["slot"] + SLOTS_MAX)
    )
    assert len(vitals.points(now, 1_700_000_000, 2)) == 2
    assert vitals.points(at(9_000_000), 1_700_000_000) == []


def test_nodes_beyond_the_bound_are_counted_together() -> None:
    vitals = Vitals()
    for number in range(NODES_MAX + 5):
        vitals.tokens(at(0), f"n{number}", 1)
    vitals.tokens(at(0), None, 1)
    rates = vitals.rates(at(1))
    assert len(rates) == NODES_MAX + 1
    assert rates[OTHERS] == 1.0, "six tokens in six seconds"
