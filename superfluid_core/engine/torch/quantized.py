"""Weights as their file quantized them, laid out for the product of few rows (native/products.h).

Owns the way from GGUF blocks to tiles: every format becomes groups of 32 inputs with q * scale + minimum, then 16 outputs lie
side by side. Formats of 4 bits keep their very numbers (a K-quant's scales are rounded once to half precision); wider ones become
int8 with one scale a group. A file that holds a plain float matrix gets no tiles at all: it was not meant to be quantized.

    rows    q uint8 [outputs, inputs], scale and minimum float16 [outputs, inputs / 32]
    tiles   uint8 [outputs / 16, inputs / 32, bytes]; kind 4: 320 bytes, kind 8: 544
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from superfluid_core.engine.torch.dequant import dequantize, k_groups
from superfluid_core.modelfiles.config import ModelConfig
from superfluid_core.modelfiles.gguf import BLOCKS, GgmlType

GROUP = 32
TILE = 16
INT8_HALF = 128
PLAIN = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """A matrix in groups; `minimum` is None for int8, whose q are kept 128 higher."""

    q: Tensor
    scale: Tensor
    minimum: Tensor | None

    def reordered(self, order: Callable[[Tensor], Tensor]) -> QuantizedRows:
        """Apply a change of the order of rows."""
        minimum = None if self.minimum is None else order(self.minimum)
        return QuantizedRows(order(self.q), order(self.scale), minimum)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """Tiles of a matrix [outputs, inputs]; `bias` float32, filled up to whole tiles."""

    tiles: Tensor
    kind: int
    outputs: int
    inputs: int
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """The products of one layer. In `gate_up` a tile of gate is followed by its tile of up."""

    qkv: QuantizedMatrix
    out: QuantizedMatrix
    gate_up: QuantizedMatrix
    down: QuantizedMatrix


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """Every matrix of a decoder."""

    layers: tuple[QuantizedLayer, ...]
    head: QuantizedMatrix


class QuantizedSource(Protocol):
    """Where quantized rows and plain tensors come from, by their Hugging Face name."""

    def has(self, name: str) -> bool: ...

    def get(self, name: str) -> Tensor: ...

    def rows(self, name: str) -> QuantizedRows | None: ...


def _blocks(data: memoryview | bytes, kind: GgmlType) -> Tensor:
    raw = np.frombuffer(data, dtype=np.uint8).reshape(-1, BLOCKS[kind][1])
    return torch.from_numpy(raw.copy())


def _half(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16)


def _nibbles(raw: Tensor) -> Tensor:
    return torch.cat((raw & 15, raw >> 4), dim=1)


def read_rows(
    data: memoryview | bytes, kind: GgmlType, shape: tuple[int, ...]
) -> QuantizedRows | None:
    """Read one matrix of a file; None where it is not quantized, or not in whole groups."""
    if kind in PLAIN or len(shape) != 2 or shape[1] % GROUP:
        return None
    groups = (shape[0], shape[1] // GROUP)
    if kind is GgmlType.Q4_K:
        q, scale, minimum = k_groups(_blocks(data, kind))
        return QuantizedRows(
            q.reshape(shape), scale.half().reshape(groups), minimum.half().reshape(groups)
        )
    if kind not in (GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q8_0):
        return to_int8(dequantize(data, kind, shape))
    raw = _blocks(data, kind)
    scale = _half(raw[:, :2]).reshape(groups)
    if kind is GgmlType.Q8_0:
        return QuantizedRows((raw[:, 2:] ^ INT8_HALF).reshape(shape), scale, None)
    if kind is GgmlType.Q4_0:
        minimum = (scale.float() * -8).half()
        return QuantizedRows(_nibbles(raw[:, 2:]).reshape(shape), scale, minimum)
    minimum = _half(raw[:, 2:4]).reshape(groups)
    return QuantizedRows(_nibbles(raw[:, 4:]).reshape(shape), scale, minimum)


def to_int8(weight: Tensor) -> QuantizedRows:
    """Quantize float32 rows to int8, the largest of each group exactly at 127."""
    grouped = weight.reshape(weight.shape[0], -1, GROUP)
    scale = (grouped.abs().amax(-1) / 127).half()
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
    q = (grouped * inverse.unsqueeze(-1)).round().clamp_(-127, 127) + INT8_HALF
    return QuantizedRows(q.to(torch.uint8).reshape(weight.shape), scale, None)


def floats(rows: QuantizedRows) -> Tensor:
    """Write out the numbers that rows stand for, float32 [outputs, inputs]."""
    grouped = rows.q.float().reshape(*rows.scale.shape, GROUP)
    scale = rows.scale.float().unsqueeze(-1)
    if rows.minimum is None:
        return ((grouped - INT8_HALF) * scale).flatten(1)
    return (grouped * scale + rows.minimum.float().unsqueeze(-1)).flatten(1)


def _filled(rows: Tensor) -> Tensor:
    """Rows up to a whole number of tiles; what is added multiplies by a scale of zero."""
    missing = -rows.shape[0] % TILE
    return torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:])))) if missing else rows


def pack(parts: Sequence[QuantizedRows], bias: Tensor | None = None) -> QuantizedMatrix:
    """Lay the rows of all parts, one after the other, out in tiles."""
    if len({part.minimum is None for part in parts}) > 1:
        parts = [to_int8(floats(part)) if part.minimum is not None else part for part in parts]
    outputs, inputs = sum(part.q.shape[0] for part in parts), parts[0].q.shape[1]
    q = _filled(torch.cat([part.q for part in parts]))
    scales = [_halves(torch.cat([part.scale for part in parts]))]
    tiles, groups = q.shape[0] // TILE, inputs // GROUP
    # four inputs go as one word: [tile, group, run of four inputs, output]
    runs = q.view(torch.int32).reshape(tiles, TILE, groups, 8).permute(0, 2, 3, 1).contiguous()
    minima = [part.minimum for part in parts if part.minimum is not None]
    if minima:
        runs = runs[:, :, :4] | (runs[:, :, 4:] << 4)
        scales.append(_halves(torch.cat(minima)))
    runs = runs.view(torch.uint8).reshape(tiles, groups, -1)
    made = torch.cat([runs, *scales], dim=2)
    if bias is not None:
        bias = _filled(bias.float()).contiguous()
    return QuantizedMatrix(made.contiguous(), 4 if minima else 8, outputs, inputs, bias)


def _halves(values: Tensor) -> Tensor:
    """Half numbers [outputs, groups] -> bytes [tiles, groups, 32]."""
    tiles = _filled(values).reshape(-1, TILE, values.shape[1]).transpose(1, 2).contiguous()
    return tiles.view(torch.uint8)


def interleave(gate: QuantizedMatrix, up: QuantizedMatrix) -> QuantizedMatrix:
    """Put every tile of `up` behind the same one of `gate`. Both have whole tiles and one kind."""
    tiles = torch.stack((gate.tiles, up.tiles), dim=1).flatten(0, 1)
    bias = None
    if gate.bias is not None and up.bias is not None:
        bias = torch.stack((gate.bias.view(-1, TILE), up.bias.view(-1, TILE)), dim=1).flatten()
    return QuantizedMatrix(tiles, gate.kind, 2 * gate.outputs, gate.inputs, bias)


class _NotQuantizedError(Exception):
    """A matrix of the model is plain."""


class _Packer:
    """Pulls rows out of a source."""

    def __init__(self, source: QuantizedSource, config: ModelConfig) -> None:
        self._source = source
        self._config = config

    def _rows(self, name: str) -> QuantizedRows:
        rows = self._source.rows(f"{name}.weight")
        if rows is None:
            raise _NotQuantizedError(name)
        return rows

    def matrix(self, names: Sequence[str], *, bias: bool) -> QuantizedMatrix:
        found = torch.cat([self._source.get(f"{name}.bias") for name in names]) if bias else None
        return pack([self._rows(name) for name in names], found)

    def layer(self, number: int) -> QuantizedLayer:
        config, prefix = self._config, f"model.layers.{number}"
        attention = f"{prefix}.self_attn"
        halves = [
            self.matrix([f"{prefix}.mlp.{part}"], bias=config.mlp_bias)
            for part in ("gate_proj", "up_proj")
        ]
        if halves[0].kind != halves[1].kind:
            raise _NotQuantizedError(prefix)
        return QuantizedLayer(
            qkv=self.matrix(
                [f"{attention}.{part}_proj" for part in "qkv"], bias=config.attention_bias
            ),
            out=self.matrix([f"{attention}.o_proj"], bias=config.attention_out_bias),
            gate_up=interleave(halves[0], halves[1]),
            down=self.matrix([f"{prefix}.mlp.down_proj"], bias=config.mlp_bias),
        )


def assemble_quantized(source: QuantizedSource, config: ModelConfig) -> QuantizedWeights | None:
    """Lay all matrices out; None when the file does not hold all of them quantized."""
    packer = _Packer(source, config)
    try:
        top = "model.embed_tokens" if config.tied_embeddings else "lm_head"
        return QuantizedWeights(
            layers=tuple(packer.layer(number) for number in range(config.layers)),
            head=packer.matrix([top], bias=False),
        )
    except _NotQuantizedError:
        return None
