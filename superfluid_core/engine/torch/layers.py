"""The parts of a decoder layer, as plain values and functions.

Owns the arithmetic between attention calls; knows nothing of lanes, files or sampling. Weights are fused when they are
loaded: query, key and value rows lie in one matrix, gate and up rows in another, so a layer is four products.

    qkv      [heads + 2 kv_heads, head_dim] rows; the first heads + kv_heads are normed and rotated in one go
    gate_up  [2 intermediate] rows: gate, then up
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by
from torch import Tensor

from superfluid_core.engine.torch.attention.base import AttentionBackend
from superfluid_core.engine.torch.linear import Linear
from superfluid_core.engine.torch.rope import rotate
from superfluid_core.modelfiles.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, ready to run. `qk_norm` is [heads + kv_heads, head_dim] or None."""

    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale rows to unit mean square, then by `weight` [width]."""
    return F.rms_norm(x, weight.shape[-1:], weight, eps)


def attention_block(
    x: Tensor,
    weights: LayerWeights,
    config: ModelConfig,
    turn: tuple[Tensor, Tensor],
    attend: tuple[AttentionBackend, int],
) -> Tensor:
    """Map normed rows [tokens, hidden] to what attention adds; `turn` is (cos, sin), `attend` (backend, layer)."""
    both = config.heads + config.kv_heads
    heads = weights.qkv(x).view(x.shape[0], both + config.kv_heads, config.head_dim)
    turned, values = heads[:, :both], heads[:, both:]
    if weights.qk_norm is not None:
        turned = F.rms_norm(turned, (config.head_dim,), None, config.norm_eps) * weights.qk_norm
    backend, layer = attend
    fused = getattr(
        backend, "run_qkv", None
    )  # see FusedAttention; asking for the protocol costs more
    if fused is not None:
        whole = heads if weights.qk_norm is None else torch.cat((turned, values), dim=1)
        out: Tensor = fused(layer, whole, turn)
        return weights.out(out)
    turned = rotate(turned, *turn)
    mixed = backend.run(layer, turned[:, : config.heads], turned[:, config.heads :], values)
    return weights.out(mixed)


def mlp_block(x: Tensor, weights: LayerWeights) -> Tensor:
    """down(silu(gate(x)) * up(x))."""
    gate, up = weights.gate_up(x).chunk(2, dim=-1)
    return weights.down(F.silu(gate) * up)


def layer_forward(
    x: Tensor,
    weights: LayerWeights,
    config: ModelConfig,
    turn: tuple[Tensor, Tensor],
    attend: tuple[AttentionBackend, int],
) -> Tensor:
    """One pre-norm layer; mutates the pool through the backend. The caller's `x` is no more: it may be written to."""
    fused = _fused_layer() if x.is_cuda else None
    if fused is not None:
        return fused(x, weights, config, turn, attend)
    return plain_layer(x, weights, config, turn, attend)


def plain_layer(
    x: Tensor,
    weights: LayerWeights,
    config: ModelConfig,
    turn: tuple[Tensor, Tensor],
    attend: tuple[AttentionBackend, int],
) -> Tensor:
    """Do it with torch alone; `x` stays as it is."""
    normed = rms_norm(x, weights.attention_norm, config.norm_eps)
    x = x + attention_block(normed, weights, config, turn, attend)
    normed = rms_norm(x, weights.mlp_norm, config.norm_eps)
    return x + mlp_block(normed, weights)


@cache
def _fused_layer() -> Callable[..., Tensor] | None:
    """Find the layer whose passes are kernels of our own."""
    if importlib.util.find_spec("triton") is None:
        return None
    from superfluid_core.engine.torch.triton.layer import fused_layer

    return fused_layer


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x by index; all of them without a copy when nothing is left out."""
    return x if rows.shape[0] == x.shape[0] else torch.index_select(x, 0, rows)
