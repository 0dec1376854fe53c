"""Attention of the compiled CPU path: decoding lanes and short chunks read their blocks where they lie, long chunks go to torch.

A row of the compiled kernel is one token with its own context, so decode and chunked prefill are the same call, nothing is gathered and
nothing is padded. A chunk of many tokens is better off with torch's fused kernel, which multiplies matrices; that part is
PaddedAttention's. `run_qkv` also norms, turns and stores, all in one pass over the fused projection.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from superfluid_core.engine.torch.attention.base import AttentionShape
from superfluid_core.engine.torch.attention.padded import PaddedAttention
from superfluid_core.engine.torch.batch import Batch
from superfluid_core.engine.torch.kvcache import KvPool
from superfluid_core.engine.torch.native.ops import NativeOps
from superfluid_core.engine.torch.native.structs import Attend, Heads, Turn, address

CHUNK_ROWS_MAX = 16


def short_spans(batch: Batch) -> list[tuple[int, int]]:
    """Find the runs of tokens (first, end) that belong to decoding lanes and short chunks."""
    spans: list[tuple[int, int]] = []
    for row, length in enumerate(batch.lengths):
        if row >= batch.decodes and length > CHUNK_ROWS_MAX:
            continue
        first, end = batch.starts[row], batch.starts[row + 1]
        if spans and spans[-1][1] == first:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((first, end))
    return spans


class CpuAttention(PaddedAttention):
    """Implements AttentionBackend and FusedAttention over a pool in the dtype of the activations."""

    def __init__(
        self, pool: KvPool, shape: AttentionShape, ops: NativeOps, norm_eps: float
    ) -> None:
        super().__init__(pool, shape)
        self._ops = ops
        self._is_float = pool.shape.dtype is torch.float32
        self._heads = Heads(
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            pool.shape.block_tokens,
            shape.sliding_window or 0,
            norm_eps,
        )
        self._places = [
            (keys.data_ptr(), values.data_ptr())
            for keys, values in zip(pool.keys, pool.values, strict=True)
        ]
        self._spans: Sequence[tuple[int, int]] = ()
        self._lane_of = self._blocks = torch.empty(0, dtype=torch.int32)

    def plan(self, batch: Batch) -> None:
        self._batch = batch
        self._spans = short_spans(batch)
        self._lane_of = torch.arange(len(batch.lengths), dtype=torch.int32)
        if batch.tokens != len(batch.lengths):
            self._lane_of = self._lane_of.repeat_interleave(torch.tensor(batch.lengths))
        self._blocks = batch.tables.to(torch.int32).contiguous()
        self._chunks = [
            self._plan_chunk(batch, row)
            for row in range(batch.decodes, len(batch.lengths))
            if batch.lengths[row] > CHUNK_ROWS_MAX
        ]

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        assert self._batch is not None
        self._pool.write(layer, self._batch.slots, keys, values)
        return self._attend(layer, torch.cat((queries, keys, values), dim=1))

    def run_qkv(
        self,
        layer: int,
        qkv: Tensor,
        turn: tuple[Tensor, Tensor],
        norm: Tensor | None = None,
    ) -> Tensor:
        """See FusedAttention; `norm` [heads + kv_heads, head_dim] is applied before turning. Overwrites `qkv`."""
        batch = self._batch
        assert batch is not None
        keys, values = self._places[layer]
        wanted = Turn(
            qkv.data_ptr(),
            address(norm),
            turn[0].data_ptr(),
            turn[1].data_ptr(),
            batch.slots.data_ptr(),
            keys,
            values,
            qkv.shape[0],
            self._ops.threads,
        )
        self._ops.turn(self._is_float, wanted, self._heads)
        return self._attend(layer, qkv)

    def _attend(self, layer: int, qkv: Tensor) -> Tensor:
        batch, shape = self._batch, self._shape
        assert batch is not None
        width = shape.heads * shape.head_dim
        out = qkv.new_empty((qkv.shape[0], width))
        size = qkv.element_size()
        row_bytes = (shape.heads + 2 * shape.kv_heads) * shape.head_dim * size
        for first, end in self._spans:
            wanted = Attend(
                qkv.data_ptr() + first * row_bytes,
                out.data_ptr() + first * width * size,
                *self._places[layer],
                self._blocks.data_ptr(),
                self._lane_of.data_ptr() + 4 * first,
                batch.positions.data_ptr() + 8 * first,
                end - first,
                self._blocks.shape[1],
                self._ops.threads,
                0,
            )
            self._ops.attend(self._is_float, wanted, self._heads)
        if self._chunks:
            both = shape.heads + shape.kv_heads
            queries, keys, values = qkv[:, : shape.heads], qkv[:, shape.heads : both], qkv[:, both:]
            for chunk in self._chunks:
                mine = queries[chunk.tokens].contiguous()
                out[chunk.tokens] = self._attend_rows(layer, chunk, mine, keys, values)
        return out
