"""Equal nodes measure unequal steps: they are taken as equal all the same, and those that are not equal are not.

Seen with `superfluid bench scenario fifty`: of 200 chats at once over 50 equal nodes some got six and others two, because each node had
measured other batches a little apart, and where its steps seemed to grow shorter another session seemed to cost nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from superfluid_core.placement.estimate import SAMPLE_MAX, Curve, FleetRates
from superfluid_core.placement.policies import Choice, Policy, choose
from superfluid_core.placement.reserve import Placed, place
from superfluid_core.placement.view import FleetView, PlacementLimits

LIMITS = PlacementLimits()
NODES = 50


def measured(
    drawn: random.Random, noise: float, step: float = 0.1
) -> tuple[tuple[int, float], ...]:
    """What an engine of a fixed step has measured of a few batches."""
    sizes = sorted(drawn.sample(range(1, 9), drawn.randint(1, 6)))
    return tuple((n, n / (step * drawn.uniform(1 - noise, 1 + noise))) for n in sizes)


def noisy_fleet(kit: Any, drawn: random.Random, noise: float = 0.2) -> FleetView:
    """Equal nodes; two of ten have measured nothing yet."""
    view: FleetView = kit.view(*(kit.node(f"n{i}") for i in range(NODES)))
    for number, node in enumerate(view.nodes.values()):
        if number % 5:
            rate = 20_000 * drawn.uniform(1 - noise, 1 + noise)
            rates = measured(drawn, noise)
            node.load = replace(node.load, prefill_rate=rate, decode_rates=rates)
        else:
            node.load = replace(node.load, prefill_rate=0.0, decode_rates=())
    return view


def burst(kit: Any, view: FleetView, drawn: random.Random, output: int) -> Counter[str]:
    """Place four a node without a report in between."""
    shares: Counter[str] = Counter()
    for _ in range(4 * len(view.nodes)):
        request = replace(kit.request(drawn.randint(60, 80)), expected_output=output)
        placed = place(view, request, Policy.LOAD_AWARE, LIMITS, draw=drawn.random(), now_ns=0)
        assert isinstance(placed, Placed)
        shares[placed.choice.node] += 1
    return shares


@pytest.mark.parametrize("output", [8, 60])
@pytest.mark.parametrize("seed", range(5))
def test_two_hundred_at_once_are_four_for_each_of_fifty_nodes(
    kit: Any, seed: int, output: int
) -> None:
    drawn = random.Random(seed)
    shares = burst(kit, noisy_fleet(kit, drawn), drawn, output)
    assert shares == dict.fromkeys((f"n{i}" for i in range(NODES)), 4)


def test_a_step_that_stalled_once_does_not_make_a_node_slow(kit: Any) -> None:
    drawn = random.Random(1)
    view = noisy_fleet(kit, drawn, 0.05)
    node = view.nodes["n7"]
    rates = ((1, 1 / 0.1), (2, 2 / 0.9), (3, 3 / 0.1), (4, 4 / 0.1))
    node.load = replace(node.load, decode_rates=rates)
    assert burst(kit, view, drawn, 60)["n7"] == 4


@pytest.mark.parametrize(("step", "expected"), [(0.05, range(5, 9)), (0.3, range(1, 4))])
def test_a_node_that_decodes_at_another_speed_gets_another_share(
    kit: Any, step: float, expected: range
) -> None:
    drawn = random.Random(2)
    view = noisy_fleet(kit, drawn)
    node = view.nodes["n7"]
    rates = tuple((n, n / step) for n in (1, 2, 4, 8))
    node.load = replace(node.load, decode_rates=rates)
    assert burst(kit, view, drawn, 60)["n7"] in expected


def test_a_node_that_is_slow_in_large_batches_only_is_not_typical() -> None:
    typical = Curve(tuple((n, n / 0.1) for n in (1, 2, 4, 8)))
    steps = zip((1, 2, 4, 8), (0.1, 0.11, 0.2, 0.3), strict=True)
    own = Curve(tuple((n, n / seconds) for n, seconds in steps))
    assert not own.is_near(typical)
    assert typical.is_near(typical)


def test_what_is_typical_stays_until_it_has_moved(kit: Any) -> None:
    view = kit.view(*(kit.node(f"n{i}") for i in range(8)))

    def slowed(by: float) -> FleetRates:
        for node in view.nodes.values():
            rates = tuple((n, rate / by) for n, rate in node.load.decode_rates)
            node.load = replace(node.load, decode_rates=rates)
        choice = choose(view, kit.request(), Policy.LOAD_AWARE, LIMITS, draw=0.0, now_ns=0)
        assert isinstance(choice, Choice)
        found: FleetRates = view.ranking.models["m"].rates
        return found

    first, nearly, other = slowed(1.0), slowed(1.05), slowed(1.1)
    assert nearly is not first
    assert nearly.typical_curve is first.typical_curve
    assert other.typical_curve is not first.typical_curve
    assert other.typical_curve.step(4) == pytest.approx(1.05 * 1.1 * first.typical_curve.step(4))


def test_of_a_large_fleet_a_sample_is_looked_at() -> None:
    curves = [Curve(((1, 10.0),)) for _ in range(40 * SAMPLE_MAX + 1)]
    FleetRates([10.0], curves)
    looked_at = [curve for curve in curves if curve._known]
    assert SAMPLE_MAX // 2 <= len(looked_at) <= SAMPLE_MAX
