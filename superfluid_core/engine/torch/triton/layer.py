"""A decoder layer with its small passes fused: what layers.py computes, in fewer trips through memory.

Owns the order: a norm takes the addition before it along, gate and up meet in one pass, and a backend that turns and stores by itself gets
the projection as it is. Products stay torch's. Used where rows lie on a CUDA device.
"""

from __future__ import annotations

from torch import Tensor

from superfluid_core.engine.torch.attention.base import AttentionBackend
from superfluid_core.engine.torch.layers import LayerWeights, attention_block
from superfluid_core.engine.torch.triton.passes import add_norm, silu_mul
from superfluid_core.modelfiles.config import ModelConfig


def fused_layer(
    x: Tensor,
    weights: LayerWeights,
    config: ModelConfig,
    turn: tuple[Tensor, Tensor],
    attend: tuple[AttentionBackend, int],
) -> Tensor:
    """One pre-norm layer; mutates the pool through the backend, and adds to `x` in place, which it returns."""
    normed = add_norm(x, None, weights.attention_norm, config.norm_eps)
    attended = attention_block(normed, weights, config, turn, attend)
    normed = add_norm(x, attended, weights.mlp_norm, config.norm_eps)
    return x.add_(weights.down(silu_mul(weights.gate_up(normed))))
