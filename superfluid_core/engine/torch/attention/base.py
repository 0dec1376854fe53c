"""What an attention backend promises.

A backend holds no policy and no memory beyond the step it was planned for. `plan` sees the shape of a step once and may
prepare masks, index tensors or kernel metadata; `run` is then called once per layer, in layer order. A backend writes
the step's keys and values into the pool itself, as some kernels do both at once.

    plan(batch)                      once a step: host columns become whatever the kernels want
    run(layer, q, k, v) -> out       once a layer: store the turned keys and the values, attend
    run_qkv(layer, qkv, turn) -> out the same from the fused projection, for backends that turn and store in one pass
    plan_decode(state)               once for a whole graph of decode steps: all that changes lies in device tensors
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from superfluid_core.engine.torch.batch import Batch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a model; `sliding_window` positions are seen at most, None is all; `full_layers` see all nevertheless.

    `soft_cap` bounds scores to (-soft_cap, soft_cap) by its tanh; 0 leaves them alone.
    """

    heads: int
    kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    soft_cap: float = 0.0
    full_layers: tuple[int, ...] = ()

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def uniform(self, *, is_full: bool) -> AttentionShape:
        """Make the shape of the layers that see everything, or of the others."""
        window = None if is_full else self.sliding_window
        return replace(self, sliding_window=window, full_layers=())


class AttentionBackend(Protocol):
    """Causal attention of a step's tokens over their lanes' blocks."""

    def plan(self, batch: Batch) -> None:
        """Prepare for one step; what `run` needs is kept until the next `plan`."""
        ...

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store keys and values [tokens, kv_heads, head_dim] at the step's slots, then attend.

        `queries` are [tokens, heads, head_dim]; returns [tokens, heads * head_dim]. Mutates only the planned slots.
        """
        ...


@dataclass(frozen=True, slots=True)
class Site:
    """Where a backend would work: what its probe may look at before anything is made."""

    device: torch.device
    dtype: torch.dtype
    block_tokens: int
    shape: AttentionShape


@runtime_checkable
class FusedAttention(Protocol):
    """A backend that turns queries and keys itself, in the pass that stores keys and values."""

    def run_qkv(self, layer: int, qkv: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Do `run` from rows of the fused projection [tokens, heads + 2 kv_heads, head_dim], not yet turned.

        `turn` is (cos, sin), each [tokens, 1, head_dim] float32, the sign of the rotation folded into the sine.
        """
        ...


@dataclass(frozen=True, slots=True)
class DecodeState:
    """One decoding token a row, wholly on the device. The same tensors serve every step; kernels read them anew.

    Row i feeds `ids[i]` at `positions[i]` into the blocks `tables[i]` (int32), that is at `slots[i]` of the pool. Rows that pad
    a batch own a spare block, which no lane has, and stay at position 0.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    tables: Tensor
    context_max: int


@runtime_checkable
class DecodeAttention(Protocol):
    """A backend whose decode steps need nothing from the host, and so can be captured once and replayed."""

    def plan_decode(self, state: DecodeState) -> None:
        """Prepare for steps over `state`: every `run` until the next plan reads its tensors as they then are."""
        ...
