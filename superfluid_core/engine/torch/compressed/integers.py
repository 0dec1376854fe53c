"""Matrices of 4 or 8 bits: out of 32-bit words, into numbers or into groups of 32.

Owns four layouts, as those who write them keep them. `p` numbers go into a word, the first in its lowest bits; groups share a scale and
a zero, and a matrix of `o` outputs and `i` inputs is

    awq     (AutoAWQ, gemm)       qweight int32 [i, o/8], qzeros int32 [groups, o/8], scales [groups, o]; eight outputs lie in a word in
                                  the order 0 2 4 6 1 3 5 7
    gptq    (AutoGPTQ, GPTQModel) qweight int32 [i/p, o], qzeros int32 [groups, o/p], scales [groups, o], g_idx int32 [i]; zeros of
                                  the first form are kept as one less, modulo what fits: a zero of 0 is kept as 15 (255),
                                  which readers that do not wrap around take for 16 (256)
    packed  (compressed-tensors)  weight_packed int32 [o, ceil(i/p)], weight_scale [o, groups], weight_shape int64 [2],
                                  weight_zero_point int32 [ceil(o/p), groups] or int8 [o, groups], weight_g_idx int32 [i];
                                  numbers have signs and are packed with half their range added
    int8    (compressed-tensors)  weight int8 [o, i], weight_scale [1] or [o, 1], weight_zero_point int8 of the same shape

Each number is (q - zero) * scale, worked out in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from superfluid_core.engine.torch.compressed.parts import (
    FLOATS,
    SCALES,
    WORDS,
    Parts,
    in_order,
)
from superfluid_core.engine.torch.quantized import GROUP, INT8_HALF, QuantizedRows
from superfluid_core.modelfiles.quantization import INT8_TYPE

WORD_BITS = 32
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word outputs 0 to 7 lie
ROWS_AT_ONCE = 1024  # bounds what is wide at a time
SCALE_ERROR = 2.0**-11  # of rounding to half precision


@dataclass(frozen=True, slots=True)
class Integers:
    """A matrix in groups: q uint8 [outputs, inputs], zero uint8 and scale [outputs, groups], the group of each input."""

    q: Tensor
    zero: Tensor
    scale: Tensor
    index: Tensor
    bits: int

    def cut(self, first: int, end: int) -> Integers:
        """Take rows [first, end)."""
        return self.reordered(lambda each: each[first:end])

    def reordered(self, order: Callable[[Tensor], Tensor]) -> Integers:
        """Apply a change of rows."""
        return Integers(order(self.q), order(self.zero), order(self.scale), self.index, self.bits)

    def floats(self, dtype: torch.dtype) -> Tensor:
        """Write the numbers out."""
        made = torch.empty(self.q.shape, dtype=dtype, device=self.q.device)
        run = self._run()
        places = self.index[::run]
        for first in range(0, self.q.shape[0], ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            wide = self.q[rows].float().view(-1, len(places), run)
            wide.sub_(self.zero[rows].float()[:, places].unsqueeze(-1))
            wide.mul_(self.scale[rows].float()[:, places].unsqueeze(-1))
            made[rows] = wide.flatten(1).to(dtype)
        return made

    def rows(self) -> QuantizedRows | None:
        """Lay the numbers out in groups of 32; None where they cannot be kept so.

        That is where 32 inputs in a row have several scales, where 8 bits have a zero that is not the middle, and where half
        precision does not hold the scales. The minimum of 4 bits, -zero * scale, is rounded once.
        """
        if self._run() % GROUP:
            return None
        places = self.index[::GROUP]
        scale, zero = self.scale[:, places].float(), self.zero[:, places]
        half = scale.half()
        if bool(((half.float() - scale).abs() > scale.abs() * SCALE_ERROR).any()):
            return None
        if self.bits == 8:
            return None if bool((zero != INT8_HALF).any()) else QuantizedRows(self.q, half, None)
        minimum = (-zero.float() * half.float()).half()
        return QuantizedRows(self.q, half, minimum) if bool(minimum.isfinite().all()) else None

    def _run(self) -> int:
        """Find the longest run such that inputs [0, run), [run, 2 run) ... each lie in one group."""
        changes = (self.index[1:] != self.index[:-1]).nonzero().flatten() + 1
        return math.gcd(self.q.shape[1], *changes.tolist())


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Take the numbers out of words that lie side by side along `dim`, uint8."""
    found = words.movedim(dim, -1).contiguous().view(torch.uint8)
    if bits == 4:
        found = torch.stack((found & 15, found >> 4), dim=-1).flatten(-2)
    return found.movedim(-1, dim)


def _from_awq(words: Tensor) -> Tensor:
    numbers = unpack(words, 4, 1).view(words.shape[0], -1, len(AWQ_PLACES))
    return numbers[:, :, list(AWQ_PLACES)].flatten(1).T.contiguous()


def _size(parts: Parts, inputs: int) -> tuple[int, int]:
    """Tell how many inputs share a scale, and how many groups there are."""
    group = parts.kept.group or inputs
    return group, -(-inputs // group)


def _middle(scale: Tensor, bits: int) -> Tensor:
    return torch.full(scale.shape, 1 << (bits - 1), dtype=torch.uint8, device=scale.device)


def read_awq(parts: Parts) -> Integers:
    """Read a matrix that AutoAWQ wrote."""
    inputs, columns = parts.matrix("qweight")
    outputs = columns * (WORD_BITS // 4)
    group, groups = _size(parts, inputs)
    q = _from_awq(parts.take("qweight", WORDS, (inputs, columns)))
    scale = parts.take("scales", SCALES, (groups, outputs)).T.contiguous()
    if parts.kept.zero_points or parts.has("qzeros"):
        zero = _from_awq(parts.take("qzeros", WORDS, (groups, columns)))
    else:
        zero = _middle(scale, 4)
    return Integers(q, zero, scale, in_order(inputs, group, q.device), 4)


def read_gptq(parts: Parts) -> Integers:
    """Read a matrix that AutoGPTQ or GPTQModel wrote; where there is a `g_idx`, it says all about groups."""
    bits = parts.kept.bits
    runs, outputs = parts.matrix("qweight")
    inputs = runs * (WORD_BITS // bits)
    group, groups = _size(parts, inputs)
    q = unpack(parts.take("qweight", WORDS, (runs, outputs)), bits, 0).T.contiguous()
    scale = parts.take("scales", SCALES, (groups, outputs)).T.contiguous()
    zeros = parts.take("qzeros", WORDS, (groups, -(-outputs * bits // WORD_BITS)))
    zero = unpack(zeros, bits, 1)[:, :outputs].T.contiguous()
    if parts.kept.zeros_less_1:
        zero = (zero + 1) & ((1 << bits) - 1)
    index = parts.index("g_idx", inputs, groups)
    if index is None:
        if parts.kept.by_activation:
            raise parts.refusal("g_idx", "is missing, and desc_act says that it is needed")
        index = in_order(inputs, group, q.device)
    return Integers(q, zero, scale, index, bits)


def packed_shape(parts: Parts) -> tuple[int, int]:
    """Read the shape of a matrix of compressed-tensors, and hold it against its words."""
    outputs, inputs = parts.sizes("weight_shape")
    words = (outputs, -(-inputs * parts.kept.bits // WORD_BITS))
    if parts.shape("weight_packed") != words or not all(words):
        found = parts.shape("weight_packed")
        raise parts.refusal("weight_packed", f"is {found}, its weight_shape says {words}")
    return outputs, inputs


def read_int8(parts: Parts) -> Integers:
    """Read a matrix of int8 that compressed-tensors kept as they are; the scale's own shape says what shares one."""
    outputs, inputs = parts.matrix("weight")
    q = parts.take("weight", (INT8_TYPE,), (outputs, inputs)).view(torch.uint8) ^ INT8_HALF
    shapes = ((), (1,), (1, 1), (outputs,), (outputs, 1))
    scale = parts.take("weight_scale", FLOATS, *shapes).reshape(-1, 1).expand(outputs, 1)
    if parts.kept.zero_points:
        found = parts.take("weight_zero_point", (INT8_TYPE,), parts.shape("weight_scale"))
        zero = found.view(torch.uint8).reshape(-1, 1).expand(outputs, 1) ^ INT8_HALF
    else:
        zero = _middle(scale, 8)
    return Integers(q, zero, scale.contiguous(), in_order(inputs, inputs, q.device), 8)


def read_packed(parts: Parts) -> Integers:
    """Read a matrix that compressed-tensors packed."""
    bits, (outputs, inputs) = parts.kept.bits, packed_shape(parts)
    group, groups = _size(parts, inputs)
    words = parts.take("weight_packed", WORDS, parts.shape("weight_packed"))
    q = unpack(words, bits, 1)[:, :inputs].contiguous()
    scale = parts.take("weight_scale", SCALES, (outputs, groups))
    if not parts.kept.zero_points:
        zero = _middle(scale, bits)
    elif parts.located("weight_zero_point").dtype in WORDS:
        rows = -(-outputs * bits // WORD_BITS)
        packed = parts.take("weight_zero_point", WORDS, (rows, groups))
        zero = unpack(packed, bits, 0)[:outputs].contiguous()
    else:
        zero = parts.take("weight_zero_point", ("I8",), (outputs, groups))
        zero = (zero.short() + (1 << (bits - 1))).to(torch.uint8)
    index = parts.index("weight_g_idx", inputs, groups)
    if index is None:
        if parts.kept.by_activation and groups > 1:
            raise parts.refusal("weight_g_idx", "is missing, and actorder says that it is needed")
        index = in_order(inputs, group, q.device)
    return Integers(q, zero, scale, index, bits)
