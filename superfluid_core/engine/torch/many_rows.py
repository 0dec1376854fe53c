"""Steps of many rows over quantized weights on CPUs with AVX2 (native/many.h): the compiled parts, with products by the file's own weights.

Owns the room that rows are quantized in. Products are those of a small step, row by row, so a prompt's numbers differ from decoding's only
in how attention sums; no dequantized weight is read. Between products everything is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from superfluid_core.engine.torch.models import Decoder
from superfluid_core.engine.torch.native.ops import NativeOps
from superfluid_core.engine.torch.native.structs import Many
from superfluid_core.engine.torch.native_decoder import NativeDecoder
from superfluid_core.engine.torch.quantized import GROUP, QuantizedMatrix, QuantizedWeights
from superfluid_core.engine.torch.small_step import describe_matrix

ROOM_BYTES_A_GROUP = 2 * GROUP + 3 * 4  # two bytes a value; scale, sum, count


def fits_many(decoder: Decoder, ops: NativeOps) -> bool:
    """Whether such products are the best that this CPU has, and rows are float32."""
    return ops.many_block > 0 and decoder.weights.embedding.dtype is torch.float32


class ManyRows(NativeDecoder):
    """A decoder whose products read the quantized weights."""

    def __init__(self, plain: Decoder, ops: NativeOps, quantized: QuantizedWeights) -> None:
        super().__init__(plain, ops)
        self._quantized = quantized
        self._room = torch.empty(0, dtype=torch.uint8)

    def _qkv(self, number: int, normed: Tensor) -> Tensor:
        return self._product(normed, self._quantized.layers[number].qkv)

    def _out(self, number: int, mixed: Tensor) -> Tensor:
        return self._product(mixed, self._quantized.layers[number].out)

    def _mlp(self, number: int, normed: Tensor) -> Tensor:
        matrices = self._quantized.layers[number]
        return self._product(self._product(normed, matrices.gate_up, gated=True), matrices.down)

    def _product(self, x: Tensor, matrix: QuantizedMatrix, *, gated: bool = False) -> Tensor:
        count, block = x.shape[0], self._ops.many_block
        out = x.new_empty((count, matrix.outputs // 2 if gated else matrix.outputs))
        groups = -(-count // block) * block * (matrix.inputs // GROUP)
        if groups * ROOM_BYTES_A_GROUP > self._room.numel():
            self._room = torch.empty(groups * ROOM_BYTES_A_GROUP, dtype=torch.uint8)
        many = Many(x.data_ptr(), out.data_ptr(), count=count, gated=gated)
        many.threads = self._ops.threads
        rows, first = many.rows, self._room.data_ptr()
        rows.values, rows.scales = first, first + groups * 2 * GROUP
        rows.sums, rows.counts = rows.scales + 4 * groups, rows.scales + 8 * groups
        rows.room = block
        self._ops.many(describe_matrix(matrix), many)
        return out
