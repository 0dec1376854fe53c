"""S1, S2, S9, S10, one terminal event, balanced accounts and liveness over random schedules."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.unit.scheduler.machine import SchedulerMachine

TestRandomSchedules = pytest.mark.slow(SchedulerMachine.TestCase)
SchedulerMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
