"""Rates, steps and learned lengths."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from superfluid_core.placement.estimate import (
    LEARNED_START,
    SLOPE_FLOOR,
    Curve,
    FleetRates,
    OutputLengths,
    estimate,
    step_seconds,
    usable,
)
from superfluid_core.placement.view import Load

RATES = ((1, 50.0), (8, 200.0), (16, 320.0))


def test_a_step_is_interpolated_between_measured_batches() -> None:
    assert step_seconds(RATES, 1) == pytest.approx(0.02)
    assert step_seconds(RATES, 8) == pytest.approx(0.04)
    assert step_seconds(RATES, 16) == pytest.approx(0.05)
    assert step_seconds(RATES, 12) == pytest.approx(0.045)
    assert step_seconds(RATES, 32) > step_seconds(RATES, 16)


@given(
    st.lists(st.tuples(st.integers(0, 64), st.floats(0.0, 5_000.0)), max_size=6),
    st.integers(1, 100),
)
def test_a_step_grows_and_each_lane_costs_more_whatever_was_measured(
    rates: list[tuple[int, float]], lanes: int
) -> None:
    assume(usable(tuple(rates)))
    curve = Curve(tuple(rates))
    steps = [curve.step(n) for n in (lanes, lanes + 1, lanes + 2)]
    assert 0.0 < steps[0] < steps[1] < steps[2]
    costs = [curve.decoding(n, 128)[1] for n in (lanes - 1, lanes, lanes + 1)]
    assert 0.0 <= costs[0] < costs[1] < costs[2]


def test_noise_makes_no_lane_free() -> None:
    flat, falling = Curve(((1, 10.0), (8, 80.0))), Curve(((2, 20.0), (4, 40.0), (6, 70.0)))
    for curve in (flat, falling):
        costs = [curve.decoding(running, 8)[1] for running in range(9)]
        least = 2 * SLOPE_FLOOR * curve.step(1)
        assert costs[0] == pytest.approx(0.0)
        assert all(then - now > 0.9 * least for now, then in pairwise(costs))


def test_waiting_for_a_lane_costs(kit: Any) -> None:
    free, full = kit.node("a", lanes=4), kit.node("b", lanes=4)
    full.load = Load(4, 2, 0, 0, 100_000, 4_000.0, full.load.decode_rates)
    rates = FleetRates.of([free, full])
    request = kit.request()
    assert estimate(free, free.offers["m"], request, rates).lane_wait == 0.0
    assert estimate(full, full.offers["m"], request, rates).lane_wait > 0.5


def test_without_any_rates_the_emptier_node_still_wins(kit: Any) -> None:
    a, b = kit.node("a"), kit.node("b")
    a.load, b.load = Load(lanes_busy=3), Load(lanes_busy=1)
    rates = FleetRates.of([a, b])
    request = kit.request()
    assert (
        estimate(a, a.offers["m"], request, rates).seconds
        > estimate(b, b.offers["m"], request, rates).seconds
    )


def test_lengths_are_learned_per_model_and_tenant_and_capped_by_the_request() -> None:
    lengths = OutputLengths()
    assert lengths.expect("m", "t", 10_000) == LEARNED_START
    for _ in range(50):
        lengths.learn("m", "t", 40)
    assert lengths.expect("m", "t", 10_000) == 40
    assert lengths.expect("m", "t", 8) == 8
    assert lengths.expect("m", "other", 10_000) == LEARNED_START


def test_learned_lengths_are_bounded_in_number() -> None:
    lengths = OutputLengths(keys_max=4)
    for n in range(10):
        lengths.learn("m", f"t{n}", 7)
    assert lengths.expect("m", "t9", 100) == 7
    assert lengths.expect("m", "t0", 100) == 100
