"""Attention of prompt chunks over the paged pool: a ragged, token-major batch without padding between rows.

Owns the tiled causal kernel. A tile is some consecutive tokens of one row with all query heads of one key head; work lists say which row
and which of its tokens each program has. Keys and values of the chunk itself are read from the pool too, where they were stored
just before: a first chunk, a later one and a resumed one are the same to it.

    tile     TILE_ROWS queries = tokens x group; keys TILE_TOKENS at a time, from the window's floor to the tile's last position
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from superfluid_core.engine.torch.attention.base import AttentionShape
from superfluid_core.engine.torch.triton.decode import (
    WIDE_BYTES,
    PagedKv,
    absorb,
    places,
    precision_of,
    scores_of,
    window_of,
)

TILE_ROWS = 64
TILE_TOKENS = 64  # at most: see keys_of_tile
DOT_WIDTH_MIN = 16


@triton.jit(do_not_specialize=["table_stride"])  # a table is as wide as its longest row
def prefill_kernel(
    queries,
    keys,
    values,
    out,
    tables,
    rows,
    firsts,
    starts,
    lengths,
    contexts,
    scale,
    soft_cap,
    window,
    query_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(rows + tile)
    first = tl.load(firsts + tile)
    start = tl.load(starts + row)
    length = tl.load(lengths + row)
    past = tl.load(contexts + row) - length

    place = tl.arange(0, ROWS)
    token = first + place // GROUP
    head = kv_head * GROUP + place % GROUP
    is_row = (place < (ROWS // GROUP) * GROUP) & (token < length)
    dim = tl.arange(0, HEAD_PAD)
    is_dim = dim < HEAD_DIM
    is_query = is_row[:, None] & is_dim[None, :]
    own = (start + token).to(tl.int64)[:, None]
    inner = head[:, None] * HEAD_DIM + dim[None, :]
    query = tl.load(queries + own * query_stride + inner, mask=is_query, other=0.0)
    looks = past + token
    last = past + tl.minimum(first + ROWS // GROUP, length)
    floor = tl.maximum(past + first + 1 - window, 0) // TILE * TILE
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, HEAD_PAD), tl.float32)
    for begin in range(floor, last, TILE):
        at = begin + tl.arange(0, TILE)
        is_held = at < last
        where = places(
            tables + row * table_stride, at, is_held, kv_head, dim, KV_HEADS, HEAD_DIM, BLOCK_TOKENS
        )
        is_there = is_held[:, None] & is_dim[None, :]
        key = tl.load(keys + where, mask=is_there, other=0.0)
        value = tl.load(values + where, mask=is_there, other=0.0)
        is_seen = (at[None, :] <= looks[:, None]) & (at[None, :] > looks[:, None] - window)
        score = scores_of(query, key, scale, soft_cap, is_seen & is_held[None, :], PRECISION)
        best, weight, mixed = absorb(score, value, best, weight, mixed, PRECISION)
    mixed = mixed / tl.where(weight > 0, weight, 1.0)[:, None]
    target = out + own * KV_HEADS * GROUP * HEAD_DIM + inner
    tl.store(target, mixed.to(out.dtype.element_ty), mask=is_query)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Chunks of a step: `starts`, `lengths`, `contexts` and `tables` by row, `rows` and `firsts` by tile; all int32."""

    starts: Tensor
    lengths: Tensor
    contexts: Tensor
    tables: Tensor
    rows: Tensor
    firsts: Tensor


def tiles_of(lengths: Sequence[int], group: int) -> tuple[list[int], list[int]]:
    """Cut rows of that many tokens into tiles: whose each is, and its first token."""
    tokens = tile_tokens(group)
    rows = [row for row, length in enumerate(lengths) for _ in range(0, length, tokens)]
    firsts = [first for length in lengths for first in range(0, length, tokens)]
    return rows, firsts


def tile_tokens(group: int) -> int:
    """Tokens of one tile; a group wider than a tile has a tile as wide as itself."""
    return tile_rows(group) // group


def keys_of_tile(head_pad: int, itemsize: int) -> int:
    """Choose how many keys a tile has: queries are as many as rows of it, and all of it fits where 99 KiB are shared."""
    width = head_pad * itemsize
    if width < WIDE_BYTES:
        return TILE_TOKENS
    return TILE_TOKENS // 2 if width == WIDE_BYTES else TILE_TOKENS // 4


def tile_rows(group: int) -> int:
    return max(TILE_ROWS, int(triton.next_power_of_2(group)))


def plan_prefill(
    starts: Sequence[int],
    lengths: Sequence[int],
    contexts: Sequence[int],
    tables: Tensor,
    group: int,
) -> PrefillPlan:
    """Lay a step's chunks out; `tables` [rows, width] int32 says the device."""
    rows, firsts = tiles_of(lengths, group)
    packed = torch.tensor([*starts, *lengths, *contexts, *rows, *firsts], dtype=torch.int32)
    count, tiles = len(lengths), len(rows)
    parts = packed.to(tables.device).split((count, count, count, tiles, tiles))
    return PrefillPlan(parts[0], parts[1], parts[2], tables, parts[3], parts[4])


def attend_prefill(
    queries: Tensor, kv: PagedKv, plan: PrefillPlan, shape: AttentionShape, out: Tensor
) -> None:
    """Attend the chunks' tokens; `queries` and `out` are [tokens, heads, head_dim] of the whole step."""
    head_pad = max(DOT_WIDTH_MIN, triton.next_power_of_2(shape.head_dim))
    prefill_kernel[(plan.rows.shape[0], shape.kv_heads)](
        queries,
        kv.keys,
        kv.values,
        out,
        plan.tables,
        plan.rows,
        plan.firsts,
        plan.starts,
        plan.lengths,
        plan.contexts,
        shape.head_dim**-0.5,
        float(shape.soft_cap),
        window_of(shape),
        queries.stride(0),
        plan.tables.stride(0),
        KV_HEADS=shape.kv_heads,
        GROUP=shape.group,
        HEAD_DIM=shape.head_dim,
        HEAD_PAD=head_pad,
        BLOCK_TOKENS=kv.block_tokens,
        ROWS=tile_rows(shape.group),
        TILE=keys_of_tile(head_pad, queries.dtype.itemsize),
        PRECISION=precision_of(queries.dtype),
        num_warps=4 if shape.head_dim <= 64 else 8,
    )
