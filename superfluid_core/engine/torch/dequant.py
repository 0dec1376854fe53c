"""GGUF element types to plain numbers, vectorised in torch.

Owns the arithmetic of the block formats; knows nothing of files, names or models. A block is a row of bytes; each
function turns [blocks, bytes] into float32 [blocks, elements] with the operations, in the order, that the format
defines, so the result is bit-exact. Large tensors go through in slices, which bounds the temporary memory.

    simple    32 elements: d [m] [qh] qs     value = q * d (+ m)
    K-quants  256 elements in 8 or 16 sub-blocks, each with its own small scale (and minimum) under a common d (dmin)
    tables    32 elements: d qs                value = table[q] * d
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.gguf import BLOCKS, GgmlType

IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice what E2M1 stands for
SLICE_BLOCKS_32 = (
    8_192  # 256 k elements: 1 MiB of float32 per temporary, which stays in a core's cache
)


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


def _pairs_of_bits(raw: Tensor) -> Tensor:
    """64 bytes -> [n, 16, 16] of 0 .. 3: each 32 bytes give four runs of 32, from the lowest bits up."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).reshape(1, 1, 4, 1)
    return ((raw.reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 16, 16)


def _q2_k(raw: Tensor) -> Tensor:
    """16 bytes of scale (low half) and minimum (high half), 64 bytes of pairs of bits, d, dmin."""
    scale = _half(raw[:, 80:82]) * (raw[:, :16] & 15).float()
    minimum = _half(raw[:, 82:84]) * (raw[:, :16] >> 4).float()
    q = _pairs_of_bits(raw[:, 16:80]).float()
    return (q * scale.unsqueeze(-1) - minimum.unsqueeze(-1)).flatten(1)


def _q3_k(raw: Tensor) -> Tensor:
    """32 bytes of third bits (0 takes 4 away), 64 of pairs of bits, twelve of 16 6-bit scales, d.

    Scale i has its low four bits in byte i mod 8 (scales 8 .. 15 in the high half), its high two in byte 8 + i mod 4.
    """
    low = torch.cat((raw[:, 96:104] & 15, raw[:, 96:104] >> 4), dim=1)
    high = torch.cat([(raw[:, 104:108] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    scale = _half(raw[:, 108:110]) * ((low | (high << 4)).float() - 32.0)
    bits = torch.arange(8, dtype=torch.uint8).reshape(1, 8, 1)
    third = ((raw[:, :32].unsqueeze(1) >> bits) & 1).reshape(-1, 16, 16)
    q = (_pairs_of_bits(raw[:, 32:96]) | (third << 2)).float() - 4.0
    return (q * scale.unsqueeze(-1)).flatten(1)


def _looked_up(raw: Tensor, table: tuple[int, ...]) -> Tensor:
    return torch.tensor(table, dtype=torch.float32)[_nibbles(raw).int()]


def _iq4_nl(raw: Tensor) -> Tensor:
    return _looked_up(raw[:, 2:], IQ4_TABLE) * _half(raw[:, :2])


def _mxfp4(raw: Tensor) -> Tensor:
    """Read a byte of exponent as half of 2 ** (e - 127), since the table holds doubles; the two smallest are subnormal."""
    exponent = raw[:, :1].int()
    bits = torch.where(exponent < 2, 0x0020_0000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return _looked_up(raw[:, 1:], FP4_TABLE) * bits.view(torch.float32)


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
    GgmlType.Q2_K: _q2_k,
    GgmlType.Q3_K: _q3_k,
    GgmlType.IQ4_NL: _iq4_nl,
    GgmlType.MXFP4: _mxfp4,
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
