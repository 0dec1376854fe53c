"""Attention by torch's own variable-length kernel over block tables, where torch and the device have it.

Owns one call for a whole step: decoding rows are chunks of one token. The kernel is FlashAttention 3 on compute capability 9.0 and 4 on
10.0; on others it knows no block table, which the probe says. Splits are left to it, so it is no batch-invariant path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from superfluid_core.engine.torch.attention.base import AttentionShape
from superfluid_core.engine.torch.batch import Batch
from superfluid_core.engine.torch.kvcache import KvPool

KERNELS = {(9, 0): "FA3", (10, 0): "FA4"}


def activate(device: torch.device) -> None:
    """Let torch use the kernel that reads block tables on this device, for the whole process.

    Raises what torch raises when that kernel is not installed.
    """
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl(KERNELS[torch.cuda.get_device_capability(device)])


def restore() -> None:
    """Let torch use what it did before `activate`, which is also what everything else in this process then uses."""
    try:
        from torch.nn.attention import (
            current_flash_attention_impl,
            restore_flash_attention_impl,
        )
    except ImportError:  # an older torch has one kernel only
        return
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step; `starts` are token counts by row, summed up; `contexts` how much of each row's blocks is filled."""

    slots: Tensor
    starts: Tensor
    contexts: Tensor
    tables: Tensor
    length_max: int
    context_max: int


class VarlenAttention:
    """Implements `AttentionBackend`. `attend` stands in for torch's function in tests."""

    def __init__(self, pool: KvPool, shape: AttentionShape, attend: Any = None) -> None:
        if attend is None:
            from torch.nn.attention.varlen import varlen_attn as attend
        self._attend = attend
        self._pool = pool
        self._shape = shape
        self._plan: _Plan | None = None

    def plan(self, batch: Batch) -> None:
        rows = len(batch.lengths)
        packed = torch.tensor([*batch.starts, *batch.contexts], dtype=torch.int32)
        packed = packed.to(self._pool.device)
        self._plan = _Plan(
            batch.slots,
            packed[: rows + 1],
            packed[rows + 1 :],
            batch.tables.to(torch.int32).to(self._pool.device),
            max(batch.lengths),
            max(batch.contexts),
        )

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        plan, shape = self._plan, self._shape
        assert plan is not None
        self._pool.write(layer, plan.slots, keys, values)
        left = -1 if shape.sliding_window is None else shape.sliding_window - 1
        out: Tensor = self._attend(
            queries,
            self._pool.keys[layer],
            self._pool.values[layer],
            plan.starts,
            None,
            plan.length_max,
            plan.context_max,
            window_size=(left, 0),
            enable_gqa=shape.group > 1,
            seqused_k=plan.contexts,
            block_table=plan.tables,
        )
        return out.flatten(1)
