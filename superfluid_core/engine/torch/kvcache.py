"""The paged KV pool: one slab of memory that block numbers index.

Owns the tensors and every move inside and out of them; which block belongs to whom is the scheduler's account (ints), and
this file never decides it.

    slab    [layers, 2, blocks, block_tokens, kv_heads, head_dim]      2: keys, values
    slot    block * block_tokens + offset: where one token's row lies
    clear   a block that a step opens but does not fill is zeroed first: padded attention multiplies what lies there
            by zero, and zero times a stale NaN would be NaN
    parked  ticket -> a host copy of some blocks: see cuda/park.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from superfluid_core.clock import SECOND, Clock
from superfluid_core.engine.torch.cuda.park import ParkStore, streams_for
from superfluid_core.limits import MIB

ALIGN_BYTES = 64
PROBE_BYTES = 16 * MIB
PROBE_TICKET = -1
PROBE_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class KvShape:
    """Sizes of a pool, in elements."""

    layers: int
    blocks: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        rows = self.layers * 2 * self.block_tokens
        return rows * self.kv_heads * self.head_dim * self.dtype.itemsize


def _host_slab(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeroed host memory that the operating system hands over page by page as it is first touched."""
    wanted = int(np.prod(sizes)) * dtype.itemsize
    raw = np.zeros(wanted + ALIGN_BYTES, dtype=np.uint8)
    skip = -raw.ctypes.data % ALIGN_BYTES
    return torch.from_numpy(raw)[skip : skip + wanted].view(dtype).view(sizes)


class KvPool:
    """Keys and values of all layers; blocks are named by number."""

    def __init__(self, shape: KvShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        sizes = (
            *(shape.layers, 2, shape.blocks, shape.block_tokens),
            *(shape.kv_heads, shape.head_dim),
        )
        if device.type == "cpu":
            self._slab = _host_slab(sizes, shape.dtype)
        else:
            self._slab = torch.zeros(sizes, dtype=shape.dtype, device=device)
        self._wiped: np.ndarray | None = None
        if device.type == "cpu":
            words = self._slab.flatten().view(torch.uint8).numpy()
            self._wiped = words.reshape(2 * shape.layers, shape.blocks, -1)
        self.keys = [self._slab[layer, 0] for layer in range(shape.layers)]
        self.values = [self._slab[layer, 1] for layer in range(shape.layers)]
        self._key_rows = [keys.flatten(0, 1) for keys in self.keys]
        self._value_rows = [values.flatten(0, 1) for values in self.values]
        self._parked = ParkStore(shape.block_bytes, self.copy_of, self._put, streams_for(device))

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one row per token at its slot; rows are [tokens, kv_heads, head_dim]."""
        self._key_rows[layer].index_copy_(0, slots, keys)
        self._value_rows[layer].index_copy_(0, slots, values)

    def gather(self, layer: int, blocks: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Keys and values of a list of blocks, [tokens, kv_heads, head_dim]; a slice costs no copy."""
        keys, values = self.keys[layer], self.values[layer]
        if isinstance(blocks, slice):
            return keys[blocks].flatten(0, 1), values[blocks].flatten(0, 1)
        return (
            keys.index_select(0, blocks).flatten(0, 1),
            values.index_select(0, blocks).flatten(0, 1),
        )

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero whole blocks in all layers. Most steps clear a few or none: that is not worth waking torch's threads for."""
        if self._wiped is not None:
            for block in blocks:
                self._wiped[:, block] = 0
        elif blocks:
            self._slab.index_fill_(2, self._index(blocks), 0)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks inside the pool; all sources are read before a target is written."""
        if sources:
            self._slab.index_copy_(2, self._index(targets), self.copy_of(sources))

    def copy_of(self, blocks: Sequence[int]) -> Tensor:
        """Copy what lies in `blocks`, in order: [layers, 2, blocks, block_tokens, kv_heads, head_dim]."""
        return self._slab.index_select(2, self._index(blocks))

    def park_out(self, ticket: int, blocks: Sequence[int]) -> None:
        """Keep a host copy of `blocks`, in order, under `ticket`."""
        self._parked.put(ticket, blocks)

    def park_in(self, ticket: int, blocks: Sequence[int]) -> None:
        """Put the first len(blocks) blocks kept under `ticket` into `blocks`; the ticket is used up."""
        self._parked.take(ticket, blocks)

    def synchronize(self) -> None:
        """Wait for what the device still has to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def park_drop(self, ticket: int) -> None:
        """Forget a host copy; a ticket that is already used up is no error."""
        self._parked.drop(ticket)

    def parked(self) -> dict[int, int]:
        """How many blocks are kept under each ticket."""
        return self._parked.counts()

    def _put(self, blocks: Sequence[int], piece: Tensor) -> None:
        self._slab.index_copy_(2, self._index(blocks), piece)

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.device)


class CopyCost(NamedTuple):
    """What moving KV to the host takes, one way: bytes a second, and what a copy takes beside them."""

    bytes_per_s: float
    overhead_ns: int


def copy_cost(pool: KvPool, clock: Clock) -> CopyCost:
    """Time copies of one block and of many, there and back; leaves zeros in the blocks that it used.

    The line through both gives rate and overhead. Where the clock cannot tell them apart, all time is the bytes'.
    """
    many = max(1, min(pool.shape.blocks, PROBE_BYTES // pool.shape.block_bytes))
    one_ns, many_ns = _copy_ns(pool, 1, clock), _copy_ns(pool, many, clock)
    pool.clear(range(many))
    block_bytes = pool.shape.block_bytes
    if many == 1 or many_ns <= one_ns:
        return CopyCost(2 * many * block_bytes * SECOND / max(1, many_ns), 0)
    block_ns = (many_ns - one_ns) / (many - 1)
    overhead_ns = max(0, round((one_ns - block_ns) / 2))
    return CopyCost(2 * block_bytes * SECOND / block_ns, overhead_ns)


def _copy_ns(pool: KvPool, count: int, clock: Clock) -> int:
    """Time to move `count` blocks out and in: the best of a few, the first of which touches the memory for the first time."""
    times = []
    for _ in range(PROBE_ROUNDS):
        began_ns = clock.now_ns()
        pool.park_out(PROBE_TICKET, range(count))
        pool.park_in(PROBE_TICKET, range(count))
        pool.synchronize()
        times.append(clock.now_ns() - began_ns)
    return min(times)
