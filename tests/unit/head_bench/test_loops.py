"""The bench's event loop: no full garbage collection amid what it measures, and everything as before when it ends."""

from __future__ import annotations

import gc

import pytest

from superfluid_core.collector import NEVER
from superfluid_head.bench.loops import run


async def thresholds() -> tuple[int, int]:
    return gc.get_threshold()[2], gc.get_freeze_count()


async def failing() -> None:
    raise LookupError


def test_full_collections_wait_while_it_runs() -> None:
    before = gc.get_threshold()
    never, frozen = run(thresholds())
    assert never == NEVER
    assert frozen > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_all_is_as_before_when_the_work_fails() -> None:
    before = gc.get_threshold()
    with pytest.raises(LookupError):
        run(failing())
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
