"""What an attention backend promises.

A backend holds no policy and no memory beyond the step it was planned for. `plan` sees the shape of a step once and may
prepare masks, index tensors or kernel metadata; `run` is then called once per layer, in layer order. A backend writes
the step's keys and values into the pool itself, as some kernels do both at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from superfluid_core.engine.torch.batch import Batch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a model; `sliding_window` positions are seen at most, None is all."""

    heads: int
    kv_heads: int
    head_dim: int
    sliding_window: int | None = None

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


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
