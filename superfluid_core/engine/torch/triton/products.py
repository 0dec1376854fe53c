"""Products of rows by matrices that stay quantized, and the same matrices written out.

Owns the kernels that read grouped.py's layout. Outputs are the long side of a tile and rows the short one, so that one row costs no more
than sixteen. A byte becomes a float32, then a number of the dtype of the rows, then a factor of `tl.dot`, whose sums are float32. Where
outputs are few, inputs are cut into splits whose sums a second kernel adds up in their order: nothing is added in the order of
arrival. Splits and tiles follow from the sizes of the matrix and the class of the number of rows, not from the device. What changes from call to call (rows, splits, slices) is no reason to compile a kernel again.

    grid     (tiles of outputs, tiles of rows, splits)      partial [splits, rows, outputs] where inputs are cut
    fp8      bits of E4M3 become those of a float16 by two shifts, on every device alike: none needs to know the type
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from superfluid_core.engine.torch.grouped import GroupedMatrix
from superfluid_core.engine.torch.triton.decode import precision_of

TILE_OUTPUTS = 64
TILE_GROUPS = 4
ROW_CLASSES = (16, 32, 64)
PROGRAMS_WANTED = 256
STEPS_MIN = 2  # of TILE_GROUPS groups, that a split is worth
SPLITS_MAX = 16
SUM_COLUMNS = 256


@triton.jit
def read_groups(
    q,
    scale,
    minimum,
    output,
    group,
    is_held,
    outputs,
    scale_groups,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Load the bytes of groups [outputs, groups, bytes], and scale and minimum [outputs, groups]."""
    place = group.to(tl.int64)[None, :] * outputs + output[:, None]
    where = place[:, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    raw = tl.load(q + where, mask=is_held[:, :, None], other=0)
    share = (group // scale_groups).to(tl.int64)[None, :] * outputs + output[:, None]
    factor = tl.load(scale + share, mask=is_held, other=0.0).to(tl.float32)
    least = factor
    if KIND == "int4":
        least = tl.load(minimum + place, mask=is_held, other=0.0).to(tl.float32)
    return raw, factor, least


@triton.jit
def numbers_of(raw, factor, least, KIND: tl.constexpr):
    """Turn bytes, or halves of bytes, into float32 [outputs, groups * bytes]."""
    if KIND == "fp8":
        bits = raw.to(tl.uint16)
        moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        made = moved.to(tl.float16, bitcast=True).to(tl.float32) * factor[:, :, None]
    elif KIND == "int8":
        made = (raw.to(tl.float32) - 128.0) * factor[:, :, None]
    else:
        made = raw.to(tl.float32) * factor[:, :, None] + least[:, :, None]
    return tl.reshape(made, (raw.shape[0], raw.shape[1] * raw.shape[2]))


@triton.jit(do_not_specialize=["rows", "splits"])
def product_kernel(
    x,
    q,
    scale,
    minimum,
    bias,
    out,
    partial,
    rows,
    outputs,
    inputs,
    groups,
    scale_groups,
    splits,
    out_stride,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    width: tl.constexpr = 16 if KIND == "int4" else 32
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    share = tl.cdiv(tl.cdiv(groups, splits), GROUPS) * GROUPS
    start = split * share
    end = tl.minimum(start + share, groups)
    is_output = output < outputs
    is_row = row < rows
    flat = tl.arange(0, GROUPS * width)
    column = flat // width * 32 + flat % width
    source = x + row.to(tl.int64)[:, None] * inputs
    mixed = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in range(start, end, GROUPS):
        group = first + tl.arange(0, GROUPS)
        is_held = is_output[:, None] & (group < end)[None, :]
        raw, factor, least = read_groups(
            q, scale, minimum, output, group, is_held, outputs, scale_groups, KIND, width
        )
        at = first * 32 + column
        last = tl.minimum(end * 32, inputs)
        is_seen = is_row[:, None] & (at < last)[None, :]
        value = tl.load(source + at[None, :], mask=is_seen, other=0.0)
        if KIND == "int4":
            low = numbers_of(raw & 15, factor, least, KIND).to(value.dtype)
            mixed = tl.dot(low, tl.trans(value), mixed, input_precision=PRECISION)
            is_seen = is_row[:, None] & (at + 16 < last)[None, :]
            value = tl.load(source + at[None, :] + 16, mask=is_seen, other=0.0)
            raw = raw >> 4
        number = numbers_of(raw, factor, least, KIND).to(value.dtype)
        mixed = tl.dot(number, tl.trans(value), mixed, input_precision=PRECISION)
    is_made = is_output[:, None] & is_row[None, :]
    if IS_SPLIT:
        place = (split * rows + row).to(tl.int64)[None, :] * outputs + output[:, None]
        tl.store(partial + place, mixed, mask=is_made)
    else:
        if HAS_BIAS:
            added = tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
            mixed += added[:, None]
        place = row.to(tl.int64)[None, :] * out_stride + output[:, None]
        tl.store(out + place, mixed.to(out.dtype.element_ty), mask=is_made)


@triton.jit(do_not_specialize=["rows", "splits"])
def sum_splits_kernel(
    partial,
    bias,
    out,
    rows,
    outputs,
    splits,
    out_stride,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_output = output < outputs
    total = tl.zeros((COLUMNS,), tl.float32)
    for split in range(splits):
        place = (split * rows + row) * outputs + output
        total += tl.load(partial + place, mask=is_output, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + output, total.to(out.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["first_output", "count"])
def dequantize_kernel(
    q,
    scale,
    minimum,
    room,
    first_output,
    count,
    outputs,
    inputs,
    groups,
    scale_groups,
    KIND: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    width: tl.constexpr = 16 if KIND == "int4" else 32
    own = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    is_held = (own < count)[:, None] & (group < groups)[None, :]
    raw, factor, least = read_groups(
        q, scale, minimum, first_output + own, group, is_held, outputs, scale_groups, KIND, width
    )
    flat = tl.arange(0, GROUPS * width)
    at = tl.program_id(1) * GROUPS * 32 + flat // width * 32 + flat % width
    line = room + own.to(tl.int64)[:, None] * inputs
    is_own = (own < count)[:, None]
    if KIND == "int4":
        low = numbers_of(raw & 15, factor, least, KIND).to(room.dtype.element_ty)
        tl.store(line + at[None, :], low, mask=is_own & (at < inputs)[None, :])
        raw = raw >> 4
        at += 16
    number = numbers_of(raw, factor, least, KIND).to(room.dtype.element_ty)
    tl.store(line + at[None, :], number, mask=is_own & (at < inputs)[None, :])


def class_of(rows: int) -> int:
    """Rows of a tile for so many rows."""
    return next((each for each in ROW_CLASSES if rows <= each), ROW_CLASSES[-1])


def splits_of(rows: int, outputs: int, groups: int) -> int:
    """Cut the inputs into a power of two of splits where one tile of rows holds all and tiles of outputs are few."""
    if rows > ROW_CLASSES[-1]:
        return 1
    wanted = PROGRAMS_WANTED // triton.cdiv(outputs, TILE_OUTPUTS)
    useful = groups // (TILE_GROUPS * STEPS_MIN)
    found = 1
    while found * 2 <= min(wanted, useful, SPLITS_MAX):
        found *= 2
    return found


class TritonProducts:
    """Implements `Products`; each call launches one kernel or two."""

    def multiply(self, x: Tensor, matrix: GroupedMatrix, bias: Tensor | None, out: Tensor) -> None:
        rows, outputs = x.shape[0], matrix.outputs
        tile, splits = class_of(rows), splits_of(rows, outputs, matrix.groups)
        is_split, has_bias = splits > 1, bias is not None
        partial = x
        if is_split:
            partial = torch.empty((splits, rows, outputs), dtype=torch.float32, device=x.device)
        grid = (triton.cdiv(outputs, TILE_OUTPUTS), triton.cdiv(rows, tile), splits)
        product_kernel[grid](
            x,
            matrix.q,
            matrix.scale,
            matrix.scale if matrix.minimum is None else matrix.minimum,
            x if bias is None else bias,
            out,
            partial,
            rows,
            outputs,
            matrix.inputs,
            matrix.groups,
            matrix.scale_groups,
            splits,
            out.stride(0),
            KIND=matrix.kind,
            ROWS=tile,
            OUTPUTS=TILE_OUTPUTS,
            GROUPS=TILE_GROUPS,
            IS_SPLIT=is_split,
            HAS_BIAS=has_bias,
            PRECISION=precision_of(x.dtype),
        )
        if is_split:
            sum_splits_kernel[(rows, triton.cdiv(outputs, SUM_COLUMNS))](
                partial,
                x if bias is None else bias,
                out,
                rows,
                outputs,
                splits,
                out.stride(0),
                COLUMNS=SUM_COLUMNS,
                HAS_BIAS=has_bias,
            )

    def dequantize(self, matrix: GroupedMatrix, first: int, room: Tensor) -> None:
        grid = (
            triton.cdiv(room.shape[0], TILE_OUTPUTS),
            triton.cdiv(matrix.groups, TILE_GROUPS),
        )
        dequantize_kernel[grid](
            matrix.q,
            matrix.scale,
            matrix.scale if matrix.minimum is None else matrix.minimum,
            room,
            first,
            room.shape[0],
            matrix.outputs,
            matrix.inputs,
            matrix.groups,
            matrix.scale_groups,
            KIND=matrix.kind,
            OUTPUTS=TILE_OUTPUTS,
            GROUPS=TILE_GROUPS,
        )
