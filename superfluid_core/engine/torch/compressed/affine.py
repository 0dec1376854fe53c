"""Matrices as MLX packs them: a scale and a bias for each group of inputs.

Owns one layout, MLX's mode `affine` of 1 to 8 bits: `weight` uint32 [outputs, inputs * bits / 32], `scales` and `biases` [outputs, groups].
The numbers of a row are one stream of bits, the lowest first; those of 3, 5 and 6 bits go on from one word to the next. Each number is
q * scale + bias, worked out in float32 and rounded once. MLX's modes of floats are refused by name: `--engine mlx` runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from superfluid_core.engine.torch.compressed.integers import (
    ROWS_AT_ONCE,
    SCALE_ERROR,
    WORD_BITS,
    unpack,
)
from superfluid_core.engine.torch.compressed.parts import FLOATS, Parts
from superfluid_core.engine.torch.quantized import GROUP, QuantizedRows
from superfluid_core.modelfiles.quantization import MLX_TYPE

RUN = 8  # so many numbers of any width are whole bytes


@dataclass(frozen=True, slots=True)
class Affine:
    """A matrix in groups: q uint8 [outputs, inputs], scale and bias [outputs, inputs / group]."""

    q: Tensor
    scale: Tensor
    bias: Tensor
    group: int
    bits: int

    def cut(self, first: int, end: int) -> Affine:
        """Take rows [first, end)."""
        return self.reordered(lambda each: each[first:end])

    def reordered(self, order: Callable[[Tensor], Tensor]) -> Affine:
        """Apply a change of rows."""
        return Affine(order(self.q), order(self.scale), order(self.bias), self.group, self.bits)

    def floats(self, dtype: torch.dtype) -> Tensor:
        """Write the numbers out."""
        made = torch.empty(self.q.shape, dtype=dtype, device=self.q.device)
        for first in range(0, self.q.shape[0], ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            wide = self.q[rows].float().reshape(-1, self.bias.shape[1], self.group)
            wide.mul_(self.scale[rows].float().unsqueeze(-1))
            wide.add_(self.bias[rows].float().unsqueeze(-1))
            made[rows] = wide.flatten(1).to(dtype)
        return made

    def rows(self) -> QuantizedRows | None:
        """Lay the numbers out in groups of 32; None where they are wider than 4 bits, or half precision does not hold the scales."""
        if self.bits > 4 or self.group % GROUP:
            return None
        halves = []
        for each in (self.scale, self.bias):
            half, wide = each.half(), each.float()
            if bool(((half.float() - wide).abs() > wide.abs() * SCALE_ERROR).any()):
                return None
            halves.append(half.repeat_interleave(self.group // GROUP, 1))
        return QuantizedRows(self.q, *halves)


def unpack_stream(words: Tensor, bits: int) -> Tensor:
    """Take the numbers out of rows of words that are one stream of bits each, uint8."""
    if bits in (4, 8):
        return unpack(words, bits, 1)
    raw = words.contiguous().view(torch.uint8).reshape(words.shape[0], -1, bits)
    found = torch.empty((*raw.shape[:2], RUN), dtype=torch.uint8, device=words.device)
    bytes_up = 8 * torch.arange(bits, device=words.device)
    places = bits * torch.arange(RUN, device=words.device)
    for first in range(0, raw.shape[0], ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        runs = (raw[rows].long() << bytes_up).sum(-1, keepdim=True)
        found[rows] = (runs >> places) & ((1 << bits) - 1)
    return found.flatten(1)


def mlx_shape(parts: Parts) -> tuple[int, int]:
    """Find the shape of a matrix; its words, scales and biases have to agree. Raises ModelFilesError."""
    bits, group, mode = parts.width()
    if mode != "affine":
        raise parts.refusal(
            "weight",
            f"is packed in MLX's mode {mode}, of which only affine is read; --engine mlx runs it",
        )
    outputs, columns = parts.matrix("weight")
    inputs, rest = divmod(columns * WORD_BITS, bits)
    if rest or inputs % group:
        raise parts.refusal(
            "weight", f"is {(outputs, columns)}: no groups of {group} numbers of {bits} bits"
        )
    for part in ("scales", "biases"):
        found = parts.shape(part)
        if found != (outputs, inputs // group):
            wanted = (outputs, inputs // group)
            raise parts.refusal(part, f"is {found}, its neighbours say {wanted}")
    return outputs, inputs


def read_mlx(parts: Parts) -> Affine:
    """Read a matrix that MLX packed."""
    bits, group, _ = parts.width()
    outputs, inputs = mlx_shape(parts)
    words = parts.take("weight", (MLX_TYPE,), parts.shape("weight"))
    groups = (outputs, inputs // group)
    scale, bias = (parts.take(part, FLOATS, groups) for part in ("scales", "biases"))
    return Affine(unpack_stream(words, bits), scale, bias, group, bits)
