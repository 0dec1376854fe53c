"""Steps of many rows, computed as one call over the file's own quantized weights (native/large.h), where the CPU multiplies bf16 by AMX.

Owns the room that such a step needs, and how prompt chunks are cut into the parts that threads take. Weights become bf16 while they
are multiplied, so nothing is kept beside the tiles of the small step. A row's numbers depend on its own context and on how its chunk is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from superfluid_core.engine.torch.batch import Batch
from superfluid_core.engine.torch.kvcache import KvShape
from superfluid_core.engine.torch.native.ops import NativeOps
from superfluid_core.engine.torch.native.structs import Large
from superfluid_core.engine.torch.small_step import PHASE_BYTES, SmallStep
from superfluid_core.modelfiles.config import ModelConfig

PART_ROWS = 64  # this and the next as in chunks.h and panels.h
PANEL, PAIR_ROWS, TILE_ROWS = 32, 32, 16
PHASES_A_LAYER = 8
ALIGN_BYTES = 128


def cut_parts(batch: Batch) -> list[tuple[int, int, int, int]]:
    """Cut every row's tokens into (first, count, row, 0) of at most PART_ROWS."""
    return [
        (first, min(PART_ROWS, batch.starts[row + 1] - first), row, 0)
        for row in range(len(batch.lengths))
        for first in range(batch.starts[row], batch.starts[row + 1], PART_ROWS)
    ]


def fits_large(config: ModelConfig, pool: KvShape, ops: NativeOps) -> bool:
    """Whether this CPU and this model can take such steps."""
    return (
        ops.large_room > 0
        and pool.dtype is torch.bfloat16
        and config.head_dim % PANEL == 0
        and pool.block_tokens % TILE_ROWS == 0
    )


class LargeStep:
    """Runs batches of any size. Mutates the KV slots that they name."""

    def __init__(self, ops: NativeOps, config: ModelConfig, small: SmallStep) -> None:
        self._ops = ops
        self._small = small
        q_width = config.heads * config.head_dim
        self._vocabulary = config.vocabulary
        self._row_bytes = (
            *(4 * config.hidden, 4 * (q_width + 2 * config.kv_heads * config.head_dim)),
            *(2 * config.hidden, 2 * q_width, 2 * config.intermediate),
        )
        self._phases = config.layers * PHASES_A_LAYER + 2
        widest = max(config.hidden, q_width, config.intermediate)
        self._step = Large(threads=ops.threads, panel_values=PANEL * widest)
        self._own, places = _room(
            [2 * PANEL * widest * ops.threads, ops.large_room * ops.threads, PHASE_BYTES * self._phases]
        )  # fmt: skip
        self._step.panels, self._step.chunks, self._step.phases = places
        self._rows = 0

    def forward(self, batch: Batch) -> Tensor:
        """One step; float32 logits [sampled rows, vocabulary]."""
        self._widen(batch.tokens)
        parts = torch.tensor(cut_parts(batch), dtype=torch.int32)
        blocks = batch.tables.to(torch.int32).contiguous()
        logits = torch.empty((batch.sampled.shape[0], self._vocabulary))
        step = self._step
        step.ids, step.positions = batch.ids.data_ptr(), batch.positions.data_ptr()
        step.slots, step.sampled = batch.slots.data_ptr(), batch.sampled.data_ptr()
        step.blocks, step.blocks_width = blocks.data_ptr(), blocks.shape[1]
        step.parts, step.parts_count = parts.data_ptr(), parts.shape[0]
        step.tokens, step.samples = batch.tokens, logits.shape[0]
        step.logits = logits.data_ptr()
        self._ops.large_step(self._small.model, step, self._phases)
        return logits

    def _widen(self, rows: int) -> None:
        """Make room for more rows than there have been."""
        if rows <= self._rows:
            return
        self._rows = -(-rows // PAIR_ROWS) * PAIR_ROWS
        self._shared, places = _room([self._rows * size for size in self._row_bytes])
        step = self._step
        step.x, step.qkv, step.normed, step.mixed, step.wide = places


def _room(sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Memory for parts of so many bytes, and the aligned addresses of the parts."""
    whole = [-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes]
    made = torch.empty(sum(whole) + ALIGN_BYTES, dtype=torch.uint8)
    first = -(-made.data_ptr() // ALIGN_BYTES) * ALIGN_BYTES
    return made, [first + sum(whole[:at]) for at in range(len(whole))]
