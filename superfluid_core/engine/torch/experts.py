"""A layer's mixture of experts: a router chooses a few gated units for every row.

Owns the choice and the sum. Rows are sorted by expert, each expert that is used computes its own rows in one product, in the order of
their numbers, so a row's sum does not depend on the order of the batch. How many rows an expert gets does: that is why no lane of such
a model is batch-invariant, and the host has to know the counts, which is why its steps are not recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from superfluid_core.engine.torch.linear import Linear
from superfluid_core.modelfiles.config import Mixture


class Expert(NamedTuple):
    """One gated unit: gate and up rows in one product, then down."""

    gate_up: Linear
    down: Linear


class ExpertsBlock:
    """Maps normed rows [tokens, hidden] to what the experts add."""

    __slots__ = ("_act", "_experts", "_mixture", "_router")

    def __init__(
        self, router: Linear, experts: Sequence[Expert], mixture: Mixture, act: Linear
    ) -> None:
        self._router = router
        self._experts = experts
        self._mixture = mixture
        self._act = act

    def __call__(self, x: Tensor) -> Tensor:
        mixture = self._mixture
        likely = self._router(x).float().softmax(-1)
        weights, chosen = likely.topk(mixture.used, dim=-1)
        if mixture.sums_to_one:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype).flatten()
        flat = chosen.flatten()
        counts: list[int] = torch.bincount(flat, minlength=mixture.count).tolist()
        order = flat.argsort(stable=True)
        out = torch.zeros_like(x)
        for expert, mine in zip(self._experts, torch.split(order, counts), strict=True):
            if mine.shape[0]:
                rows = mine // mixture.used
                gate, up = expert.gate_up(x[rows]).chunk(2, dim=-1)
                added = expert.down(self._act(gate) * up) * weights[mine].unsqueeze(1)
                out.index_add_(0, rows, added)
        return out
