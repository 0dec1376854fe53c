"""Attention of decoding rows over the paged pool: one query token a row, the context split among programs.

Owns the split-KV kernel and the one that joins the splits. All query heads of a key head ride in one tile, so a key is read once. How a row's
context is cut follows from the row's own context and from `SPLITS` alone, never from its neighbours; `SPLITS` is chosen from
the number of rows. Positions and tables are read on the device: a captured launch stays right when they change.

    grid     (rows, kv_heads, SPLITS)           partial: best score, weight, weighted values of one share
    context  floor | share 0 | share 1 | ...    floor: 0, or where the sliding window begins
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from superfluid_core.engine.torch.attention.base import AttentionShape

TILE_TOKENS = 64  # at most: see keys_of_tile
WIDE_BYTES = 512  # of a head; the smallest block of threads has 99 KiB to share, on compute capability 8.6 and 8.9
DOT_ROWS_MIN = 16
SPLITS_MAX = 32


@triton.jit
def places(
    table,
    at,
    is_held,
    kv_head,
    dim,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Find where the elements of one key head lie for positions `at` of a row, [positions, dims]."""
    block = tl.load(table + at // BLOCK_TOKENS, mask=is_held, other=0)
    slot = block.to(tl.int64) * BLOCK_TOKENS + at % BLOCK_TOKENS
    return (slot * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]


@triton.jit
def scores_of(query, key, scale, soft_cap, is_seen, PRECISION: tl.constexpr):
    """Multiply queries with keys; scores for powers of two, what is not seen far below all."""
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    if soft_cap > 0:
        score = soft_cap * (2.0 * tl.sigmoid(2.0 * score / soft_cap) - 1.0)
    return tl.where(is_seen, score * 1.4426950408889634, float("-inf"))


@triton.jit
def absorb(score, value, best, weight, mixed, PRECISION: tl.constexpr):
    """Take a tile of scores and values into the running softmax; a row may see nothing of it, or nothing yet."""
    grown = tl.maximum(best, tl.max(score, 1))
    ground = tl.where(grown == float("-inf"), 0.0, grown)
    faded = tl.exp2(best - ground)
    each = tl.exp2(score - ground[:, None])
    weight = weight * faded + tl.sum(each, 1)
    mixed = mixed * faded[:, None] + tl.dot(each.to(value.dtype), value, input_precision=PRECISION)
    return grown, weight, mixed


@triton.jit(do_not_specialize=["table_stride"])  # a table is as wide as its longest row
def split_kernel(
    queries,
    keys,
    values,
    tables,
    positions,
    partial,
    partial_best,
    partial_weight,
    scale,
    soft_cap,
    window,
    query_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(positions + row).to(tl.int32) + 1
    floor = tl.maximum(context - window, 0)
    share = tl.cdiv(tl.cdiv(context - floor, SPLITS), TILE) * TILE
    start = floor + split * share
    end = tl.minimum(start + share, context)

    group = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, HEAD_PAD)
    is_dim = dim < HEAD_DIM
    is_query = (group < GROUP)[:, None] & is_dim[None, :]
    heads = kv_head * GROUP + group
    query = tl.load(
        queries + row.to(tl.int64) * query_stride + heads[:, None] * HEAD_DIM + dim[None, :],
        mask=is_query,
        other=0.0,
    )
    best = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    weight = tl.zeros((GROUP_PAD,), tl.float32)
    mixed = tl.zeros((GROUP_PAD, HEAD_PAD), tl.float32)
    for first in range(start, end, TILE):
        at = first + tl.arange(0, TILE)
        is_seen = at < end
        where = places(
            tables + row * table_stride, at, is_seen, kv_head, dim, KV_HEADS, HEAD_DIM, BLOCK_TOKENS
        )
        is_held = is_seen[:, None] & is_dim[None, :]
        key = tl.load(keys + where, mask=is_held, other=0.0)
        value = tl.load(values + where, mask=is_held, other=0.0)
        score = scores_of(query, key, scale, soft_cap, is_seen[None, :], PRECISION)
        best, weight, mixed = absorb(score, value, best, weight, mixed, PRECISION)
    place = (row * KV_HEADS * GROUP + heads) * SPLITS + split
    tl.store(partial_best + place, best, mask=group < GROUP)
    tl.store(partial_weight + place, weight, mask=group < GROUP)
    tl.store(partial + place[:, None] * HEAD_DIM + dim[None, :], mixed, mask=is_query)


@triton.jit
def join_kernel(
    partial,
    partial_best,
    partial_weight,
    out,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    place = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, HEAD_PAD)
    is_dim = dim < HEAD_DIM
    best = tl.load(partial_best + place * SPLITS + split)
    share = tl.exp2(best - tl.max(best, 0))
    weight = tl.sum(share * tl.load(partial_weight + place * SPLITS + split), 0)
    where = (place * SPLITS + split)[:, None] * HEAD_DIM + dim[None, :]
    mixed = tl.load(partial + where, mask=is_dim[None, :], other=0.0)
    joined = tl.sum(mixed * share[:, None], 0) / weight
    tl.store(
        out + place.to(tl.int64) * HEAD_DIM + dim, joined.to(out.dtype.element_ty), mask=is_dim
    )


@dataclass(frozen=True, slots=True)
class PagedKv:
    """Keys and values of one layer, [blocks, block_tokens, kv_heads, head_dim] each, contiguous."""

    keys: Tensor
    values: Tensor

    @property
    def block_tokens(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What a decode launch reads beside queries and pool: `positions` [rows] int64, `tables` [rows, width] int32.

    `partial*` is room for the splits, shared by all layers of a step, which run one after another.
    """

    positions: Tensor
    tables: Tensor
    splits: int
    partial: Tensor
    partial_best: Tensor
    partial_weight: Tensor


def splits_for(rows: int, kv_heads: int, context_max: int, processors: int) -> int:
    """Choose a power of two so that the grid fills the device about twice, and no share is below a tile."""
    wanted = max(1, 2 * processors // max(1, rows * kv_heads))
    useful = max(1, -(-context_max // TILE_TOKENS))
    found = 1
    while found * 2 <= min(wanted, useful, SPLITS_MAX):
        found *= 2
    return found


def plan_decode(
    positions: Tensor, tables: Tensor, shape: AttentionShape, splits: int
) -> DecodePlan:
    """Make room for the splits of a step over these rows."""
    places = (positions.shape[0] * shape.heads, splits)
    device = positions.device
    return DecodePlan(
        positions=positions,
        tables=tables,
        splits=splits,
        partial=torch.empty((*places, shape.head_dim), dtype=torch.float32, device=device),
        partial_best=torch.empty(places, dtype=torch.float32, device=device),
        partial_weight=torch.empty(places, dtype=torch.float32, device=device),
    )


def keys_of_tile(head_pad: int, itemsize: int) -> int:
    """Choose how many keys a tile has: as many as fit beside what the other tiles of a block of threads need, on every device."""
    return TILE_TOKENS if head_pad * itemsize <= WIDE_BYTES else TILE_TOKENS // 2


def precision_of(dtype: torch.dtype) -> str:
    """Products of float32 stay float32; narrower numbers have one way only."""
    return "ieee" if dtype is torch.float32 else "tf32"


def attend_decode(
    queries: Tensor, kv: PagedKv, plan: DecodePlan, shape: AttentionShape, out: Tensor
) -> None:
    """Attend rows of queries [rows, heads, head_dim] into `out` of that shape; keys of the step are in the pool already."""
    rows, head_pad = plan.positions.shape[0], triton.next_power_of_2(shape.head_dim)
    dot_pad = max(DOT_ROWS_MIN, head_pad)
    split_kernel[(rows, shape.kv_heads, plan.splits)](
        queries,
        kv.keys,
        kv.values,
        plan.tables,
        plan.positions,
        plan.partial,
        plan.partial_best,
        plan.partial_weight,
        shape.head_dim**-0.5,
        float(shape.soft_cap),
        window_of(shape),
        queries.stride(0),
        plan.tables.stride(0),
        KV_HEADS=shape.kv_heads,
        GROUP=shape.group,
        GROUP_PAD=max(DOT_ROWS_MIN, triton.next_power_of_2(shape.group)),
        HEAD_DIM=shape.head_dim,
        HEAD_PAD=dot_pad,
        BLOCK_TOKENS=kv.block_tokens,
        TILE=keys_of_tile(dot_pad, queries.dtype.itemsize),
        SPLITS=plan.splits,
        PRECISION=precision_of(queries.dtype),
    )
    join_kernel[(rows * shape.heads,)](
        plan.partial,
        plan.partial_best,
        plan.partial_weight,
        out,
        HEAD_DIM=shape.head_dim,
        HEAD_PAD=head_pad,
        SPLITS=plan.splits,
    )


def window_of(shape: AttentionShape) -> int:
    """Say how far back a position looks: the sliding window, or more positions than any context has."""
    return 1 << 30 if shape.sliding_window is None else shape.sliding_window
