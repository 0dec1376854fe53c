"""The scheduler's blocks as sequences of llama.cpp, which knows no blocks: ints only.

llama.cpp tags every cell of its cache with the sequences that it belongs to; copying a range from one sequence to another
adds a tag and moves nothing. So lane n computes in sequence n, and what a lane leaves behind keeps its cells through the tag of a
*shelf*: a sequence in which nobody computes. A lane that finds a prefix gets the tags of its cells.

    shelf s holds at most one block per depth (a block at depth d has the positions d * block_tokens ...)
    a block that a plan is about to write over leaves its shelf first, so cells never outnumber the pool's positions

Without shelves lanes share nothing at all. Shelves are few. When none is free at a depth, the one that was of use longest ago gives way, and what it held is *forgotten*: a
later plan that counts on it is told from where on the prefix has to be computed anew. Nothing here calls llama.cpp; moves are returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Tag(NamedTuple):
    """Let the cells of `source` at positions `first .. end-1` belong to `target` too."""

    source: int
    target: int
    first: int
    end: int


class Untag(NamedTuple):
    """Take positions `first .. end-1` from a sequence; an end of -1 means all that follow."""

    sequence: int
    first: int
    end: int


Move = Tag | Untag


class Placed(NamedTuple):
    """What to do before a lane computes, and how many leading positions it has afterwards."""

    moves: list[Move]
    filled: int


@dataclass(slots=True)
class _Lane:
    table: tuple[int, ...] = ()
    filled: int = 0


@dataclass(slots=True)
class _Shelf:
    """The blocks of a sequence that only keeps, by depth."""

    blocks: dict[int, int] = field(default_factory=dict)


class Sequences:
    """Which sequence has the cells of which block. Sequences 0 .. lanes-1 are lanes, the `shelves` after them keep."""

    def __init__(self, lanes: int, shelves: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._lanes: dict[int, _Lane] = {}
        # in order of use, the longest unused first
        self._shelves = {lanes + number: _Shelf() for number in range(shelves)}
        self._shelved: dict[int, tuple[int, int]] = {}

    def free(self, lane: int) -> list[Move]:
        """Empty a lane that its session leaves: full blocks go to shelves, the rest is gone."""
        held = self._lanes.pop(lane, None)
        if held is None:
            return []
        moves: list[Move] = []
        shelf: int | None = None
        for depth, block in enumerate(held.table[: held.filled // self._block_tokens]):
            if block in self._shelved:
                continue
            if shelf is None or depth in self._shelves[shelf].blocks:
                shelf = self._make_room(depth, moves)
            if shelf is None:
                break
            self._shelves[shelf].blocks[depth] = block
            self._shelved[block] = (shelf, depth)
            self._tag(moves, lane, shelf, depth)
        moves.append(Untag(lane, 0, -1))
        return moves

    def place(self, lane: int, table: tuple[int, ...], computed: int) -> Placed:
        """Bring a lane to `computed` positions of `table`, and make sure that nobody keeps what it will write over.

        Fewer positions than that are there when something was forgotten; the caller computes the rest.
        """
        held = self._lanes.setdefault(lane, _Lane())
        moves: list[Move] = []
        if held.filled > computed:
            moves.append(Untag(lane, computed, -1))
            held.filled = computed
        if table != held.table or held.filled < computed:
            self._exchange(lane, held, table, moves)
            self._take(lane, held, table, computed, moves)
            self._overwrite(table[held.filled // self._block_tokens :], moves)
            held.table = table
        return Placed(moves, held.filled)

    def wrote(self, lane: int, end: int) -> None:
        """Positions up to `end` of a lane are computed."""
        self._lanes[lane].filled = end

    def clear_shelves(self) -> list[Move]:
        """Forget everything that no lane has."""
        return [Untag(shelf, 0, -1) for shelf in self._shelves if self._empty(shelf, 0)]

    # --- within

    def _exchange(self, lane: int, held: _Lane, table: tuple[int, ...], moves: list[Move]) -> None:
        """Where the scheduler found that another block has the same tokens, leave one's own cells for that block's."""
        tokens = self._block_tokens
        for depth in range(min(held.filled // tokens, len(table))):
            if held.table[depth] == table[depth]:
                continue
            source = self._find(depth, table[depth], lane)
            if source is not None:
                moves.append(Untag(lane, depth * tokens, (depth + 1) * tokens))
                self._tag(moves, source, lane, depth)

    def _take(
        self, lane: int, held: _Lane, table: tuple[int, ...], computed: int, moves: list[Move]
    ) -> None:
        """Get the tags of full blocks that a lane counts on and has not computed itself."""
        tokens = self._block_tokens
        for depth in range(held.filled // tokens, computed // tokens):
            source = self._find(depth, table[depth], lane)
            if source is None:
                return
            if held.filled > depth * tokens:
                moves.append(Untag(lane, depth * tokens, -1))
            self._tag(moves, source, lane, depth)
            held.filled = (depth + 1) * tokens

    def _overwrite(self, blocks: Sequence[int], moves: list[Move]) -> None:
        tokens = self._block_tokens
        for block in blocks:
            found = self._shelved.pop(block, None)
            if found is not None:
                shelf, depth = found
                del self._shelves[shelf].blocks[depth]
                moves.append(Untag(shelf, depth * tokens, (depth + 1) * tokens))

    def _find(self, depth: int, block: int, asking: int) -> int | None:
        """Name a sequence other than the asking lane that has this block."""
        if not self._shelves:
            return None
        found = self._shelved.get(block)
        if found is not None and found[1] == depth:
            self._used(found[0])
            return found[0]
        end = (depth + 1) * self._block_tokens
        for lane, held in self._lanes.items():
            if lane != asking and held.filled >= end and held.table[depth] == block:
                return lane
        return None

    def _make_room(self, depth: int, moves: list[Move]) -> int | None:
        """Find a shelf that is free at this depth, or make the one free that was of use longest ago; None without shelves."""
        for shelf, kept in self._shelves.items():
            if depth not in kept.blocks:
                self._used(shelf)
                return shelf
        shelf = next(iter(self._shelves), -1)
        if shelf < 0:
            return None
        self._empty(shelf, depth)
        moves.append(Untag(shelf, depth * self._block_tokens, -1))
        self._used(shelf)
        return shelf

    def _empty(self, shelf: int, depth: int) -> bool:
        """Forget what a shelf holds from a depth on; says whether there was anything."""
        kept = self._shelves[shelf].blocks
        gone = [each for each in kept if each >= depth]
        for each in gone:
            del self._shelved[kept.pop(each)]
        return bool(gone)

    def _used(self, shelf: int) -> None:
        self._shelves[shelf] = self._shelves.pop(shelf)

    def _tag(self, moves: list[Move], source: int, target: int, depth: int) -> None:
        """Add one block's cells to a sequence; neighbours become one move, for each costs a look at every cell."""
        first = depth * self._block_tokens
        end = first + self._block_tokens
        last = moves[-1] if moves else None
        if isinstance(last, Tag) and last[:2] == (source, target) and last.end == first:
            moves[-1] = Tag(source, target, last.first, end)
        else:
            moves.append(Tag(source, target, first, end))
