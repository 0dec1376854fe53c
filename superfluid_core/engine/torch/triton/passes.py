"""The passes between products: residual add with norm, gated activation, rotation with the write into the pool.

Each reads its rows once and writes once, where plain torch makes three to five trips through memory. Arithmetic is float32 inside and
rounds to the dtype of the rows where plain torch does: after the add, after the norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from superfluid_core.engine.torch.attention.base import AttentionShape
from superfluid_core.engine.torch.triton.decode import PagedKv

SILU_COLUMNS = 1024


@triton.jit
def add_norm_kernel(
    rows,
    added,
    weight,
    out,
    width,
    eps,
    HAS_ADDED: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PAD)
    is_column = column < width
    x = tl.load(rows + row * width + column, mask=is_column, other=0.0)
    if HAS_ADDED:
        more = tl.load(added + row * width + column, mask=is_column, other=0.0)
        x = (x.to(tl.float32) + more.to(tl.float32)).to(x.dtype)
        tl.store(rows + row * width + column, x, mask=is_column)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = wide * scale * tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, normed.to(out.dtype.element_ty), mask=is_column)


def add_norm(rows: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `added` to `rows` in place if there is any, then return the rows' RMS norm times `weight`."""
    assert rows.is_contiguous(), "the sum would go to a copy"
    width = rows.shape[-1]
    out = torch.empty_like(rows)
    if rows.shape[0]:
        add_norm_kernel[(rows.shape[0],)](
            rows,
            rows if added is None else added.contiguous(),
            weight,
            out,
            width,
            eps,
            HAS_ADDED=added is not None,
            WIDTH_PAD=triton.next_power_of_2(width),
            num_warps=4 if width <= 2048 else 8,
        )
    return out


@triton.jit
def silu_mul_kernel(gate_up, out, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=is_column, other=0.0)
    up = tl.load(gate_up + (row * 2 + 1) * width + column, mask=is_column, other=0.0)
    wide = gate.to(tl.float32)
    opened = (wide * tl.sigmoid(wide)).to(gate.dtype)
    product = opened.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * width + column, product.to(out.dtype.element_ty), mask=is_column)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(first half of each row) * second half."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    if rows:
        silu_mul_kernel[(rows, triton.cdiv(width, SILU_COLUMNS))](
            gate_up.contiguous(), out, width, COLUMNS=SILU_COLUMNS
        )
    return out


@triton.jit
def turn_store_kernel(
    qkv,
    cos,
    sin,
    slots,
    queries,
    keys,
    values,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    TURNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    half: tl.constexpr = HEAD_DIM // 2
    head = tl.arange(0, HEADS_PAD)[:, None]
    dim = tl.arange(0, HALF_PAD)[None, :]
    is_part = (head < HEADS + 2 * KV_HEADS) & (dim < half)
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM + dim
    first = tl.load(source, mask=is_part, other=0.0)
    second = tl.load(source + half, mask=is_part, other=0.0)
    if TURNS:
        angle = token * HEAD_DIM + dim
        is_angle = dim < half
        low, high = first.to(tl.float32), second.to(tl.float32)
        cos_low = tl.load(cos + angle, mask=is_angle, other=0.0)
        cos_high = tl.load(cos + angle + half, mask=is_angle, other=0.0)
        sin_low = tl.load(sin + angle, mask=is_angle, other=0.0)
        sin_high = tl.load(sin + angle + half, mask=is_angle, other=0.0)
        turned_low = (low * cos_low + high * sin_low).to(first.dtype)
        turned_high = (high * cos_high + low * sin_high).to(first.dtype)
        is_turned = head < HEADS + KV_HEADS
        first = tl.where(is_turned, turned_low, first)
        second = tl.where(is_turned, turned_high, second)
    is_query = is_part & (head < HEADS)
    to_query = queries + (token * HEADS + head) * HEAD_DIM + dim
    tl.store(to_query, first, mask=is_query)
    tl.store(to_query + half, second, mask=is_query)
    is_key = is_part & (head >= HEADS) & (head < HEADS + KV_HEADS)
    to_key = keys + (slot * KV_HEADS + head - HEADS) * HEAD_DIM + dim
    tl.store(to_key, first, mask=is_key)
    tl.store(to_key + half, second, mask=is_key)
    is_value = is_part & (head >= HEADS + KV_HEADS)
    to_value = values + (slot * KV_HEADS + head - HEADS - KV_HEADS) * HEAD_DIM + dim
    tl.store(to_value, first, mask=is_value)
    tl.store(to_value + half, second, mask=is_value)


def turn_store(
    qkv: Tensor,
    turn: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    kv: PagedKv,
    shape: AttentionShape,
) -> Tensor:
    """Turn queries and keys, store keys and values at `slots`; returns the queries [tokens, heads, head_dim].

    `qkv` is [tokens, heads + 2 kv_heads, head_dim]; `turn` None means that it is turned already.
    """
    tokens, heads = qkv.shape[0], shape.heads + 2 * shape.kv_heads
    queries = qkv.new_empty((tokens, shape.heads, shape.head_dim))
    if not tokens:
        return queries
    qkv = qkv.contiguous()
    cos, sin = (qkv, qkv) if turn is None else (part.contiguous() for part in turn)
    turn_store_kernel[(tokens,)](
        qkv,
        cos,
        sin,
        slots,
        queries,
        kv.keys,
        kv.values,
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        HEAD_DIM=shape.head_dim,
        HALF_PAD=triton.next_power_of_2(shape.head_dim // 2),
        HEADS_PAD=triton.next_power_of_2(heads),
        TURNS=turn is not None,
    )
    return queries


@triton.jit
def store_kernel(
    from_keys,
    from_values,
    slots,
    keys,
    values,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    column = tl.arange(0, WIDTH_PAD)
    is_column = column < WIDTH
    key = tl.load(from_keys + token * key_stride + column, mask=is_column)
    tl.store(keys + slot * WIDTH + column, key, mask=is_column)
    value = tl.load(from_values + token * value_stride + column, mask=is_column)
    tl.store(values + slot * WIDTH + column, value, mask=is_column)


def store(keys: Tensor, values: Tensor, slots: Tensor, kv: PagedKv):
    """Store keys and values [tokens, kv_heads, head_dim] at `slots`; the rows of a token must be contiguous."""
    width = keys.shape[1] * keys.shape[2]
    if keys.shape[0]:
        store_kernel[(keys.shape[0],)](
            keys,
            values,
            slots,
            kv.keys,
            kv.values,
            keys.stride(0),
            values.stride(0),
            WIDTH=width,
            WIDTH_PAD=triton.next_power_of_2(width),
        )
