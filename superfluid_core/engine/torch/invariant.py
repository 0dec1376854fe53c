"""Batch-invariant steps: every row of numbers comes out of one fixed shape of forward pass.

A lane's positions are cut into tiles of TILE_ROWS. A tile is always computed as a whole: the row of position p at place
p mod TILE_ROWS, over the keys of all tiles up to its own. Places that a step does not compute hold a blank row, whose keys and
values are thrown away. So the shape of every operation and a row's place in it follow from the row's position alone, however
a prompt is cut, whoever runs in other ticks, wherever the blocks lie; and kernels do not mix rows. That last claim is
about this torch on this machine, so `holds` tries it on the loaded weights before it is offered to anybody. The head always
multiplies one row, the one that is sampled: it is as fixed a shape, and blank rows of a large vocabulary are dear.

    positions     0 ..... 31 | 32 ........ 63 | 64 ...          a chunk 20 .. 40 is computed as
    tile 0 of it  blank x 20, rows 20 .. 31     over keys 0 .. 31, hidden ones masked
    tile 1 of it  rows 32 .. 40, blank x 23     over keys 0 .. 63
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by
from torch import Tensor

from superfluid_core.engine.compose import StepRow
from superfluid_core.engine.torch.attention.base import AttentionShape
from superfluid_core.engine.torch.attention.capped import capped_attention
from superfluid_core.engine.torch.batch import Batch, BlockTables, fresh_tail
from superfluid_core.engine.torch.kvcache import KvPool
from superfluid_core.engine.torch.models import Decoder
from superfluid_core.scheduler.plan import LanePlan

# Part of the numbers: see CODE_VERSION. One decoding row costs a whole tile, a prompt one tile per so many tokens; of
# 1, 8, 16, 32, 64 rows the demo model's pass took 35, 38, 39, 47, 57 ms here.
TILE_ROWS = 32
BLANK_ID = 0


@dataclass(frozen=True, slots=True)
class _Tile:
    """One pass. Rows at `real` places are computed for good; `batch.slots` are theirs alone. `full_mask`: of layers without a window."""

    batch: Batch
    real: slice
    blocks: Tensor
    mask: Tensor
    full_mask: Tensor


class _TileAttention:
    """Attention of one tile over the keys of all tiles up to its own; implements `AttentionBackend`.

    Keys and values are copied out of the pool, also where no copy would be needed: how memory is laid out may steer a kernel.
    """

    def __init__(self, pool: KvPool, shape: AttentionShape, tile: _Tile) -> None:
        self._pool = pool
        self._shape = shape
        self._tile = tile

    def plan(self, batch: Batch) -> None:
        """Nothing is left to plan: the tile was."""

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shape, tile = self._shape, self._tile
        self._pool.write(layer, tile.batch.slots, keys[tile.real], values[tile.real])
        mask = tile.full_mask if layer in shape.full_layers else tile.mask
        width = mask.shape[1]
        past = [part[:width].transpose(0, 1) for part in self._pool.gather(layer, tile.blocks)]
        own = queries.view(-1, shape.kv_heads, shape.group, shape.head_dim).permute(1, 2, 0, 3)
        each = [part.unsqueeze(1) for part in past]
        if shape.soft_cap > 0:
            out = capped_attention(own, each[0], each[1], mask, shape.soft_cap)
        else:
            spread = (shape.kv_heads, shape.group, width, shape.head_dim)
            out = F.scaled_dot_product_attention(
                own, each[0].expand(spread), each[1].expand(spread), attn_mask=mask
            )
        return out.permute(2, 0, 1, 3).reshape(queries.shape[0], -1)


class InvariantForward:
    """Runs steps tile by tile through the decoder; mutates the pool's slots that the rows name."""

    def __init__(self, decoder: Decoder, pool: KvPool, shape: AttentionShape) -> None:
        self._decoder = decoder
        self._pool = pool
        self._shape = shape
        self._window = decoder.weights.rope.cos.shape[0]

    def forward(self, rows: Sequence[StepRow], tables: BlockTables) -> Tensor:
        """One step; float32 logits [sampled rows, vocabulary], each a row of a whole tile's."""
        found = []
        for row in rows:
            blocks = tables.blocks[tables.row_of[row.lane]]
            fresh = fresh_tail(row, blocks, tables.block_tokens)
            self._pool.clear([] if fresh is None else [fresh])
            hidden = self._run_row(row, blocks)
            if row.samples:
                place = (row.position + len(row.inputs) - 1) % TILE_ROWS
                found.append(self._decoder.project(hidden[place : place + 1]))
        if not found:
            return torch.empty((0, self._decoder.config.vocabulary), device=self._pool.device)
        return torch.cat(found).float()

    def holds(self) -> bool:
        """Whether a tile gives the same bits as its rows computed in two cuts. Uses, then clears, the first blocks."""
        size = self._pool.shape.block_tokens
        count = min(TILE_ROWS, self._window, self._pool.shape.blocks * size)
        if count < 2:
            return False
        blocks = tuple(range(-(-count // size)))
        ids = [(at * 7919 + 13) % self._decoder.config.vocabulary for at in range(count)]
        tables = BlockTables([LanePlan(0, False, 0, (), 0, 0, blocks)], size)

        def run(*cuts: int) -> tuple[Tensor, Tensor]:
            self._pool.clear(blocks)
            logits = [
                self.forward([StepRow(0, first, tuple(ids[first:end]), True, 0, False)], tables)
                for first, end in pairwise(cuts)
            ]
            return logits[-1], self._pool.copy_of(blocks)

        whole, whole_kv = run(0, count)
        cut, cut_kv = run(0, count - 1, count)
        self._pool.clear(blocks)
        is_finite = bool(whole.isfinite().all())
        return is_finite and torch.equal(whole, cut) and torch.equal(whole_kv, cut_kv)

    def _run_row(self, row: StepRow, blocks: Sequence[int]) -> Tensor:
        """Compute every tile that the row touches, in order; what the last one hands to the head."""
        end = row.position + len(row.inputs)
        hidden = torch.empty(0)
        for number in range(row.position // TILE_ROWS, -(-end // TILE_ROWS)):
            tile = self._tile(row, number, blocks)
            attention = _TileAttention(self._pool, self._shape, tile)
            hidden = self._decoder.run_layers(tile.batch, attention)
        return hidden

    def _tile(self, row: StepRow, number: int, blocks: Sequence[int]) -> _Tile:
        device, size = self._pool.device, self._pool.shape.block_tokens
        start, width = number * TILE_ROWS, (number + 1) * TILE_ROWS
        first, end = max(row.position, start), min(row.position + len(row.inputs), width)
        ids = torch.full((TILE_ROWS,), BLANK_ID)
        inputs = row.inputs[first - row.position : end - row.position]
        ids[first - start : end - start] = torch.tensor(inputs)
        # blocks beyond the context may hold anything, even NaN: the first block stands in, and is masked
        held = list(blocks[: -(-end // size)])
        held += [blocks[0]] * (-(-width // size) - len(held))
        table = torch.tensor(held)
        written = torch.arange(first, end)
        batch = Batch(
            ids=ids.to(device),
            positions=torch.arange(start, width).clamp_(max=self._window - 1).to(device),
            slots=(table[written // size] * size + written % size).to(device),
            sampled=torch.empty(0, dtype=torch.int64),
            tables=table.unsqueeze(0),
            blocks=(tuple(held),),
            decodes=0,
            lengths=(TILE_ROWS,),
            starts=(0, TILE_ROWS),
            contexts=(width,),
            fresh=(),
        )
        window = self._shape.sliding_window
        full_mask = self._mask(start, width, None)
        mask = full_mask if window is None else self._mask(start, width, window)
        real = slice(first - start, end - start)
        return _Tile(batch, real, table.to(device), mask, full_mask)

    def _mask(self, start: int, width: int, window: int | None) -> Tensor:
        """Hidden places as -inf, [TILE_ROWS, width]; blank rows look where a real one would."""
        device = self._pool.device
        seen = torch.arange(width, device=device)
        at = torch.arange(start, width, device=device).unsqueeze(1)
        hidden = seen > at
        if window is not None:
            hidden |= seen <= at - window
        mask = torch.zeros(hidden.shape, dtype=self._pool.shape.dtype, device=device)
        return mask.masked_fill_(hidden, -torch.inf)
