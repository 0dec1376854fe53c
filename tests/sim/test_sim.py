"""Head and nodes under faults: ten simulated hours without a broken promise, and every planted bug found again.

The long version is `make soak`, or `make soak SIM=ci` for 100 hours; `python -m tests.sim.hunt` renews the killing seeds.
"""

from __future__ import annotations

import pytest

from tests.sim.planted import PLANTED, Planted, try_seed
from tests.sim.scenario import run_seed
from tests.sim.soak import Tally

HOURS = 10
SEEDS_PER_HOUR = 1_000
SEEDS_MAX = 60
TALLY = Tally()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("hour", range(HOURS))
def test_an_hour_of_faults_breaks_no_promise(hour: int) -> None:
    first = seed = hour * SEEDS_PER_HOUR
    simulated_s, broken = 0.0, []
    while simulated_s < 3_600 and seed < first + SEEDS_PER_HOUR:
        outcome = run_seed(seed)
        TALLY.add(outcome)
        if outcome.violation:
            broken.append(f"seed {seed}: {outcome.violation}")
        simulated_s += outcome.simulated_s
        seed += 1
    assert not broken


def test_every_kind_of_fault_has_shown_an_effect() -> None:
    for seed in range(TALLY.seeds, SEEDS_MAX):
        if not TALLY.effectless():
            break
        TALLY.add(run_seed(seed))
    assert TALLY.effectless() == []


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_bug_is_found(planted: Planted) -> None:
    assert try_seed(planted, planted.killer).violation


def test_a_failing_seed_fails_again_at_the_same_moment_in_the_same_way() -> None:
    planted = next(each for each in PLANTED if each.name == "no fence")
    first, second = try_seed(planted, planted.killer), try_seed(planted, planted.killer)
    assert first.violation
    assert (first.violation, first.simulated_s, first.trace, first.counts) == (
        second.violation, second.simulated_s, second.trace, second.counts,
    )  # fmt: skip
