"""Head and nodes under faults: some simulated hours without a broken promise, and every planted bug found again."""

from __future__ import annotations

import pytest

from tests.sim.planted import PLANTED, Planted, try_seed
from tests.sim.scenario import run_seed
from tests.sim.soak import Tally

PARTS = 2
SEEDS_PER_PART = 18
SEEDS_MAX = 60
TALLY = Tally()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("part", range(PARTS))
def test_an_hour_of_faults_breaks_no_promise(part: int) -> None:
    first = part * SEEDS_PER_PART
    broken = []
    for seed in range(first, first + SEEDS_PER_PART):
        outcome = run_seed(seed)
        TALLY.add(outcome)
        if outcome.violation:
            broken.append(f"seed {seed}: {outcome.violation}")
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
