"""The two ways to multiply by a weight matrix: plain, and packed once for the CPU's bf16 units.

Owns the choice and the probe. The packed operator is private to torch, so it is tried on a small matrix at start; when
it is missing or disagrees with the plain one, everything stays plain. Packing costs a copy of the weight at load time and
saves the reordering that oneDNN otherwise repeats in every call (1.2-1.8 x here).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
PACK_ROWS = 8  # the batch that the packed layout is chosen for


class PlainLinear:
    """x @ weight.T + bias."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """The same product over a weight in oneDNN's own layout."""

    __slots__ = ("bias", "packed")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


@cache
def packing_works() -> bool:
    """Whether the private operator exists here and agrees with the public one."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).bfloat16()
    bias = torch.randn(96, generator=generator).bfloat16()
    x = torch.randn(5, 64, generator=generator).bfloat16()
    try:
        packed = PackedLinear(weight, bias)(x)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return bool(torch.allclose(packed.float(), F.linear(x, weight, bias).float(), atol=0.25))


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Choose the fastest correct product for where the weight lies."""
    if weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and packing_works():
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)
