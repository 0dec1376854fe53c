"""The same fleet, driven by hypothesis: it chooses requests, faults and how much time passes, and makes what breaks small.

`SUPERFLUID_SIM_EXAMPLES` sets how many examples (300 by default, 3,000 in `make soak`, 20,000 for a night).
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.sim.planted import PLANTED, growing
from tests.sim.scenario import Run, staged
from tests.sim.shape import ALL_KINDS
from tests.sim.world import ViolationError

LONGEST_S = 5.0
LONG = ("terminate", "goaway race", "half frame", "raw flip")
KINDS = tuple(kind for kind in ALL_KINDS if kind not in LONG)
"""What is over soon: an example is as long as its longest fault."""
EXAMPLES = int(os.environ.get("SUPERFLUID_SIM_EXAMPLES", "300"))
STEPS = 60


class FleetMachine(RuleBasedStateMachine):
    """One virtual fleet. Every promise is watched by the same taps as in a seed's run."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        self.run: Run | None = None
        self.is_broken = False
        self.faults = 0

    def _do(self, action: Any, *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except ViolationError:
            self.is_broken = True
            raise

    @initialize(seed=st.integers(0, 63))
    def start(self, seed: int) -> None:
        self.run = self._stack.enter_context(staged(seed, KINDS))
        self.run.faults.longest_s = LONGEST_S
        self._do(self.run.begin)

    @rule(ms=st.sampled_from((1, 20, 150, 400, 1_100, 3_300)))
    def time_passes(self, ms: int) -> None:
        assert self.run is not None
        self._do(self.run.advance, ms / 1e3)

    @rule(count=st.integers(1, 4), head=st.integers(0, 1))
    def clients_come(self, count: int, head: int) -> None:
        assert self.run is not None
        heads = [each for each in self.run.scene.heads if each.is_up and each.fleet is not None]
        if heads:
            self._do(self.run.faults.crowd, heads[head % len(heads)], count)

    @precondition(lambda self: self.faults < 4)
    @rule(kind=st.sampled_from(KINDS))
    def something_breaks(self, kind: str) -> None:
        assert self.run is not None
        self.faults += self._do(self.run.faults.strike, kind)

    def teardown(self) -> None:
        with self._stack:
            if self.run is not None and not self.is_broken:
                self.run.end()


def drive(examples: int, *phases: Phase) -> None:
    """Let hypothesis try that many sequences; the same ones every time."""
    logging.disable(logging.CRITICAL)
    try:
        run_state_machine_as_test(
            FleetMachine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=STEPS,
                phases=phases,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_sequence_of_requests_and_faults_breaks_a_promise() -> None:
    drive(EXAMPLES, Phase.generate, Phase.shrink)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["a slot is kept", "the journal does not travel"])
def test_a_planted_bug_is_found_by_the_machine_too(name: str) -> None:
    planted = next(each for each in PLANTED if each.name == name)
    with growing(planted), pytest.raises(ViolationError):
        drive(60, Phase.generate)
