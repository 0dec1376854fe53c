"""One step as tensors: a ragged, token-major batch.

Owns the translation of StepRows into ids, positions, slots and block tables; decides nothing. All decoding lanes (one
token each) come first, then prompt chunks; there is no padding. Tables are made once a tick, sliced every step.

    tokens   0 .. decodes-1 | chunk 0 ......... | chunk 1 ... |
    rows     0 .. decodes-1 | decodes           | decodes+1   |
    slots    table[row, position // block_tokens] * block_tokens + position % block_tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from superfluid_core.engine.compose import StepRow
from superfluid_core.scheduler.plan import LanePlan


class BlockTables:
    """The blocks of every lane of a tick; short rows are filled up with the lane's own first block."""

    def __init__(self, lanes: Sequence[LanePlan], block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.row_of = {lane.lane: row for row, lane in enumerate(lanes)}
        self.blocks = [lane.blocks for lane in lanes]
        width = max((len(blocks) for blocks in self.blocks), default=0)
        padded = [
            [*blocks, *([blocks[0] if blocks else 0] * (width - len(blocks)))]
            for blocks in self.blocks
        ]
        self.table = torch.tensor(padded, dtype=torch.int64).reshape(len(lanes), width)


@dataclass(frozen=True, slots=True)
class Batch:
    """A step. Tensors of tokens lie on the device; plans of rows stay on the host.

    `contexts[i]` is how many positions row i may see after this step; `starts[i] .. starts[i+1]` are its tokens.
    `sampled` are the token indices whose logits are wanted, in row order; `fresh` the blocks to zero before it runs.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    sampled: Tensor
    tables: Tensor
    blocks: tuple[tuple[int, ...], ...]
    decodes: int
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    contexts: tuple[int, ...]
    fresh: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.starts[-1]


def fresh_tail(row: StepRow, blocks: Sequence[int], block_tokens: int) -> int | None:
    """Find the block that this row opens and leaves partly filled, if any."""
    end = row.position + len(row.inputs)
    tail = (end - 1) // block_tokens
    opens = tail * block_tokens >= row.position
    return blocks[tail] if opens and end % block_tokens else None


def compose_batch(rows: Sequence[StepRow], tables: BlockTables, device: torch.device) -> Batch:
    """Lay the rows of one step out as tensors on `device`."""
    block_tokens = tables.block_tokens
    lengths = tuple(len(row.inputs) for row in rows)
    starts = (0, *accumulate(lengths))
    places = [tables.row_of[row.lane] for row in rows]
    lane_blocks = tuple(tables.blocks[place] for place in places)
    firsts = torch.tensor([row.position for row in rows])
    owners = torch.tensor(places)
    if starts[-1] == len(rows):
        positions = firsts
    else:
        sizes = torch.tensor(lengths)
        shift = (firsts - torch.tensor(starts[:-1])).repeat_interleave(sizes)
        positions = torch.arange(starts[-1]) + shift
        owners = owners.repeat_interleave(sizes)
    block = tables.table[owners, positions // block_tokens]
    fresh = (fresh_tail(row, own, block_tokens) for row, own in zip(rows, lane_blocks, strict=True))
    return Batch(
        ids=torch.tensor(list(chain.from_iterable(row.inputs for row in rows))).to(device),
        positions=positions.to(device),
        slots=(block * block_tokens + positions % block_tokens).to(device),
        sampled=torch.tensor(
            [starts[i + 1] - 1 for i, row in enumerate(rows) if row.samples], dtype=torch.int64
        ).to(device),
        tables=tables.table[places],
        blocks=lane_blocks,
        decodes=sum(1 for row in rows if row.decoding),
        lengths=lengths,
        starts=starts,
        contexts=tuple(row.position + len(row.inputs) for row in rows),
        fresh=tuple(block for block in fresh if block is not None),
    )
