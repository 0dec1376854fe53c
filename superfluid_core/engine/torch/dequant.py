"""GGUF element types to plain numbers, vectorised in torch.

Owns the arithmetic of the block formats; knows nothing of files, names or models. A block is a row of bytes; each
function turns [blocks, bytes] into float32 [blocks, elements] with the operations, in the order, that the format
defines, so the result is bit-exact. Large tensors go through in slices, which bounds the temporary memory.

    simple    32 elements: d [m] [qh] qs     value = q * d (+ m)
    K-quants  256 elements in 8 or 16 sub-blocks, each with its own small scale (and minimum) under a common d (dmin)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.gguf import BLOCKS, GgmlType

SLICE_BLOCKS_32 = 65_536  # 2 M elements: 8 MiB of float32 per temporary


def _half(raw: Tensor) -> Tensor:
    """Two bytes a row, read as float16 -> float32 [n, 1]."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """[n, b] bytes -> [n, 2b]: all low halves, then all high halves."""
    return torch.cat((raw & 15, raw >> 4), dim=1)


def _fifth_bits(raw: Tensor) -> Tensor:
    """Four bytes a row, bit i for element i -> [n, 32] of 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((raw.unsqueeze(-1) >> shifts) & 1) << 4).flatten(1)


def _q8_0(raw: Tensor) -> Tensor:
    return raw[:, 2:].contiguous().view(torch.int8).float() * _half(raw[:, :2])


def _q4_0(raw: Tensor) -> Tensor:
    return (_nibbles(raw[:, 2:]).float() - 8.0) * _half(raw[:, :2])


def _q4_1(raw: Tensor) -> Tensor:
    return _nibbles(raw[:, 4:]).float() * _half(raw[:, :2]) + _half(raw[:, 2:4])


def _q5_0(raw: Tensor) -> Tensor:
    q = _nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6])
    return (q.float() - 16.0) * _half(raw[:, :2])


def _q5_1(raw: Tensor) -> Tensor:
    q = _nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8])
    return q.float() * _half(raw[:, :2]) + _half(raw[:, 2:4])


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Twelve bytes -> eight 6-bit scales and eight 6-bit minima, float32 [n, 8] each.

    Bytes 0-3 hold scales 0-3, bytes 4-7 minima 0-3, in their low six bits; scales and minima 4-7 have their low four
    bits in bytes 8-11 (scale low half, minimum high half) and their high two bits on top of bytes 0-3 and 4-7.
    """
    first, second, third = raw[:, 0:4], raw[:, 4:8], raw[:, 8:12]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales.float(), minima.float()


def k_groups(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q4_K blocks -> q [n, 8, 32], and float32 scale and what is added [n, 8] of each sub-block."""
    scales, minima = _k_scales(raw[:, 4:16])
    return _k_nibbles(raw[:, 16:]), _half(raw[:, :2]) * scales, -_half(raw[:, 2:4]) * minima


def _k_apply(raw: Tensor, q: Tensor) -> Tensor:
    """Scale and shift eight sub-blocks of 32; `raw` begins with d, dmin and the twelve scale bytes."""
    scales, minima = _k_scales(raw[:, 4:16])
    scale = _half(raw[:, :2]) * scales
    minimum = _half(raw[:, 2:4]) * minima
    return (q.float() * scale.unsqueeze(-1) - minimum.unsqueeze(-1)).flatten(1)


def _k_nibbles(raw: Tensor) -> Tensor:
    """128 bytes -> [n, 8, 32]: each 32 bytes give a sub-block of low halves, then one of high halves."""
    groups = raw.reshape(-1, 4, 1, 32)
    return torch.cat((groups & 15, groups >> 4), dim=2).reshape(-1, 8, 32)


def _q4_k(raw: Tensor) -> Tensor:
    return _k_apply(raw, _k_nibbles(raw[:, 16:]))


def _q5_k(raw: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8).reshape(1, 8, 1)
    high = ((raw[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4
    return _k_apply(raw, _k_nibbles(raw[:, 48:]) | high)


def _q6_k(raw: Tensor) -> Tensor:
    """Two halves of 128: 64 low bytes and 32 high bytes each, in four runs of 32; 16 scales of 16 elements."""
    low = raw[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), dim=2).reshape(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).reshape(1, 1, 4, 1)
    high = ((raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    q = (low | high).reshape(-1, 16, 16).float() - 32.0
    scale = _half(raw[:, 208:210]) * raw[:, 192:208].contiguous().view(torch.int8).float()
    return (q * scale.unsqueeze(-1)).flatten(1)


def _f32(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float32)


def _bf16(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.bfloat16).float()


DECODERS: dict[GgmlType, Callable[[Tensor], Tensor]] = {
    GgmlType.F32: _f32,
    GgmlType.F16: _half,
    GgmlType.BF16: _bf16,
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q5_0: _q5_0,
    GgmlType.Q5_1: _q5_1,
    GgmlType.Q8_0: _q8_0,
    GgmlType.Q4_K: _q4_k,
    GgmlType.Q5_K: _q5_k,
    GgmlType.Q6_K: _q6_k,
}


def dequantize(
    data: memoryview | bytes,
    kind: GgmlType,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Decode one tensor on the CPU, rounded once from exact float32 to `dtype`."""
    decoder = DECODERS.get(kind)
    if decoder is None:
        known = ", ".join(known.name for known in DECODERS)
        raise ModelFilesError(f"GGUF element type {kind.name} is not supported; known are {known}")
    elements, block_bytes = BLOCKS[kind]
    raw = np.frombuffer(data, dtype=np.uint8).reshape(-1, block_bytes)
    out = torch.empty((raw.shape[0], elements), dtype=dtype)
    step = SLICE_BLOCKS_32 * 32 // elements
    for start in range(0, raw.shape[0], step):
        piece = torch.from_numpy(raw[start : start + step].copy())
        out[start : start + step] = decoder(piece)
    return out.reshape(shape)
