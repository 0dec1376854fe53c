"""Which nodes hold which prefix blocks, folded from their reports; answers how much of a context each node has.

A block's name stands for all tokens up to its end (blockhash.py), and nodes forget leaves first: where a block is, all
blocks before it are. Reports are applied whole, so that this holds between any two of them. Hence the nodes that lack the
k-th block of a context only become more as k grows. A name is a key of one table, whose value is the set of nodes that lack it
as the bits of an int: as sets grow, so do the numbers, and where they do is found by bisection.

    2,048 names, 50 nodes that hold different parts of them: 51 bisections instead of 2,048 * 50 look-ups

Sequence numbers have no gaps: after one, or after more blocks than the node has, nothing is believed until its next snapshot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

NOBODY_HOLDS = -1
"""All bits set: the largest of these numbers, which are negative."""


class BlockReport(Protocol):
    """One piece of a report, as the link carries it."""

    @property
    def sequence(self) -> int: ...

    @property
    def piece(self) -> int: ...

    @property
    def pieces(self) -> int: ...

    @property
    def snapshot(self) -> bool: ...

    @property
    def added(self) -> Sequence[bytes]: ...

    @property
    def removed(self) -> Sequence[bytes]: ...


@dataclass(slots=True)
class _Node:
    """One node's blocks. `sequence` is the last report's, None while a snapshot is awaited; `pending` are its pieces."""

    name: str
    bit: int
    blocks_max: int
    blocks: set[bytes] = field(default_factory=set)
    sequence: int | None = None
    pending: list[BlockReport] = field(default_factory=list)
    pending_blocks: int = 0


class _Lacking(dict[bytes, int]):
    """The nodes that lack a block, by its name: for a name that is not here, all of them."""

    __slots__ = ()

    def __missing__(self, name: bytes) -> int:
        return NOBODY_HOLDS


class PrefixIndex:
    """Blocks of all nodes. Bounded by the sum of their block counts."""

    def __init__(self) -> None:
        self._lacking = _Lacking()
        self._nodes: dict[str, _Node] = {}
        self._by_bit: dict[int, str] = {}
        self._free_bits: list[int] = []

    def __len__(self) -> int:
        """Count different blocks."""
        return len(self._lacking)

    def blocks(self, name: str) -> int:
        """Count the blocks of one node."""
        node = self._nodes.get(name)
        return 0 if node is None else len(node.blocks)

    def attach(self, name: str, blocks_max: int) -> None:
        """Expect reports of a node, a snapshot first. What was known of it is forgotten."""
        self.detach(name)
        bit = self._free_bits.pop() if self._free_bits else len(self._nodes)
        self._nodes[name] = _Node(name, bit, blocks_max)
        self._by_bit[bit] = name

    def detach(self, name: str) -> None:
        node = self._nodes.pop(name, None)
        if node is not None:
            self._forget(node)
            del self._by_bit[node.bit]
            self._free_bits.append(node.bit)

    def fold(self, name: str, report: BlockReport) -> bool:
        """Take a report in. False when it broke the order or the bound: then a snapshot has to come."""
        node = self._nodes.get(name)
        if node is None:
            return True
        if not self._continues(node, report):
            was_awaiting = node.sequence is None and not node.pending
            self._forget(node)
            return was_awaiting
        node.pending.append(report)
        node.pending_blocks += len(report.added) + len(report.removed)
        if node.pending_blocks > 2 * node.blocks_max:
            self._forget(node)
            return False
        if report.piece + 1 < report.pieces:
            return True
        return self._apply(node)

    def depths(self, chain: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of `chain` each node holds; nodes that hold none are left out."""
        lacking_of, by_bit = self._lacking.__getitem__, self._by_bit
        found: dict[str, int] = {}
        depth, count = 0, len(chain)
        lacking = lacking_of(chain[0]) if chain else NOBODY_HOLDS
        while lacking != NOBODY_HOLDS:
            depth = bisect_right(chain, lacking, depth + 1, count, key=lacking_of)
            # who lacked a block before this one is out, whatever is said of it here
            after = lacking | lacking_of(chain[depth]) if depth < count else NOBODY_HOLDS
            gone = after ^ lacking
            while gone:
                bit = gone.bit_length() - 1
                found[by_bit[bit]] = depth
                gone ^= 1 << bit
            lacking = after
        return found

    # --- reports ----------------------------------------------------------------------------------

    def _continues(self, node: _Node, report: BlockReport) -> bool:
        """Judge the place of a piece: within its report, and of its report after the last one."""
        if report.piece != len(node.pending) or report.piece >= report.pieces:
            return False
        if node.pending:
            first = node.pending[0]
            return (report.sequence, report.snapshot, report.pieces) == (
                first.sequence,
                first.snapshot,
                first.pieces,
            )
        if report.snapshot:
            return True
        return node.sequence is not None and report.sequence == node.sequence + 1

    def _apply(self, node: _Node) -> bool:
        pieces, node.pending, node.pending_blocks = node.pending, [], 0
        if pieces[0].snapshot:
            self._forget(node)
        node.sequence = pieces[0].sequence
        for piece in pieces:
            for block in piece.removed:
                self._remove(node, block)
        for piece in pieces:
            for block in piece.added:
                self._add(node, block)
        if len(node.blocks) > node.blocks_max:
            self._forget(node)
            return False
        return True

    def _add(self, node: _Node, block: bytes) -> None:
        if block not in node.blocks:
            node.blocks.add(block)
            self._lacking[block] &= ~(1 << node.bit)

    def _remove(self, node: _Node, block: bytes) -> None:
        if block in node.blocks:
            node.blocks.discard(block)
            self._clear(node, block)

    def _clear(self, node: _Node, block: bytes) -> None:
        lacking = self._lacking[block] | 1 << node.bit
        if lacking == NOBODY_HOLDS:
            del self._lacking[block]
        else:
            self._lacking[block] = lacking

    def _forget(self, node: _Node) -> None:
        """Believe nothing of this node until its next snapshot."""
        for block in node.blocks:
            self._clear(node, block)
        node.blocks = set()
        node.sequence = None
        node.pending = []
        node.pending_blocks = 0
