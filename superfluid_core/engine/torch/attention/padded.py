"""Attention with torch's fused kernel: decoding lanes together, prompt chunks one by one.

Decoding lanes are sorted into groups of similar context (the longest at most twice the shortest), each group is gathered
into one padded rectangle and attended in one call: padding never more than doubles the work. A prompt chunk attends to
its own lane only; a first chunk needs no gather at all. Query heads that share a key head ride along as rows of the query, so keys are
never repeated. Masks are made once a step, in the dtype of the scores. Blocks that happen to be consecutive are read as
a slice, without a copy.

    group    queries [lanes, kv_heads, group, head_dim]   keys [lanes, kv_heads, padded, head_dim]
    chunk    queries [kv_heads, group, tokens, head_dim]  keys [kv_heads, 1, context, head_dim] (expanded, not copied)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by
from torch import Tensor

from superfluid_core.engine.torch.attention.base import AttentionShape
from superfluid_core.engine.torch.attention.capped import capped_attention
from superfluid_core.engine.torch.batch import Batch
from superfluid_core.engine.torch.kvcache import KvPool


@dataclass(frozen=True, slots=True)
class _Group:
    """Decoding lanes attended together; `rows` None means all tokens of the step that decode."""

    rows: Tensor | None
    lanes: int
    blocks: Tensor | slice
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A prompt chunk: its tokens, its lane's blocks (None: nothing came before), its mask (None: plainly causal)."""

    tokens: slice
    context: int
    blocks: Tensor | slice | None
    mask: Tensor | None


def _span(blocks: Sequence[int], device: torch.device) -> Tensor | slice:
    """Consecutive blocks as a slice, others as an index tensor."""
    if all(b - a == 1 for a, b in pairwise(blocks)):
        return slice(blocks[0], blocks[-1] + 1)
    return torch.tensor(blocks, device=device)


class PaddedAttention:
    """Gather + scaled_dot_product_attention, grouped."""

    def __init__(self, pool: KvPool, shape: AttentionShape) -> None:
        self._pool = pool
        self._shape = shape
        self._batch: Batch | None = None
        self._groups: list[_Group] = []
        self._chunks: list[_Chunk] = []

    def plan(self, batch: Batch) -> None:
        self._batch = batch
        self._groups = self._plan_decodes(batch)
        self._chunks = [
            self._plan_chunk(batch, row) for row in range(batch.decodes, len(batch.lengths))
        ]

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        batch = self._batch
        assert batch is not None
        self._pool.write(layer, batch.slots, keys, values)
        if len(self._groups) == 1 and not self._chunks:
            return self._attend_group(layer, queries, self._groups[0])
        out = queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2])
        for group in self._groups:
            if group.rows is None:
                out[: batch.decodes] = self._attend_group(layer, queries[: batch.decodes], group)
            else:
                out[group.rows] = self._attend_group(layer, queries[group.rows], group)
        for chunk in self._chunks:
            out[chunk.tokens] = self._attend_chunk(layer, chunk, queries, keys, values)
        return out

    # --- decoding lanes

    def _plan_decodes(self, batch: Batch) -> list[_Group]:
        if not batch.decodes:
            return []
        order = sorted(range(batch.decodes), key=lambda row: batch.contexts[row])
        groups: list[list[int]] = []
        for row in order:
            if groups and batch.contexts[row] <= 2 * max(batch.contexts[groups[-1][0]], 64):
                groups[-1].append(row)
            else:
                groups.append([row])
        if len(groups) == 1:
            return [self._group(batch, range(batch.decodes), None)]
        return [
            self._group(batch, rows, torch.tensor(rows, device=self._pool.device))
            for rows in groups
        ]

    def _group(self, batch: Batch, rows: Sequence[int], index: Tensor | None) -> _Group:
        shape, device = self._pool.shape, self._pool.device
        contexts = [batch.contexts[row] for row in rows]
        width = -(-max(contexts) // shape.block_tokens)
        blocks: Tensor | slice
        if len(rows) == 1:
            blocks = _span(batch.blocks[rows[0]][:width], device)
        else:
            blocks = batch.tables[list(rows), :width].flatten().to(device)
        ends = torch.tensor(contexts, device=device).reshape(-1, 1, 1, 1)
        seen = torch.arange(width * shape.block_tokens, device=device)
        return _Group(index, len(rows), blocks, self._mask(seen >= ends, seen, ends - 1))

    def _mask(self, hidden: Tensor, seen: Tensor, at: Tensor) -> Tensor:
        """Hidden places as -inf to be added to scores; `at` is the position that looks."""
        if self._shape.sliding_window is not None:
            hidden = hidden | (seen <= at - self._shape.sliding_window)
        mask = torch.zeros(hidden.shape, dtype=self._pool.shape.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, -torch.inf)

    def _attend_group(self, layer: int, queries: Tensor, group: _Group) -> Tensor:
        shape = self._shape
        keys, values = self._pool.gather(layer, group.blocks)
        padded = (group.lanes, -1, shape.kv_heads, shape.head_dim)
        if shape.soft_cap > 0:
            own = queries.view(group.lanes, shape.kv_heads, shape.group, shape.head_dim)
            turned = [part.view(padded).transpose(1, 2) for part in (keys, values)]
            capped = capped_attention(own, turned[0], turned[1], group.mask, shape.soft_cap)
            return capped.reshape(group.lanes, -1)
        out = F.scaled_dot_product_attention(
            queries.view(group.lanes, shape.kv_heads, shape.group, shape.head_dim),
            keys.view(padded).transpose(1, 2),
            values.view(padded).transpose(1, 2),
            attn_mask=group.mask,
        )
        return out.reshape(group.lanes, -1)

    # --- prompt chunks

    def _plan_chunk(self, batch: Batch, row: int) -> _Chunk:
        tokens = slice(batch.starts[row], batch.starts[row + 1])
        context, device = batch.contexts[row], self._pool.device
        first = context - batch.lengths[row]
        window = self._shape.sliding_window
        is_plain = self._shape.soft_cap == 0 and (window is None or window >= context)
        if first == 0 and is_plain:
            return _Chunk(tokens, context, None, None)
        width = -(-context // self._pool.shape.block_tokens)
        blocks = _span(batch.blocks[row][:width], device)
        seen = torch.arange(context, device=device)
        at = torch.arange(first, context, device=device).unsqueeze(1)
        return _Chunk(tokens, context, blocks, self._mask(seen > at, seen, at))

    def _attend_chunk(
        self, layer: int, chunk: _Chunk, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        return self._attend_rows(layer, chunk, queries[chunk.tokens], keys, values)

    def _attend_rows(
        self, layer: int, chunk: _Chunk, rows: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attend with the chunk's own rows of queries; keys and values are the step's."""
        shape = self._shape
        mine = rows.view(-1, shape.kv_heads, shape.group, shape.head_dim)
        if chunk.blocks is None:
            keys, values = keys[chunk.tokens], values[chunk.tokens]
        else:
            keys, values = self._pool.gather(layer, chunk.blocks)
            keys, values = keys[: chunk.context], values[: chunk.context]
        if shape.soft_cap > 0:
            assert chunk.mask is not None
            each = [part.transpose(0, 1).unsqueeze(1) for part in (keys, values)]
            capped = capped_attention(
                mine.permute(1, 2, 0, 3), each[0], each[1], chunk.mask, shape.soft_cap
            )
            return capped.permute(2, 0, 1, 3).reshape(mine.shape[0], -1)
        spread = (shape.kv_heads, shape.group, chunk.context, shape.head_dim)
        out = F.scaled_dot_product_attention(
            mine.permute(1, 2, 0, 3),
            keys.transpose(0, 1).unsqueeze(1).expand(spread),
            values.transpose(0, 1).unsqueeze(1).expand(spread),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
        )
        return out.permute(2, 0, 1, 3).reshape(mine.shape[0], -1)
