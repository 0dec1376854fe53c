"""The parts of a decoder layer, as plain values and functions.

Owns the arithmetic between attention calls; knows nothing of lanes, files or sampling. Weights are fused when they are
loaded: query, key and value rows lie in one matrix, gate and up rows in another, so a layer is four products.

    qkv      [heads + 2 kv_heads, head_dim] rows; the first heads + kv_heads are normed and rotated in one go
    gate_up  [2 intermediate] rows: gate, then up
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by
from torch import Tensor

from superfluid_core.engine.torch import own_kernels
from superfluid_core.engine.torch.attention.base import AttentionBackend
from superfluid_core.engine.torch.linear import Linear
from superfluid_core.engine.torch.rope import rotate
from superfluid_core.modelfiles.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, ready to run. `qk_norm` is [heads + kv_heads, head_dim] or None.

    What has a default is not of every family: `is_common` says that none of it changes the order of the layer; then fused layers may run it.
    `is_local`: it turns by the table's local frequencies. `query_factor` multiplies queries.
    """

    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    experts: Linear | None = None
    query_factor: float = 1.0
    is_local: bool = False
    is_common: bool = True


def no_product(_x: Tensor) -> Tensor:
    """Stand where a layer of experts has no product of its own."""
    raise AssertionError("a layer of experts was computed as if it had one unit")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale rows to unit mean square, then by `weight` [width]."""
    if weight.dtype is not x.dtype:  # a family that rounds once, after its own float32 weights
        return F.rms_norm(x.float(), weight.shape[-1:], weight, eps).to(x.dtype)
    return F.rms_norm(x, weight.shape[-1:], weight, eps)


def norm_heads(turned: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    """Norm queries and keys [tokens, heads + kv_heads, head_dim], each head by itself or all heads of a kind together."""
    if config.qk_norm_whole:
        parts = zip(
            torch.split(turned, [config.heads, config.kv_heads], dim=1),
            torch.split(weight, [config.heads, config.kv_heads]),
            strict=True,
        )
        normed = [rms_norm(part.flatten(1), own.flatten(), config.norm_eps) for part, own in parts]
        return torch.cat(normed, dim=1).view(turned.shape)
    wide = turned if weight.dtype is turned.dtype else turned.float()
    return (F.rms_norm(wide, (config.head_dim,), None, config.norm_eps) * weight).to(turned.dtype)


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
        turned = norm_heads(turned, weights.qk_norm, config)
    if weights.query_factor != 1.0:
        queries, keys = torch.split(turned, [config.heads, config.kv_heads], dim=1)
        turned = torch.cat((queries * weights.query_factor, keys), dim=1)
    backend, layer = attend
    fused = getattr(
        backend, "run_qkv", None
    )  # see FusedAttention; asking for the protocol costs more
    if fused is not None:
        is_new = weights.qk_norm is not None or weights.query_factor != 1.0
        whole = torch.cat((turned, values), dim=1) if is_new else heads
        out: Tensor = fused(layer, whole, turn)
        return weights.out(out)
    turned = rotate(turned, *turn)
    mixed = backend.run(layer, turned[:, : config.heads], turned[:, config.heads :], values)
    return weights.out(mixed)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Linear] = {"silu": F.silu, "gelu_tanh": gelu_tanh}


def mlp_block(x: Tensor, weights: LayerWeights, act: Linear = F.silu) -> Tensor:
    """down(act(gate(x)) * up(x)), or what the layer's experts say."""
    if weights.experts is not None:
        return weights.experts(x)
    gate, up = weights.gate_up(x).chunk(2, dim=-1)
    return weights.down(act(gate) * up)


def layer_forward(
    x: Tensor,
    weights: LayerWeights,
    config: ModelConfig,
    turn: tuple[Tensor, Tensor],
    attend: tuple[AttentionBackend, int],
) -> Tensor:
    """One pre-norm layer; mutates the pool through the backend. The caller's `x` is no more: it may be written to."""
    if not weights.is_common:
        return family_layer(x, weights, config, turn, attend)
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


def family_layer(
    x: Tensor,
    weights: LayerWeights,
    config: ModelConfig,
    turn: tuple[Tensor, Tensor],
    attend: tuple[AttentionBackend, int],
) -> Tensor:
    """Compute a layer that norms elsewhere, scales what it adds, or has another unit; `x` stays as it is."""
    act, scale, eps = ACTIVATIONS[config.activation], config.residual_scale, config.norm_eps
    norms = (
        (weights.attention_norm, weights.attention_out_norm),
        (weights.mlp_norm, weights.mlp_out_norm),
    )
    for part, (own, leaving) in enumerate(norms):
        entering = x if config.norms == "after" else rms_norm(x, own, eps)
        if part:
            added = mlp_block(entering, weights, act)
        else:
            added = attention_block(entering, weights, config, turn, attend)
        last = own if config.norms == "after" else leaving
        if last is not None:
            added = rms_norm(added, last, eps)
        x = x + (added if scale == 1.0 else added * scale)
    return x


@cache
def _fused_layer() -> Callable[..., Tensor] | None:
    """Find the layer whose passes are kernels of our own."""
    if own_kernels.gap() is not None:
        return None
    from superfluid_core.engine.torch.triton.layer import fused_layer

    return fused_layer


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x by index; all of them without a copy when nothing is left out."""
    return x if rows.shape[0] == x.shape[0] else torch.index_select(x, 0, rows)
