"""Matrices of 8-bit floats (E4M3) and the scales of their blocks.

Owns the reading of what is published: `weight` float8 [outputs, inputs] and beside it `weight_scale_inv` (DeepSeek, Qwen; despite its
name it is multiplied) or `weight_scale` (AutoFP8, compressed-tensors), one number a tensor, a row, or a block of rows and columns, of
which the last ones may be cut short. Each number is weight * scale, worked out in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from superfluid_core.engine.torch.compressed.parts import SCALES, Parts
from superfluid_core.engine.torch.compressed.rows import Fp8Rows
from superfluid_core.modelfiles.quantization import BESIDE, FP8_TYPE

ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Floats8:
    """A matrix that can be cut, put in another order and written out."""

    kept: Fp8Rows

    def cut(self, first: int, end: int) -> Floats8:
        """Take rows [first, end): whole blocks where they are, else with a scale for each row."""
        weight, scale = self.kept.weight[first:end], self.kept.scale
        tall, wide = self.kept.block
        if scale.shape[0] == 1:
            return Floats8(Fp8Rows(weight, scale, (weight.shape[0], wide)))
        if first % tall:
            return Floats8(Fp8Rows(weight, self._by_row()[first:end], (1, wide)))
        return Floats8(Fp8Rows(weight, scale[first // tall : -(-end // tall)], (tall, wide)))

    def reordered(self, order: Callable[[Tensor], Tensor]) -> Floats8:
        """Apply a change of the order of rows."""
        weight = order(self.kept.weight.view(torch.uint8)).view(self.kept.weight.dtype)
        if self.kept.scale.shape[0] == 1:
            return Floats8(Fp8Rows(weight, self.kept.scale, self.kept.block))
        return Floats8(Fp8Rows(weight, order(self._by_row()), (1, self.kept.block[1])))

    def floats(self, dtype: torch.dtype) -> Tensor:
        """Write the numbers out."""
        weight, (tall, wide) = self.kept.weight, self.kept.block
        made = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        scale = self.kept.scale.repeat_interleave(wide, 1)[:, : weight.shape[1]]
        rows = torch.arange(weight.shape[0], device=weight.device) // tall
        for first in range(0, weight.shape[0], ROWS_AT_ONCE):
            some = slice(first, first + ROWS_AT_ONCE)
            made[some] = weight[some].float().mul_(scale[rows[some]]).to(dtype)
        return made

    def rows(self) -> Fp8Rows:
        return self.kept

    def _by_row(self) -> Tensor:
        tall, outputs = self.kept.block[0], self.kept.weight.shape[0]
        return self.kept.scale.repeat_interleave(tall, 0)[:outputs]


def read_fp8(parts: Parts) -> Floats8:
    """Read a matrix of 8-bit floats; the scale's own shape says what shares one."""
    outputs, inputs = parts.matrix("weight")
    named = [name for name in BESIDE["fp8"] if parts.has(name)]
    if len(named) != 1:
        raise parts.refusal("weight", f"has {len(named)} scales ({' or '.join(BESIDE['fp8'])})")
    weight = parts.take("weight", (FP8_TYPE,), (outputs, inputs))
    block = parts.kept.block
    blocks = None if block is None else (-(-outputs // block[0]), -(-inputs // block[1]))
    one, row = ((), (1,), (1, 1)), ((outputs,), (outputs, 1))
    shapes = (*one, *row) if blocks is None else (*one, *row, blocks)
    scale = parts.take(named[0], SCALES, *shapes).float()
    if block is not None and scale.shape == blocks:
        return Floats8(Fp8Rows(weight, scale.contiguous(), block))
    if scale.numel() == 1:
        return Floats8(Fp8Rows(weight, scale.reshape(1, 1), (outputs, inputs)))
    return Floats8(Fp8Rows(weight, scale.reshape(outputs, 1).contiguous(), (1, inputs)))
