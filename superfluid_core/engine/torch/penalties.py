"""Counts of what a lane has said, and what that does to its next logits.

Owns two tables, made only when the first lane asks for a penalty: how often each id was generated, and which ids its prompt
holds. The window is the whole session: frequency and presence look at every generated id, repetition at prompt and
generated ids alike. Tables are filled at the lane's start, so a moved or preempted session continues with the same counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PenaltyColumns:
    """Rows of a step that have penalties: which row, which lane, and how much ([rows, 1])."""

    rows: Tensor
    lanes: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


class PenaltyTables:
    """Counts per lane and id."""

    def __init__(self, lanes: int, vocabulary: int, device: torch.device) -> None:
        self._sizes = (lanes, vocabulary)
        self._device = device
        self._generated: Tensor | None = None
        self._prompted: Tensor | None = None

    def start(self, lane: int, prompt: Sequence[int], outputs: Sequence[int]) -> None:
        """Count anew for a lane."""
        generated, prompted = self._tables()
        generated[lane].zero_()
        prompted[lane].zero_()
        said = torch.tensor(outputs, dtype=torch.int64, device=self._device)
        generated[lane].index_add_(0, said, torch.ones_like(said, dtype=torch.int32))
        prompted[lane][torch.tensor(prompt, dtype=torch.int64, device=self._device)] = True

    def add(self, lanes: Tensor, ids: Tensor) -> None:
        """Count one generated id per lane."""
        generated, _ = self._tables()
        generated.index_put_((lanes, ids), torch.ones_like(ids, dtype=torch.int32), accumulate=True)

    def apply(self, logits: Tensor, columns: PenaltyColumns) -> None:
        """Change the rows of `logits` in place: repetition first, then frequency and presence."""
        generated, prompted = self._tables()
        mine = logits[columns.rows]
        counts = generated[columns.lanes]
        said = counts > 0
        repeated = torch.where(mine > 0, mine / columns.repetition, mine * columns.repetition)
        mine = torch.where(said | prompted[columns.lanes], repeated, mine)
        mine = mine - columns.frequency * counts - columns.presence * said
        logits[columns.rows] = mine

    def _tables(self) -> tuple[Tensor, Tensor]:
        if self._generated is None or self._prompted is None:
            self._generated = torch.zeros(self._sizes, dtype=torch.int32, device=self._device)
            self._prompted = torch.zeros(self._sizes, dtype=torch.bool, device=self._device)
        return self._generated, self._prompted
