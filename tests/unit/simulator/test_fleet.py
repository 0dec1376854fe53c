"""A simulated fleet: everyone ends, policies differ, memory and reservations return to nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from superfluid_core.placement.policies import Policy
from superfluid_core.simulator.fleet import FleetPlan, _Fleet, arrivals, run_fleet, run_policies
from superfluid_core.simulator.fleet_report import FleetResult

SMALL = FleetPlan(nodes=3, sessions=150, prompt=120, output=20)


def test_every_session_ends_and_nothing_is_held_afterwards() -> None:
    ended: list[int] = []
    fleet = _Fleet(SMALL, lambda: ended.append(1))
    result = fleet.run()
    assert result.finished == result.arrived == len(ended) == 150
    for node in fleet._nodes:
        assert not node.watch.live
        assert node.view.held.sessions == node.view.held.unreported_sessions == 0
        assert node.view.held.unreported_tokens == 0


def test_the_same_seed_gives_the_same_fleet() -> None:
    assert run_fleet(SMALL).as_json() == run_fleet(SMALL).as_json()
    assert run_fleet(SMALL).as_json() != run_fleet(replace(SMALL, seed=2)).as_json()


def test_lengths_have_the_means_that_were_asked_for() -> None:
    drawn = list(arrivals(replace(SMALL, sessions=20_000, prompt=300, output=60), 1_000.0))
    assert sum(each.prompt for each in drawn) / 20_000 == pytest.approx(300, rel=0.03)
    assert sum(each.output for each in drawn) / 20_000 == pytest.approx(60, rel=0.03)
    assert drawn[-1].at_ns == pytest.approx(20e9, rel=0.05)


def test_an_overloaded_fleet_lets_them_wait_in_the_head() -> None:
    result = run_fleet(replace(SMALL, load=4.0, sessions=300))
    assert result.waited > 0
    assert result.finished == 300


@pytest.mark.slow
def test_all_policies_see_the_same_sessions_and_load_aware_is_no_worse() -> None:
    results = {each.policy: each for each in run_policies(replace(SMALL, sessions=600, load=0.9))}
    assert set(results) == {str(policy) for policy in Policy}
    assert {each.finished for each in results.values()} == {600}
    lines = FleetResult.table(list(results.values()))
    assert sum(line.startswith("load-aware ") for line in lines) == 5
