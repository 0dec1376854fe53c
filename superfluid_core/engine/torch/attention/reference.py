"""The plainest attention there is: one lane at a time, scores written out.

Every other backend is compared with it. It gathers a lane's keys and values up to its context and nothing beyond,
computes softmax(q k / sqrt(d)) v in float32 and rounds once. Slow, and right on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from superfluid_core.engine.torch.attention.base import AttentionShape, DecodeState
from superfluid_core.engine.torch.batch import Batch
from superfluid_core.engine.torch.kvcache import KvPool


class ReferenceAttention:
    """Lane by lane, in float32."""

    def __init__(self, pool: KvPool, shape: AttentionShape) -> None:
        self._pool = pool
        self._shape = shape
        self._batch: Batch | None = None
        self._state: DecodeState | None = None

    def plan(self, batch: Batch) -> None:
        self._batch, self._state = batch, None

    def plan_decode(self, state: DecodeState) -> None:
        self._state = state

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self._state is not None:
            return self._run_decode(self._state, layer, queries, keys, values)
        batch = self._batch
        assert batch is not None
        self._pool.write(layer, batch.slots, keys, values)
        out = torch.empty_like(queries)
        for row, context in enumerate(batch.contexts):
            mine = slice(batch.starts[row], batch.starts[row + 1])
            blocks = torch.tensor(batch.blocks[row], device=queries.device)
            past_keys, past_values = self._pool.gather(layer, blocks)
            out[mine] = self._attend(queries[mine], past_keys[:context], past_values[:context])
        return out.flatten(1)

    def _run_decode(
        self, state: DecodeState, layer: int, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """All rows at once over whole tables: nothing is asked of the host, and no shape depends on a context."""
        shape = self._shape
        self._pool.write(layer, state.slots, keys, values)
        rows = state.tables.shape[0]
        past = [
            part.view(rows, -1, shape.kv_heads, shape.head_dim).float()
            for part in self._pool.gather(layer, state.tables.flatten())
        ]
        many = queries.float().view(rows, shape.kv_heads, shape.group, shape.head_dim)
        scores = torch.einsum("rkgd,rckd->rkgc", many, past[0]) * shape.head_dim**-0.5
        if shape.soft_cap > 0:
            scores = shape.soft_cap * (scores / shape.soft_cap).tanh()
        seen = torch.arange(past[0].shape[1], device=queries.device).unsqueeze(0)
        at = state.positions.unsqueeze(1)
        hidden = seen > at
        if shape.sliding_window is not None:
            hidden = hidden | (seen <= at - shape.sliding_window)
        weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
        # a place that is not seen may hold anything, even what zero times is not zero
        kept = past[1].masked_fill(hidden[:, :, None, None], 0.0)
        return torch.einsum("rkgc,rckd->rkgd", weights, kept).flatten(1).to(queries.dtype)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shape = self._shape
        many = queries.float().view(-1, shape.kv_heads, shape.group, shape.head_dim)
        scores = torch.einsum("qkgd,ckd->kgqc", many, keys.float()) * shape.head_dim**-0.5
        if shape.soft_cap > 0:
            scores = shape.soft_cap * (scores / shape.soft_cap).tanh()
        count, context = queries.shape[0], keys.shape[0]
        at = torch.arange(context - count, context, device=queries.device).unsqueeze(1)
        seen = torch.arange(context, device=queries.device).unsqueeze(0)
        hidden = seen > at
        if shape.sliding_window is not None:
            hidden |= seen <= at - shape.sliding_window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return (
            torch.einsum("kgqc,ckd->qkgd", weights, values.float()).flatten(1, 2).to(queries.dtype)
        )
