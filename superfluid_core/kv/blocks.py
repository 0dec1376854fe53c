"""The pool of KV blocks as plain numbers: which are free, and how many sessions hold each of the others.

It knows block ids and reference counts; it must not know sessions, tokens, hashes or tensors. A block is *free*, *held*
(one or more references) or *idle* (no reference, not free): idle blocks belong to the prefix cache, which gives them
back. free + held + idle == total, always. Only full blocks are ever shared, so nobody writes into a block with
two holders and copy-on-write is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Size of an engine's KV pool; `window` is the most positions that one session may have.

    `kv_bytes_per_token` is what one position costs in host memory, 0 when the engine cannot move KV there; `host_copy_bytes_per_s`
    is how fast it does, measured by the engine, 0 when unknown; `host_copy_overhead_ns` is what a copy takes beside its bytes.
    """

    block_tokens: int
    blocks: int
    window: int
    kv_bytes_per_token: int = 0
    host_copy_bytes_per_s: float = 0.0
    host_copy_overhead_ns: int = 0

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.kv_bytes_per_token

    @property
    def context_max(self) -> int:
        """The longest context that can exist: its last token needs no KV, for it is never fed."""
        return min(self.window, self.blocks * self.block_tokens + 1)


class BlockPool:
    """Free list and reference counts. Misuse is a broken invariant of ours and asserts."""

    __slots__ = ("_free", "_references", "free", "total")

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._references = [0] * blocks
        # how many are free; nobody else writes it
        self.free = blocks

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self) -> int:
        """Take a free block with one reference. The caller has checked `free`."""
        block = self._free.pop()
        assert self._references[block] == 0, "a free block had a holder"
        self._references[block] = 1
        self.free -= 1
        return block

    def retain(self, block: int) -> bool:
        """Add a holder; True when the block was idle before."""
        self._references[block] = count = self._references[block] + 1
        return count == 1

    def release(self, block: int) -> bool:
        """Remove a holder; True when it was the last one, and the block is idle now."""
        self._references[block] = count = self._references[block] - 1
        assert count >= 0, "a block was released more often than taken"
        return not count

    def give_back(self, block: int) -> None:
        """Make an idle block free."""
        assert self._references[block] == 0, "a held block was given back"
        self._free.append(block)
        self.free += 1
