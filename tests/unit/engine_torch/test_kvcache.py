"""The pool's own measure of how fast KV moves to the host and back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from superfluid_core.clock import SECOND
from superfluid_core.engine.torch.kvcache import PROBE_BYTES, CopyCost, KvPool, KvShape, copy_cost


class StepClock:
    """Every look at it takes a fixed time."""

    def __init__(self, step_ns: int) -> None:
        self._now_ns, self._step_ns = 0, step_ns

    def now_ns(self) -> int:
        self._now_ns += self._step_ns
        return self._now_ns

    def spend(self, ns: int) -> None:
        self._now_ns += ns

    def boot_ns(self) -> int:
        return self.now_ns()

    def wall_s(self) -> int:
        return 0


@pytest.mark.parametrize(("blocks", "used"), [(3, 3), (100_000, PROBE_BYTES // 4096)])
def test_the_copy_cost_counts_both_ways_and_leaves_nothing_behind(blocks: int, used: int) -> None:
    shape = KvShape(2, blocks, 8, 4, 8, torch.float32)
    assert shape.block_bytes == 4096
    pool = KvPool(shape, torch.device("cpu"))
    cost = copy_cost(pool, StepClock(SECOND // 4))
    assert cost == CopyCost(2.0 * used * 4096 * 4, 0), "no time apart: all of it is the bytes'"
    assert pool.parked() == {}
    assert not pool.copy_of(range(min(blocks, used))).any()


def test_a_clock_that_stands_still_breaks_nothing() -> None:
    pool = KvPool(KvShape(1, 1, 1, 1, 8, torch.float32), torch.device("cpu"))
    assert copy_cost(pool, StepClock(0)).bytes_per_s > 0


class _LinePool(KvPool):
    """Moves of KV take 50 us each and 1 us a block on its clock."""

    def __init__(self, blocks: int) -> None:
        super().__init__(KvShape(2, blocks, 8, 4, 8, torch.float32), torch.device("cpu"))
        self.clock = StepClock(0)

    def park_out(self, ticket: int, blocks: Sequence[int]) -> None:
        super().park_out(ticket, blocks)
        self.clock.spend(50_000 + 1_000 * len(blocks))

    def park_in(self, ticket: int, blocks: Sequence[int]) -> None:
        super().park_in(ticket, blocks)
        self.clock.spend(50_000 + 1_000 * len(blocks))


def test_what_a_copy_takes_beside_its_bytes_is_told_apart_from_them() -> None:
    pool = _LinePool(200)
    cost = copy_cost(pool, pool.clock)
    assert cost.overhead_ns == 50_000
    assert cost.bytes_per_s == pytest.approx(4096 * 1e6)
