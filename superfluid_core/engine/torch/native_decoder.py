"""The decoder with compiled parts between its products, on a CPU: nine calls a layer.

Owns the order of a layer's parts. The products are the plain decoder's own, torch's; many_rows.py puts others in their place.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by
from torch import Tensor

from superfluid_core.engine.torch.attention.base import AttentionBackend
from superfluid_core.engine.torch.attention.cpu import CpuAttention
from superfluid_core.engine.torch.batch import Batch
from superfluid_core.engine.torch.models import Decoder
from superfluid_core.engine.torch.native.ops import NativeOps


class NativeDecoder(Decoder):
    """See the module's words."""

    def __init__(self, plain: Decoder, ops: NativeOps) -> None:
        super().__init__(plain.config, plain.weights)
        self._ops = ops

    def run_layers(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        assert isinstance(attention, CpuAttention)
        config, ops = self.config, self._ops
        attention.plan(batch)
        heads = (batch.tokens, config.heads + 2 * config.kv_heads, config.head_dim)
        rope = self.weights.rope
        turn = (rope.cos[batch.positions], rope.sin[batch.positions])
        x = F.embedding(batch.ids, self.weights.embedding)
        delta: Tensor | None = None
        for number, layer in enumerate(self.weights.layers):
            normed = ops.add_norm(x, delta, layer.attention_norm, config.norm_eps)
            qkv = self._qkv(number, normed).view(heads)
            delta = self._out(number, attention.run_qkv(number, qkv, turn, layer.qk_norm))
            normed = ops.add_norm(x, delta, layer.mlp_norm, config.norm_eps)
            delta = self._mlp(number, normed)
        return x if delta is None else x.add_(delta)

    def _qkv(self, number: int, normed: Tensor) -> Tensor:
        return self.weights.layers[number].qkv(normed)

    def _out(self, number: int, mixed: Tensor) -> Tensor:
        return self.weights.layers[number].out(mixed)

    def _mlp(self, number: int, normed: Tensor) -> Tensor:
        layer = self.weights.layers[number]
        return layer.down(self._ops.silu_times(layer.gate_up(normed)))
