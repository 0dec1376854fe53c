"""The plainest attention there is: one lane at a time, scores written out.

Every other backend is compared with it. It gathers a lane's keys and values up to its context and nothing beyond,
computes softmax(q k / sqrt(d)) v in float32 and rounds once. Slow, and right on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from superfluid_core.engine.torch.attention.base import AttentionShape
from superfluid_core.engine.torch.batch import Batch
from superfluid_core.engine.torch.kvcache import KvPool


class ReferenceAttention:
    """Lane by lane, in float32."""

    def __init__(self, pool: KvPool, shape: AttentionShape) -> None:
        self._pool = pool
        self._shape = shape
        self._batch: Batch | None = None

    def plan(self, batch: Batch) -> None:
        self._batch = batch

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
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

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shape = self._shape
        many = queries.float().view(-1, shape.kv_heads, shape.group, shape.head_dim)
        scores = torch.einsum("qkgd,ckd->kgqc", many, keys.float()) * shape.head_dim**-0.5
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
