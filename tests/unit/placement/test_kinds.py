"""A fleet of two kinds of engines: within a kind noise is noise, and kinds are not taken for each other."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from superfluid_core.placement.estimate import RATE_NOISE, Curve, FleetRates
from superfluid_core.placement.kinds import comparable, kinds_of, speeds_of
from superfluid_core.placement.view import FleetView
from tests.unit.placement.test_typical import burst, measured

NOISE, STEP, FACTOR, LANES = 0.1, 0.1, 3.0, 16


def two_kinds(kit: Any, drawn: random.Random, fast: int) -> tuple[FleetView, list[str]]:
    """Fifty nodes in no order, and the names of those that are FACTOR times as fast."""
    view: FleetView = kit.view(*(kit.node(f"n{i}", LANES) for i in range(50)))
    chosen = {f"n{number}" for number in drawn.sample(range(50), fast)}
    for name, node in view.nodes.items():
        speed = FACTOR if name in chosen else 1.0
        rate = 20_000 * speed * drawn.uniform(1 - NOISE, 1 + NOISE)
        rates = measured(drawn, NOISE, STEP / speed)
        node.load = replace(node.load, prefill_rate=rate, decode_rates=rates)
    return view, sorted(chosen)


@pytest.mark.parametrize("fast", [25, 15, 40])
@pytest.mark.parametrize("seed", range(5))
def test_equals_get_equal_shares_and_the_faster_kind_more(kit: Any, seed: int, fast: int) -> None:
    # found by reading: only nodes near the one typical curve of the fleet were equal; of 25 and 25 the fast ones got two to eight
    drawn = random.Random(seed)
    view, chosen = two_kinds(kit, drawn, fast)
    shares = burst(kit, view, drawn, 60)
    of_fast = [shares[name] for name in chosen]
    of_slow = [shares[name] for name in view.nodes if name not in chosen]
    assert max(of_fast) - min(of_fast) <= 1
    assert max(of_slow) - min(of_slow) <= 1
    assert min(of_fast) > max(of_slow)


def test_kinds_lie_apart_however_near_their_edges_are() -> None:
    slow, fast = [0.8, 0.9, 1.0, 1.1, 1.2], [1.6, 1.8, 2.0, 2.2]
    found = kinds_of([*fast, *slow], RATE_NOISE)
    assert [sorted(kind) for kind in found] == [[4, 5, 6, 7, 8], [0, 1, 2, 3]]


def test_what_is_no_further_apart_than_noise_is_one_kind_and_an_outlier_is_none_of_it() -> None:
    assert kinds_of([1.2, 0.8, 1.0], RATE_NOISE) == [[1, 2, 0]]
    assert kinds_of([1.0, 1.1, 9.0], RATE_NOISE) == [[0, 1], [2]]
    assert kinds_of([], RATE_NOISE) == []


def test_a_batch_that_only_slow_engines_have_measured_is_no_slow_batch() -> None:
    fast, slow = [(1, 1.0), (2, 1.0)], [(2, 3.0), (4, 3.0), (8, 3.0)]
    speeds = speeds_of([fast, fast, slow, slow])
    # beside what it costs others a batch of four is no slower at the slow ones than one of two
    assert min(speeds[:2]) > RATE_NOISE * max(speeds[2:])
    assert kinds_of(speeds, RATE_NOISE) == [[2, 3], [0, 1]]


def test_engines_that_share_no_batch_with_most_are_not_compared() -> None:
    rows = [[(64, 1.0)], [(1, 1.0), (2, 1.0)], [(2, 1.0), (4, 1.0)], [(4, 1.0)], [(64, 1.0)]]
    assert comparable(rows) == [1, 2, 3]
    assert comparable([]) == []


def test_an_engine_without_its_like_keeps_what_it_measured() -> None:
    curves = [Curve(((1, rate),)) for rate in (10.0, 11.0, 100.0)]
    rates = FleetRates([10.0, 11.0, 100.0], curves)
    assert len(rates.typicals) == len(rates.typical_curves) == 1
    assert rates.rate(100.0) == 100.0
    assert rates.curve_for(curves[2]) is curves[2]
    assert rates.curve_for(curves[0]) is rates.curve_for(curves[1]) is rates.typical_curve


def test_kinds_stay_until_one_has_moved_or_their_number_is_another() -> None:
    def rates_of(*speeds: float) -> FleetRates:
        return FleetRates(speeds, [Curve(((1, speed),)) for speed in speeds])

    before = rates_of(10.0, 10.0, 10.0, 40.0, 40.0)
    same = rates_of(10.0, 10.0, 10.0, 41.0, 41.0)
    assert same.keep_typical(before, 0.1)
    assert same.typical_curves is before.typical_curves
    assert same.typicals is before.typicals
    assert not rates_of(10.0, 10.0, 10.0, 50.0, 50.0).keep_typical(before, 0.1)
    assert not rates_of(10.0, 10.0, 10.0, 10.0, 10.0).keep_typical(before, 0.1)


def test_engines_of_every_speed_are_no_kinds() -> None:
    spread = [1.2**place for place in range(12)]
    assert kinds_of(spread, RATE_NOISE) == [list(range(12))]
