"""Rotary position embedding: the frequencies of every published scaling, as cosine and sine tables.

Owns positions -> angles; knows nothing of attention. Tables are float32 [window, head_dim] in the half-rotation form:
element j and j + head_dim/2 turn together by angle position * frequency[j]. The sign of the rotation is folded into
the sine table, so applying it is one swap of halves, one multiply and one fused multiply-add.

`dynamic` and `longrope` are fixed at the served window (its published form changes all angles with the longest sequence of a batch,
which would make a lane depend on its neighbours).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from superfluid_core.modelfiles.config import ModelConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class RopeTable:
    """`cos` and signed `sin`, float32 [window, head_dim]. `local`: frequencies of layers that turn otherwise, [head_dim / 2]."""

    cos: Tensor
    sin: Tensor
    local: Tensor | None = None

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Look up what turns rows at `positions`, [tokens, 1, head_dim] each."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)

    def local_turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute what turns rows in layers that turn otherwise."""
        assert self.local is not None
        cos, sin = _both_halves(positions.float().unsqueeze(1) * self.local)
        return cos.unsqueeze(1), sin.unsqueeze(1)


def _both_halves(angles: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)


def _frequencies(theta: float, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (theta**exponents)


def _llama3(base: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, those between blended."""
    wavelength = 2 * math.pi / base
    turns = scaling.original_max_position / wavelength
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * base / scaling.factor + keep * base


def _yarn(base: Tensor, scaling: RopeScaling, theta: float, head_dim: int) -> Tensor:
    """Frequencies that turn more than `beta_fast` times in the original window are kept, under `beta_slow` divided."""

    def dimension(turns: float) -> float:
        span = scaling.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), head_dim - 1)
    width = max(high - low, 0.001)
    divide = ((torch.arange(head_dim // 2).float() - low) / width).clamp(0.0, 1.0)
    return base / scaling.factor * divide + base * (1 - divide)


def _dynamic_theta(theta: float, scaling: RopeScaling, head_dim: int, window: int) -> float:
    original = scaling.original_max_position or window
    if window <= original:
        return theta
    stretch = scaling.factor * window / original - (scaling.factor - 1)
    return float(theta * stretch ** (head_dim / (head_dim - 2)))


def rope_frequencies(
    config: ModelConfig, window: int, factors: Tensor | None = None
) -> tuple[Tensor, float]:
    """Frequencies of what turns of a head, half as many, and the factor that multiplies cosine and sine.

    `factors` are per-frequency divisors that some files carry beside their weights.
    """
    scaling, theta, head_dim = config.rope_scaling, config.rope_theta, config.turned
    magnitude = 1.0
    if scaling.kind == "dynamic":
        theta = _dynamic_theta(theta, scaling, head_dim, window)
    base = _frequencies(theta, head_dim)
    if scaling.kind == "linear":
        base = base / scaling.factor
    elif scaling.kind == "llama3":
        base = _llama3(base, scaling)
    elif scaling.kind == "yarn":
        base = _yarn(base, scaling, theta, head_dim)
        grown = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
        magnitude = grown if scaling.attention_factor is None else scaling.attention_factor
    elif scaling.kind in ("longrope", "long_factors"):
        magnitude = scaling.attention_factor or 1.0
    if scaling.kind == "longrope":
        is_long = window > scaling.original_max_position
        factors = torch.tensor(scaling.long_factors if is_long else scaling.short_factors)
    if factors is not None:
        base = base / factors.float().cpu()
    return base, magnitude


def rope_table(
    config: ModelConfig, window: int, device: torch.device, factors: Tensor | None = None
) -> RopeTable:
    """Tables for positions 0 .. window-1 on `device`. What does not turn of a head lies behind both halves of what does."""
    frequencies, magnitude = rope_frequencies(config, window, factors)
    angles = torch.outer(torch.arange(window).float(), frequencies)
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    still = config.head_dim // 2 - frequencies.shape[0]
    if still:
        cos = torch.cat((cos, torch.ones(window, still)), dim=1)
        sin = torch.cat((sin, torch.zeros(window, still)), dim=1)
    local = _local_frequencies(config)
    return RopeTable(
        torch.cat((cos, cos), dim=1).to(device),
        torch.cat((-sin, sin), dim=1).to(device),
        None if local is None else local.to(device),
    )


def _local_frequencies(config: ModelConfig) -> Tensor | None:
    """Frequencies of the layers with a window, or of those that do not turn."""
    if config.nope_layers:
        return torch.zeros(config.head_dim // 2)
    if config.local_rope_theta:
        return _frequencies(config.local_rope_theta, config.head_dim)
    return None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [tokens, heads, head_dim] by tables [tokens, 1, head_dim]; float32 inside, x's dtype out."""
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(wide * cos, swapped, sin).to(x.dtype)
