"""Drawing from whole rows without sorting them and without asking the host: the rest of what draw.py leaves open.

Owns one kernel, a program a row. The filters keep a prefix of the row in the order (value descending, id ascending), and so does the draw
pick from it; a prefix of that order is a threshold on the value plus a number of ids tied at it. Thresholds are found by
halving the range of float32 keys, which takes 32 passes over the row and no memory. Rows that 64 candidates settled leave at once, so
a step pays only for the others, and nobody has to know which they are.

    key     the bits of a float32 as an int32 that orders like the float
    above   how many values lie above a key, and their weight; the weight is exp(value - best), summed in float64
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from superfluid_core.engine.torch.draw import DrawColumns

# a row is read a hundred times by one block of threads: a wide tile hides that every read waits for the cache
TILE = 4096
WARPS = 16


@triton.jit
def _key(value):
    # the two zeros are equal: one of them is made the other
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _above(row, width, best, key, TILE: tl.constexpr):
    """Count the values whose key is above `key`, and add up their weights."""
    count = tl.zeros((TILE,), tl.int64)
    weight = tl.zeros((TILE,), tl.float64)
    for first in range(0, width, TILE):
        at = first + tl.arange(0, TILE)
        value = tl.load(row + at, mask=at < width, other=float("-inf"))
        is_above = (at < width) & (_key(value) > key)
        count += is_above.to(tl.int64)
        weight += tl.where(is_above, tl.exp(value - best), 0.0).to(tl.float64)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _find(
    row,
    width,
    best,
    count_max,
    weight_max,
    IS_CLOSED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find the lowest key above which lie fewer than `count_max` values, of less weight than `weight_max` (or as much).

    Returns the key, how many values lie above it, their weight, and the weight of a value at it.
    """
    low = tl.full((), -2147483648, tl.int64)
    high = _key(best).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        count, weight = _above(row, width, best, middle.to(tl.int32), TILE)
        fits = (count < count_max) & (weight < weight_max)
        if IS_CLOSED:
            fits = (count < count_max) & (weight <= weight_max)
        low = tl.where(fits, low, middle + 1)
        high = tl.where(fits, middle, high)
    key = high.to(tl.int32)
    count, weight = _above(row, width, best, key, TILE)
    return key, count, weight, tl.exp(_value(key) - best).to(tl.float64)


@triton.jit
def _best(row, width, TILE: tl.constexpr):
    peak = tl.full((TILE,), float("-inf"), tl.float32)
    for first in range(0, width, TILE):
        at = first + tl.arange(0, TILE)
        peak = tl.maximum(peak, tl.load(row + at, mask=at < width, other=float("-inf")))
    return tl.max(peak, 0)


@triton.jit
def _likely(row, width, best, share, TILE: tl.constexpr):
    """Count the values whose weight is at least `share`."""
    count = tl.zeros((TILE,), tl.int64)
    for first in range(0, width, TILE):
        at = first + tl.arange(0, TILE)
        value = tl.load(row + at, mask=at < width, other=float("-inf"))
        is_likely = (at < width) & (tl.exp(value - best).to(tl.float64) >= share)
        count += is_likely.to(tl.int64)
    return tl.sum(count, 0)


@triton.jit
def _id_at(row, width, key, rank, TILE: tl.constexpr):
    """Find the id that has `rank` among the values at `key`."""
    passed = tl.zeros((), tl.int64)
    answer = tl.zeros((), tl.int64)
    for first in range(0, width, TILE):
        at = first + tl.arange(0, TILE)
        value = tl.load(row + at, mask=at < width, other=float("-inf"))
        is_equal = ((at < width) & (_key(value) == key)).to(tl.int64)
        is_it = (is_equal > 0) & (passed + tl.cumsum(is_equal, 0) - 1 == rank)
        answer += tl.sum(tl.where(is_it, at, 0).to(tl.int64), 0)
        passed += tl.sum(is_equal, 0)
    return answer


@triton.jit
def draw_open_kernel(
    rows,
    settled,
    top_k,
    min_p,
    top_p,
    uniform,
    found,
    width,
    TILE: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    if tl.load(settled + number) == 0:
        row = rows + number * width
        best = _best(row, width, TILE)
        # survivors of top-k and of min-p, and their mass
        seen = tl.minimum(tl.load(top_k + number), width)
        share = tl.load(min_p + number)
        if share > 0:
            seen = tl.minimum(seen, _likely(row, width, best, share, TILE))
        seen = tl.maximum(seen, 1)
        key, count, weight, each = _find(row, width, best, seen, float("inf"), False, TILE)
        limit = tl.load(top_p + number) * (weight + (seen - count).to(tl.float64) * each)
        # of them, those before which less than top-p of the mass lies
        key, count, weight, each = _find(row, width, best, seen, limit, False, TILE)
        below, _ = _above(row, width, best, key - 1, TILE)
        more = tl.maximum(tl.ceil((limit - weight) / each).to(tl.int64), 1)
        kept = tl.minimum(tl.minimum(count + more, below), seen)
        # the first whose cumulative weight exceeds the target
        target = tl.load(uniform + number) * (weight + (kept - count).to(tl.float64) * each)
        key, count, weight, each = _find(row, width, best, kept, target, True, TILE)
        skip = tl.maximum(tl.floor((target - weight) / each).to(tl.int64), 0)
        rank = tl.minimum(skip, kept - 1 - count)
        tl.store(found + number, _id_at(row, width, key, rank, TILE))


def draw_open(
    scaled: Tensor, columns: DrawColumns, uniform: Tensor, settled: Tensor, found: Tensor
):
    """Write the drawn id of every row that is not `settled` into `found`; what draw.py does by sorting them."""
    scaled = scaled.contiguous()
    draw_open_kernel[(scaled.shape[0],)](
        scaled,
        settled.contiguous(),
        columns.top_k.contiguous(),
        columns.min_p.contiguous(),
        columns.top_p.contiguous(),
        uniform.contiguous(),
        found,
        scaled.shape[1],
        TILE=TILE,
        num_warps=WARPS,
    )
