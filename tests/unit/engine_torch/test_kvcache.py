"""The pool's own measure of how fast KV moves to the host and back."""

from __future__ import annotations

import pytest
import torch

from superfluid_core.clock import SECOND
from superfluid_core.engine.torch.kvcache import PROBE_BYTES, KvPool, KvShape, copy_rate


class StepClock:
    """Every look at it takes a fixed time."""

    def __init__(self, step_ns: int) -> None:
        self._now_ns, self._step_ns = 0, step_ns

    def now_ns(self) -> int:
        self._now_ns += self._step_ns
        return self._now_ns

    def boot_ns(self) -> int:
        return self.now_ns()

    def wall_s(self) -> int:
        return 0


@pytest.mark.parametrize(("blocks", "used"), [(3, 3), (100_000, PROBE_BYTES // 4096)])
def test_the_copy_rate_counts_both_ways_and_leaves_nothing_behind(blocks: int, used: int) -> None:
    shape = KvShape(2, blocks, 8, 4, 8, torch.float32)
    assert shape.block_bytes == 4096
    pool = KvPool(shape, torch.device("cpu"))
    rate = copy_rate(pool, StepClock(SECOND // 4))
    assert rate == 2 * used * 4096 * 4
    assert pool.parked() == {}
    assert not pool.copy_of(range(min(blocks, used))).any()


def test_a_clock_that_stands_still_breaks_nothing() -> None:
    pool = KvPool(KvShape(1, 1, 1, 1, 8, torch.float32), torch.device("cpu"))
    assert copy_rate(pool, StepClock(0)) > 0
