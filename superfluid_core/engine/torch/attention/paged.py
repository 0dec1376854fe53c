"""Attention by our own Triton kernels: there on every CUDA device, whatever else is installed.

Owns which kernel gets which part of a step: decoding rows go to the split-KV kernel, prompt chunks to the tiled one, both over the same
pool; whatever the step computes is stored first. `plan_decode` binds to tensors that live on, so that launches can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from superfluid_core.engine.torch.attention.base import AttentionShape, DecodeState
from superfluid_core.engine.torch.batch import Batch
from superfluid_core.engine.torch.kvcache import KvPool
from superfluid_core.engine.torch.triton.decode import (
    DecodePlan,
    PagedKv,
    attend_decode,
    plan_decode,
    splits_for,
)
from superfluid_core.engine.torch.triton.passes import store, turn_store
from superfluid_core.engine.torch.triton.prefill import PrefillPlan, attend_prefill, plan_prefill

PROCESSORS_UNKNOWN = 8


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step: where its tokens are stored, its decoding rows, its chunks."""

    slots: Tensor
    decodes: int
    decode: DecodePlan | None
    prefill: PrefillPlan | None


class PagedAttention:
    """Implements `AttentionBackend`, `FusedAttention` and `DecodeAttention`."""

    def __init__(self, pool: KvPool, shape: AttentionShape) -> None:
        self._shape = shape
        self._device = pool.device
        self._layers = [
            PagedKv(keys, values) for keys, values in zip(pool.keys, pool.values, strict=True)
        ]
        self._processors = _processors(pool.device)
        self._plan: _Plan | None = None

    def plan(self, batch: Batch) -> None:
        decodes, shape = batch.decodes, self._shape
        tables = batch.tables.to(torch.int32).to(self._device)
        decode = prefill = None
        if decodes:
            context_max = max(batch.contexts[:decodes])
            splits = splits_for(decodes, shape.kv_heads, context_max, self._processors)
            positions = batch.positions[:decodes].contiguous()
            decode = plan_decode(positions, tables[:decodes], shape, splits)
        if decodes < len(batch.lengths):
            prefill = plan_prefill(
                batch.starts[decodes:-1],
                batch.lengths[decodes:],
                batch.contexts[decodes:],
                tables[decodes:],
                shape.group,
            )
        self._plan = _Plan(batch.slots, decodes, decode, prefill)

    def plan_decode(self, state: DecodeState) -> None:
        rows, shape = state.positions.shape[0], self._shape
        splits = splits_for(rows, shape.kv_heads, state.context_max, self._processors)
        decode = plan_decode(state.positions, state.tables, shape, splits)
        self._plan = _Plan(state.slots, rows, decode, None)

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        assert self._plan is not None
        store(keys, values, self._plan.slots, self._layers[layer])
        return self._attend(layer, queries)

    def run_qkv(self, layer: int, qkv: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        assert self._plan is not None
        queries = turn_store(qkv, turn, self._plan.slots, self._layers[layer], self._shape)
        return self._attend(layer, queries)

    def _attend(self, layer: int, queries: Tensor) -> Tensor:
        plan, kv = self._plan, self._layers[layer]
        assert plan is not None
        out = queries.new_empty(queries.shape)
        if plan.decode is not None:
            attend_decode(queries, kv, plan.decode, self._shape, out)
        if plan.prefill is not None:
            attend_prefill(queries, kv, plan.prefill, self._shape, out)
        return out.flatten(1)


def _processors(device: torch.device) -> int:
    """Count the multiprocessors, for the choice of splits."""
    if device.type != "cuda":
        return PROCESSORS_UNKNOWN
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
