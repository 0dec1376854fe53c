"""The one decoder that configuration drives, for all families.

Owns the order of the layers; the families differ only in values of ModelConfig, most of them settled when the weights were fused,
the others seen to here (scales of embeddings and logits) and in layers.py. The head is applied to the rows that are sampled and to
no others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by
from torch import Tensor

from superfluid_core.engine.torch.attention.base import AttentionBackend
from superfluid_core.engine.torch.batch import Batch
from superfluid_core.engine.torch.layers import LayerWeights, layer_forward, rms_norm, take_rows
from superfluid_core.engine.torch.linear import Linear
from superfluid_core.engine.torch.rope import RopeTable
from superfluid_core.modelfiles.config import ModelConfig


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Everything that a checkpoint holds, fused and placed."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Linear
    rope: RopeTable


class Decoder:
    """Token ids in, logits of the sampled rows out."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        # as the model has it: a number of the dtype of its rows
        self._scale = weights.embedding.new_tensor(config.embedding_scale).item()

    def forward(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """One step; float32 logits [sampled rows, vocabulary]. Mutates the KV slots that the batch names."""
        x = self.run_layers(batch, attention)
        if batch.sampled.shape[0] == 0:
            return x.new_empty((0, self.config.vocabulary)).float()
        return self.project(take_rows(x, batch.sampled)).float()

    def run_layers(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """Everything below the head, [tokens, hidden]. Mutates the KV slots that the batch names."""
        weights = self.weights
        attention.plan(batch)
        x = F.embedding(batch.ids, weights.embedding)
        if self._scale != 1.0:
            x = x * self._scale
        turn = weights.rope.turn(batch.positions)
        local = turn if weights.rope.local is None else weights.rope.local_turn(batch.positions)
        for number, layer in enumerate(weights.layers):
            own = local if layer.is_local else turn
            x = layer_forward(x, layer, self.config, own, (attention, number))
        return x

    def project(self, x: Tensor) -> Tensor:
        """Logits of rows that left the layers, in the dtype of the weights or wider."""
        config = self.config
        logits = self.weights.head(rms_norm(x, self.weights.final_norm, config.norm_eps))
        if config.logit_divisor != 1.0:
            logits = logits.float() / config.logit_divisor
        if config.logit_soft_cap > 0:
            logits = config.logit_soft_cap * (logits.float() / config.logit_soft_cap).tanh()
        return logits
