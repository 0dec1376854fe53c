"""Every attention backend against the reference, over ragged mixed steps; layout of a batch; the pool's own moves."""

from __future__ import annotations

import pytest
import torch

from superfluid_core.engine.compose import StepRow
from superfluid_core.engine.torch.attention.base import AttentionShape
from superfluid_core.engine.torch.attention.reference import ReferenceAttention
from superfluid_core.engine.torch.attention.registry import (
    BACKENDS,
    make_attention,
    register,
)
from superfluid_core.engine.torch.batch import BlockTables, compose_batch
from superfluid_core.engine.torch.kvcache import KvPool, KvShape
from superfluid_core.scheduler.plan import LanePlan

CPU = torch.device("cpu")
BLOCK = 4
# these need a device, or an interpreter: tests/unit/engine_cuda
KERNELS = {"flashinfer", "triton", "varlen"}


def lane(number: int, computed: int, count: int, blocks: tuple[int, ...]) -> LanePlan:
    return LanePlan(number, count == 1, computed, (7,) * count, 1, 0, blocks)


# contexts that fall into several groups, chunks with and without a past, consecutive and scattered blocks
STEPS = {
    "one decoding lane, consecutive blocks": [lane(0, 9, 1, (4, 5, 6))],
    "one decoding lane, scattered blocks": [lane(0, 9, 1, (4, 9, 2))],
    "decoding lanes of like context": [
        lane(n, 20 + n, 1, tuple(range(n * 7, n * 7 + 7))) for n in range(3)
    ],
    "decoding lanes of unlike context": [
        lane(3, 2, 1, (60,)),
        lane(1, 150, 1, tuple(range(38))),
        lane(0, 5, 1, (50, 49)),
    ],
    "first chunks": [lane(0, 0, 5, (3, 1)), lane(2, 0, 11, (7, 8, 9))],
    "everything": [
        lane(2, 30, 1, tuple(range(20, 28))),
        lane(0, 3, 1, (33,)),
        lane(1, 6, 7, (1, 40, 3, 12)),
        lane(3, 0, 9, (50, 51, 52)),
    ],
}


def rows_of(lanes: list[LanePlan]) -> list[StepRow]:
    return [StepRow(p.lane, p.computed, p.inputs, True, 0, p.decoding) for p in lanes]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", sorted(set(BACKENDS) - {"reference"} - KERNELS))
def test_a_backend_agrees_with_the_reference(
    name: str, step: str, dtype: torch.dtype, window: int | None
) -> None:
    torch.manual_seed(len(step))
    shape = AttentionShape(heads=6, kv_heads=2, head_dim=16, sliding_window=window)
    sizes = KvShape(2, 64, BLOCK, shape.kv_heads, shape.head_dim, dtype)
    pools = [KvPool(sizes, CPU), KvPool(sizes, CPU)]
    for layer in (0, 1):
        pools[0].keys[layer].normal_()
        pools[0].values[layer].normal_()
        pools[1].keys[layer].copy_(pools[0].keys[layer])
        pools[1].values[layer].copy_(pools[0].values[layer])
    batch = compose_batch(rows_of(STEPS[step]), BlockTables(STEPS[step], BLOCK), CPU)
    queries = torch.randn(batch.tokens, 6, 16).to(dtype)
    keys, values = (torch.randn(batch.tokens, 2, 16).to(dtype) for _ in range(2))
    backend, reference = make_attention(name, pools[0], shape), ReferenceAttention(pools[1], shape)
    backend.plan(batch)
    reference.plan(batch)
    for layer in (0, 1):
        found = backend.run(layer, queries, keys, values)
        expected = reference.run(layer, queries, keys, values)
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(pools[0].keys[layer], pools[1].keys[layer])
        assert torch.equal(pools[0].values[layer], pools[1].values[layer])


def test_a_registered_backend_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("superfluid_core.engine.torch.attention.registry.BACKENDS", {})
    register("mine", ReferenceAttention)
    pool = KvPool(KvShape(1, 2, BLOCK, 1, 8, torch.float32), CPU)
    assert isinstance(make_attention("mine", pool, AttentionShape(1, 1, 8)), ReferenceAttention)


def test_a_batch_lays_tokens_out_without_padding() -> None:
    lanes = [lane(5, 9, 1, (8, 3, 6)), lane(1, 2, 4, (1, 7)), lane(4, 0, 3, (2,))]
    batch = compose_batch(rows_of(lanes), BlockTables(lanes, BLOCK), CPU)
    assert batch.tokens == 8
    assert batch.positions.tolist() == [9, 2, 3, 4, 5, 0, 1, 2]
    assert batch.slots.tolist() == [6 * 4 + 1, 6, 7, 28, 29, 8, 9, 10]
    assert batch.sampled.tolist() == [0, 4, 7]
    assert (batch.decodes, batch.lengths, batch.starts) == (1, (1, 4, 3), (0, 1, 5, 8))
    assert batch.contexts == (10, 6, 3)
    # block 7 and block 2 are opened and left partly filled; block 6 was open before
    assert batch.fresh == (7, 2)
    assert batch.tables.tolist() == [[8, 3, 6], [1, 7, 1], [2, 2, 2]]


def test_a_decoding_lane_that_enters_a_block_opens_it() -> None:
    for position, fresh in ((7, ()), (8, (6,)), (9, ()), (11, ())):
        lanes = [lane(0, position, 1, (8, 3, 6))]
        assert compose_batch(rows_of(lanes), BlockTables(lanes, BLOCK), CPU).fresh == fresh


def test_the_pool_copies_parks_and_clears_whole_blocks() -> None:
    pool = KvPool(KvShape(2, 6, BLOCK, 2, 8, torch.bfloat16), CPU)
    assert float(pool._slab.abs().sum()) == 0.0
    pool._slab.normal_()
    before = pool._slab.clone()
    pool.copy([0, 1], [1, 2])
    assert torch.equal(pool._slab[:, :, [1, 2]], before[:, :, [0, 1]])
    pool.park_out(5, [3, 0])
    pool.clear([3, 0])
    assert float(pool._slab[:, :, [3, 0]].abs().sum()) == 0.0
    pool.park_in(5, [4])
    assert torch.equal(pool._slab[:, :, 4], before[:, :, 3])
    assert torch.equal(pool._slab[:, :, 5], before[:, :, 5])
    assert pool.parked() == {}
    assert pool.shape.block_bytes * 6 == pool._slab.numel() * 2
