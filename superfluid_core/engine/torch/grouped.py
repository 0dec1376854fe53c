"""Quantized matrices as products on a device read them: group by group, so that neighbouring threads read neighbouring bytes.

Owns the layout and what its bytes stand for, in plain torch; kernels that read the same bytes are in triton/products.py. A group is
32 inputs of one output. Numbers are those that dequantizing the same rows gives, to the bit: 4 bits and int8 times a half-precision
scale are exact in float32, and a float of 8 bits is a float16 of the same bits, moved by one place and 2**8 too small.

    q        uint8 [groups, outputs, 16]   int4: inputs 0..15 of a group in the low halves of bytes, 16..31 in the high ones
             uint8 [groups, outputs, 32]   int8: 128 higher than meant; fp8: the bits of E4M3
    scale    [shares, outputs]             float16, a share is a group; fp8: float32, times 2**8, `scale_groups` groups share one
    minimum  float16 [groups, outputs]     int4 alone: number = q * scale + minimum
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by
from torch import Tensor

from superfluid_core.engine.torch.compressed.rows import Fp8Rows
from superfluid_core.engine.torch.quantized import GROUP, INT8_HALF, QuantizedRows
from superfluid_core.errors import ModelFilesError

Kind = Literal["int4", "int8", "fp8"]
HALF_GROUP = GROUP // 2
FLOAT8_FACTOR = 256.0  # 2**8: the difference of the exponents' origins of E4M3 and float16


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """A matrix [outputs, inputs] in groups; the last one is filled up with zeros."""

    kind: Kind
    q: Tensor
    scale: Tensor
    minimum: Tensor | None
    scale_groups: int
    inputs: int

    @property
    def outputs(self) -> int:
        return int(self.q.shape[1])

    @property
    def groups(self) -> int:
        return int(self.q.shape[0])

    @property
    def nbytes(self) -> int:
        minimum = 0 if self.minimum is None else self.minimum.nbytes
        return self.q.nbytes + self.scale.nbytes + minimum


def group_rows(rows: QuantizedRows | Fp8Rows, device: torch.device) -> GroupedMatrix | None:
    """Lay rows out on a device; None where the blocks of their scales cut through groups. Raises ModelFilesError for what is no number."""
    if isinstance(rows, Fp8Rows):
        return _group_floats(rows, device)
    q = _grouped(rows.q.to(device))
    if rows.minimum is None:
        return GroupedMatrix("int8", q, _turned(rows.scale, device), None, 1, rows.q.shape[1])
    packed = q[..., :HALF_GROUP] | (q[..., HALF_GROUP:] << 4)
    scale, minimum = _turned(rows.scale, device), _turned(rows.minimum, device)
    return GroupedMatrix("int4", packed, scale, minimum, 1, rows.q.shape[1])


def _grouped(q: Tensor) -> Tensor:
    """Bytes [outputs, inputs] -> [groups, outputs, 32]."""
    filled = F.pad(q, (0, -q.shape[1] % GROUP))
    return filled.reshape(q.shape[0], -1, GROUP).transpose(0, 1).contiguous()


def _turned(values: Tensor, device: torch.device) -> Tensor:
    return values.to(device).t().contiguous()


def _group_floats(rows: Fp8Rows, device: torch.device) -> GroupedMatrix | None:
    outputs, inputs = rows.weight.shape
    tall, wide = rows.block
    is_whole = wide >= inputs
    if wide % GROUP and not is_whole:
        return None
    bits = rows.weight.view(torch.uint8).to(device)
    if bool(((bits & 127) == 127).any()):
        raise ModelFilesError("a weight of 8 bits is no number")
    scale = rows.scale.to(device).float().repeat_interleave(min(tall, outputs), 0)[:outputs]
    q = _grouped(bits)
    shared = q.shape[0] if is_whole else wide // GROUP
    return GroupedMatrix("fp8", q, _turned(scale * FLOAT8_FACTOR, device), None, shared, inputs)


def numbers(matrix: GroupedMatrix, dtype: torch.dtype) -> Tensor:
    """Write out what a matrix stands for, [outputs, inputs]; what kernels are held against."""
    scale = matrix.scale.float().repeat_interleave(matrix.scale_groups, 0)[: matrix.groups]
    scale = scale.unsqueeze(-1)
    if matrix.kind == "fp8":
        made = matrix.q.view(torch.float8_e4m3fn).float() * (scale / FLOAT8_FACTOR)
    elif matrix.kind == "int8":
        made = (matrix.q.float() - INT8_HALF) * scale
    else:
        assert matrix.minimum is not None
        halves = torch.cat((matrix.q & 15, matrix.q >> 4), -1)
        made = halves.float() * scale + matrix.minimum.float().unsqueeze(-1)
    rows = made.transpose(0, 1).reshape(matrix.outputs, -1)
    return rows[:, : matrix.inputs].to(dtype)


def join(parts: Sequence[GroupedMatrix]) -> list[GroupedMatrix]:
    """Put the outputs of neighbours that are alike into one matrix; the order of outputs stays."""
    found: list[GroupedMatrix] = []
    run: list[GroupedMatrix] = []
    for part in parts:
        if run and _likeness(run[-1]) != _likeness(part):
            found.append(_joined(run))
            run = []
        run.append(part)
    return [*found, _joined(run)] if run else found


def _likeness(matrix: GroupedMatrix) -> tuple[object, ...]:
    return matrix.kind, matrix.scale_groups, matrix.inputs


def _joined(run: Sequence[GroupedMatrix]) -> GroupedMatrix:
    if len(run) == 1:
        return run[0]
    minima = [part.minimum for part in run if part.minimum is not None]
    return GroupedMatrix(
        kind=run[0].kind,
        q=torch.cat([part.q for part in run], 1),
        scale=torch.cat([part.scale for part in run], 1),
        minimum=torch.cat(minima, 1) if minima else None,
        scale_groups=run[0].scale_groups,
        inputs=run[0].inputs,
    )
