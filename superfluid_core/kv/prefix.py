"""Full blocks that can be found again by the tokens before them, and the order in which they are forgotten.

A tree in a dict: a node's key is its chain hash, its parent the hash before it. A find is verified by tokens and parent,
never by the hash alone. Sessions hold every block from the root to their last, so a node that nobody holds has no
held child, and all idle nodes can be evicted, least recently used leaf first. Pinned nodes go last, the oldest pin
first. This is also the one door to the pool: it alone turns idle blocks into free ones. What is evicted goes to the
host's store, where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from superfluid_core.kv.blocks import BlockPool
from superfluid_core.kv.park import ParkStore

_SLACK = 64


@dataclass(slots=True, eq=False, repr=False)
class _Node:
    name: bytes
    parent: bytes
    tokens: tuple[int, ...]
    block: int
    above: _Node | None
    children: dict[bytes, _Node] | None = None
    stamp: int = 0
    pin: int = 0


class PrefixChanges(NamedTuple):
    """Names that appeared and disappeared since the last look."""

    added: list[bytes]
    removed: list[bytes]


class PrefixCache:
    """Publishes, finds and evicts blocks; allocates from the pool, evicting when it must.

    Who waits for a block to be published puts its name into `wanted`; it moves to `arrived` when it comes.
    """

    def __init__(self, pool: BlockPool, host: ParkStore | None = None) -> None:
        self._pool = pool
        self._host = host or ParkStore(0)
        self._nodes: dict[bytes, _Node] = {}
        self._by_block: dict[int, _Node] = {}
        self._leaves: list[tuple[int, int, bytes]] = []
        self._clock = 0
        self._pins = 0
        self._changes: dict[bytes, bool] = {}
        self.wanted: dict[bytes, None] = {}
        self.arrived: list[bytes] = []
        self.idle = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def reachable(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return self._pool.free + self.idle

    def names(self) -> list[bytes]:
        return list(self._nodes)

    # --- holding ----------------------------------------------------------------------------------

    def allocate(self) -> int:
        """Take a block of one's own, evicting a leaf when none is free. The caller has checked `reachable`."""
        pool = self._pool
        if not pool.free:
            evicted = self.evict_one()
            assert evicted, "nothing is free and nothing is idle"
        return pool.allocate()

    def take(self, block: int) -> None:
        """One more session holds `block`."""
        if self._pool.retain(block):
            self.idle -= 1

    def drop(self, block: int) -> None:
        """Let go of `block` for one session: it stays findable if it was published, else it is free."""
        pool = self._pool
        if not pool.release(block):
            return
        node = self._by_block.get(block)
        if node is None:
            pool.give_back(block)
            return
        self.idle += 1
        self._clock += 1
        node.stamp = self._clock
        if not node.children:
            self._push(node)

    # --- finding ----------------------------------------------------------------------------------

    def find(self, name: bytes, parent: bytes, tokens: tuple[int, ...]) -> int | None:
        """Return the block of `tokens` after `parent`, or None; a hash that lies is a miss."""
        node = self._nodes.get(name)
        if node is None or node.tokens != tokens or node.parent != parent:
            return None
        return node.block

    def publish(
        self, name: bytes, above: int | None, parent: bytes, tokens: tuple[int, ...], block: int
    ) -> int | None:
        """Make a held, full block findable; returns the block that now stands for these tokens.

        `above` is the holder's block before it, None for a first one. An older block is returned when somebody published
        the same tokens first: the caller moves over to it. None: the block stays private, for its name is taken by other
        tokens or what precedes it was withdrawn.
        """
        node = self._nodes.get(name)
        if node is not None:
            same = node.tokens == tokens and node.parent == parent
            return node.block if same else None
        over = None if above is None else self._by_block.get(above)
        if above is not None and (over is None or over.name != parent):
            return None
        node = _Node(name, parent, tokens, block, over)
        self._nodes[name] = node
        self._by_block[block] = node
        if over is not None:
            if over.children is None:
                over.children = {}
            over.children[name] = node
        self._note(name, appeared=True)
        if name in self.wanted:
            del self.wanted[name]
            self.arrived.append(name)
        return block

    def withdraw(self, block: int) -> None:
        """Nobody may find this block again, nor any that was computed on top of it.

        The host forgets all prefixes: what lies there does not know what it was computed on top of.
        """
        self._host.drop_prefixes()
        node = self._by_block.get(block)
        pending = [] if node is None else [node]
        while pending:
            node = pending.pop()
            pending.extend((node.children or {}).values())
            node.children = None
            self._forget(node)
            if not self._pool.references(node.block):
                self.idle -= 1
                self._pool.give_back(node.block)

    # --- forgetting -------------------------------------------------------------------------------

    def evict_one(self, *, to_host: bool = True) -> bool:
        """Free the least recently used idle leaf, keeping a copy in the host; False when nothing is idle."""
        while self._leaves:
            _, stamp, name = heappop(self._leaves)
            node = self._nodes.get(name)
            if node is None or node.stamp != stamp or node.children:
                continue
            if self._pool.references(node.block):
                continue
            self._forget(node)
            if to_host and self._host.is_open:
                self._host.keep_prefix(node.name, node.parent, node.tokens, node.block)
            self.idle -= 1
            self.evicted += 1
            self._pool.give_back(node.block)
            return True
        return False

    def pin(self, name: bytes) -> bool:
        """Evict this node last; False when it is not here."""
        node = self._nodes.get(name)
        if node is None:
            return False
        self._pins += 1
        node.pin = self._pins
        self._repush(node)
        return True

    def unpin(self, name: bytes) -> None:
        node = self._nodes.get(name)
        if node is not None and node.pin:
            node.pin = 0
            self._repush(node)

    def drain_changes(self) -> PrefixChanges:
        """Return what changed since the last call. Bounded by twice the pool: coming and going cancel out."""
        changes = self._changes
        if not changes:
            return PrefixChanges([], [])
        self._changes = {}
        return PrefixChanges(
            [name for name, came in changes.items() if came],
            [name for name, came in changes.items() if not came],
        )

    def _forget(self, node: _Node) -> None:
        del self._nodes[node.name]
        del self._by_block[node.block]
        self._note(node.name, appeared=False)
        above = node.above
        if above is None or above.children is None:
            return
        if above.children.pop(node.name, None) is None:
            return
        if not above.children and not self._pool.references(above.block):
            self._push(above)

    def _note(self, name: bytes, *, appeared: bool) -> None:
        changes = self._changes
        if changes.get(name) is (not appeared):
            del changes[name]
        else:
            changes[name] = appeared

    def _repush(self, node: _Node) -> None:
        if node.children or self._pool.references(node.block):
            return
        self._clock += 1
        node.stamp = self._clock
        self._push(node)

    def _push(self, node: _Node) -> None:
        heappush(self._leaves, (node.pin, node.stamp, node.name))
        if len(self._leaves) > 2 * self._pool.total + _SLACK:
            # stale entries only: each idle leaf has one live entry
            self._leaves = [
                (each.pin, each.stamp, each.name)
                for each in self._nodes.values()
                if not each.children and not self._pool.references(each.block)
            ]
            heapify(self._leaves)
