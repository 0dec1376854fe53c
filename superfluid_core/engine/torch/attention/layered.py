"""Attention of a model whose layers see differently far: two backends of one kind over one pool.

Owns which layer goes to which. Both are planned for every step and store into the same blocks, so a layer with a window keeps the
KV of the whole context like any other: the scheduler's account of blocks is one for all layers.
"""

from __future__ import annotations

from typing import Protocol, cast

from torch import Tensor

from superfluid_core.engine.torch.attention.base import (
    AttentionBackend,
    DecodeAttention,
    DecodeState,
    FusedAttention,
)
from superfluid_core.engine.torch.batch import Batch


class LayeredAttention:
    """Implements AttentionBackend, and what else both of its parts do.

    `run_qkv` and `plan_decode` are there where both have them: whoever asks finds out as for any backend.
    """

    def __init__(
        self, full: AttentionBackend, windowed: AttentionBackend, full_layers: tuple[int, ...]
    ) -> None:
        self.parts = (full, windowed)
        self._full_layers = frozenset(full_layers)
        if all(isinstance(part, FusedAttention) for part in self.parts):
            self.run_qkv = self._run_qkv
        if all(isinstance(part, DecodeAttention) for part in self.parts):
            self.plan_decode = self._plan_decode

    def plan(self, batch: Batch) -> None:
        for part in self.parts:
            part.plan(batch)

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self._part(layer).run(layer, queries, keys, values)

    def _run_qkv(self, layer: int, qkv: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        return cast("_Both", self._part(layer)).run_qkv(layer, qkv, turn)

    def _plan_decode(self, state: DecodeState) -> None:
        for part in self.parts:
            cast("_Both", part).plan_decode(state)

    def _part(self, layer: int) -> AttentionBackend:
        return self.parts[0 if layer in self._full_layers else 1]


class _Both(FusedAttention, DecodeAttention, Protocol):
    """What a part is asked for once it was seen to have it."""
