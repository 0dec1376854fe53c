"""Steps of few rows, computed as one call over the file's own quantized weights (native/step.h).

Owns the room that such a step needs and the structures that describe model and step to C. Weights are read once per step at half a
byte or one byte each, activations are two int8 in groups of 32 while they are multiplied and float32 otherwise: other numbers than
the plain path's in the last bits, which is why batch-invariant plans never come here. A row's numbers depend on nothing but its own context, not
even on how many rows come along; only which path a step takes does.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from superfluid_core.engine.torch.batch import Batch
from superfluid_core.engine.torch.kvcache import KvPool
from superfluid_core.engine.torch.models import Decoder
from superfluid_core.engine.torch.native.ops import NativeOps, heads_of
from superfluid_core.engine.torch.native.structs import Layer, Matrix, Model, Rows, Step, address
from superfluid_core.engine.torch.quantized import GROUP, QuantizedMatrix, QuantizedWeights

ROWS_MAX = 32
SPAN = 512  # as in step.h
BLOCK_ROWS, TILE_ROWS, TILED_MIN = 16, 4, 3  # as in tiles.h
PHASES_A_LAYER = 10
PHASE_BYTES = 128


def describe_matrix(matrix: QuantizedMatrix) -> Matrix:
    """Describe a matrix to C; its tensors must outlive the description."""
    return Matrix(
        matrix.tiles.data_ptr(),
        address(matrix.bias),
        matrix.kind,
        matrix.outputs,
        matrix.inputs,
        0,
    )


def weight_bytes(weights: QuantizedWeights) -> int:
    """Bytes of all tiles."""
    matrices = [weights.head]
    for layer in weights.layers:
        matrices += [layer.qkv, layer.out, layer.gate_up, layer.down]
    return sum(matrix.tiles.nbytes for matrix in matrices)


def rows_of_blocks(count: int) -> int:
    """Rows that are computed when `count` are: whole blocks of equal size, as tiles.h cuts them."""
    blocks = -(-count // BLOCK_ROWS)
    return count if count < TILED_MIN else blocks * (-(-count // (blocks * TILE_ROWS)) * TILE_ROWS)


class RowsRoom:
    """Room for quantized activations, and its description."""

    def __init__(self, count: int, width: int) -> None:
        count = rows_of_blocks(count)
        groups = count * width // GROUP
        self.values = torch.empty(2 * count * width, dtype=torch.int8)
        self.scales, self.sums = torch.empty(2, groups)
        self.counts = torch.empty(groups, dtype=torch.int32)
        self.described = Rows(
            self.values.data_ptr(),
            self.scales.data_ptr(),
            self.sums.data_ptr(),
            self.counts.data_ptr(),
            count,
        )


class SmallStep:
    """Runs batches of at most ROWS_MAX tokens. Mutates the KV slots that they name."""

    def __init__(
        self, ops: NativeOps, decoder: Decoder, weights: QuantizedWeights, pool: KvPool
    ) -> None:
        self._ops = ops
        self._vocabulary = decoder.config.vocabulary
        self._heads = decoder.config.heads
        self._head_dim = decoder.config.head_dim
        self._kept: list[object] = [weights, decoder, pool]
        self.weight_bytes = weight_bytes(weights)
        self.model = self._describe(decoder, weights, pool)
        self._spans = 0
        self._step = Step(threads=ops.threads)
        self._make_room(decoder)

    def takes(self, batch: Batch) -> bool:
        """Whether a step is small enough."""
        return batch.tokens <= ROWS_MAX

    def forward(self, batch: Batch) -> Tensor:
        """One step; float32 logits [sampled rows, vocabulary]."""
        lanes = torch.arange(len(batch.lengths), dtype=torch.int32)
        if batch.tokens != len(batch.lengths):
            lanes = lanes.repeat_interleave(torch.tensor(batch.lengths))
        blocks = batch.tables.to(torch.int32).contiguous()
        samples = batch.sampled.shape[0]
        logits = torch.empty((samples, self._vocabulary))
        self._widen(-(-max(batch.contexts) // SPAN))
        step = self._step
        step.ids, step.positions = batch.ids.data_ptr(), batch.positions.data_ptr()
        step.slots, step.sampled = batch.slots.data_ptr(), batch.sampled.data_ptr()
        step.blocks, step.lane_of = blocks.data_ptr(), lanes.data_ptr()
        step.tokens, step.samples, step.blocks_width = batch.tokens, samples, blocks.shape[1]
        step.rows.room = rows_of_blocks(batch.tokens)
        step.logits = logits.data_ptr()
        self._ops.step(self.model, step, self._phases)
        return logits

    def _describe(self, decoder: Decoder, weights: QuantizedWeights, pool: KvPool) -> Model:
        config, plain = decoder.config, decoder.weights
        layers = (Layer * config.layers)()
        for number, (layer, products) in enumerate(zip(plain.layers, weights.layers, strict=True)):
            layers[number] = Layer(
                self._float(layer.attention_norm),
                self._float(layer.mlp_norm),
                None if layer.qk_norm is None else self._float(layer.qk_norm),
                describe_matrix(products.qkv),
                describe_matrix(products.out),
                describe_matrix(products.gate_up),
                describe_matrix(products.down),
                pool.keys[number].data_ptr(),
                pool.values[number].data_ptr(),
            )
        self._kept.append(layers)
        return Model(
            heads_of(config, pool.shape.block_tokens),
            config.hidden,
            config.intermediate,
            config.vocabulary,
            config.layers,
            pool.shape.dtype is torch.float32,
            plain.embedding.dtype is torch.float32,
            plain.embedding.data_ptr(),
            self._float(plain.final_norm),
            plain.rope.cos.data_ptr(),
            plain.rope.sin.data_ptr(),
            describe_matrix(weights.head),
            ctypes.cast(layers, ctypes.POINTER(Layer)),
        )

    def _float(self, weight: Tensor) -> int:
        wide = weight.float().contiguous()
        self._kept.append(wide)
        return wide.data_ptr()

    def _room(self, *sizes: int) -> int:
        made = torch.empty(sizes)
        self._kept.append(made)
        return made.data_ptr()

    def _make_room(self, decoder: Decoder) -> None:
        config, step = decoder.config, self._step
        q_width = config.heads * config.head_dim
        wide = max(config.intermediate, config.hidden)
        step.x = self._room(ROWS_MAX, config.hidden)
        step.qkv = self._room(ROWS_MAX, q_width + 2 * config.kv_heads * config.head_dim)
        step.mixed = self._room(ROWS_MAX, q_width)
        step.wide = self._room(ROWS_MAX, wide)
        rows = RowsRoom(ROWS_MAX, max(wide, q_width))
        step.rows = rows.described
        self._phases = config.layers * PHASES_A_LAYER + 2
        phases = torch.zeros((self._phases + 1) * PHASE_BYTES, dtype=torch.uint8)
        self._kept += [rows, phases]
        step.phases = -(-phases.data_ptr() // PHASE_BYTES) * PHASE_BYTES
        self._widen(1)

    def _widen(self, spans: int) -> None:
        """Make room for the partial results of longer contexts; it grows to the longest seen, in doublings."""
        self._step.spans = spans
        if spans <= self._spans:
            return
        self._spans = 1 << (spans - 1).bit_length()
        count = ROWS_MAX * self._spans * self._heads
        self._partial = torch.empty(count, self._head_dim + 2)
        self._step.weighted = self._partial.data_ptr()
        self._step.best = self._step.weighted + count * self._head_dim * 4
        self._step.total = self._step.best + count * 4
