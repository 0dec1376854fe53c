"""Who is in the fleet while it runs: nodes come, go and change their address without a restart.

A node that is taken out of the fleet file gets no new sessions at once; those that run there move in peace (`relief.py`), and
when none is left, or after `RETIRE_MS_MAX` more than the grace, its link ends. Until then it is still a node, only a leaving
one; named again it simply stays. Nodes that dial in (`joins.py`) are in no list: they come with their first link and go when they
have been gone for long. Tasks belong to the group that the fleet runs in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from superfluid_core.clock import MS, Clock
from superfluid_head.fleet.desk import Desk
from superfluid_head.fleet.directory import NodeAddress
from superfluid_head.fleet.node import FleetNode
from superfluid_head.fleet.relief import Relief

RETIRE_MS_MAX = 60_000


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a new list of nodes changed, by key."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    moved: tuple[str, ...]


@dataclass(slots=True)
class _Leaving:
    """A node on its way out. `address` is where it comes back, if it was named again too late to stay."""

    until_ns: int
    is_cut: bool = False
    address: NodeAddress | None = None


@dataclass(slots=True)
class _Tasks:
    group: asyncio.TaskGroup | None = None
    by_key: dict[str, asyncio.Task[None]] = field(default_factory=dict)


class Members:
    """Adds to and takes from the fleet's own table of nodes."""

    def __init__(
        self,
        nodes: dict[str, FleetNode],
        make: Callable[[NodeAddress], FleetNode],
        desk: Desk,
        relief: Relief,
        clock: Clock,
    ) -> None:
        self._nodes = nodes
        self._make = make
        self._desk = desk
        self._relief = relief
        self._clock = clock
        self._leaving: dict[str, _Leaving] = {}
        self._tasks = _Tasks()

    def start(self, group: asyncio.TaskGroup) -> None:
        """Run every node, and those to come, in `group`."""
        self._tasks.group = group
        for node in self._nodes.values():
            self._run(node)

    def reload(self, addresses: Iterable[NodeAddress], grace_ms: int) -> Reloaded:
        """Make the fleet what the list says. Nodes that stay are not disturbed."""
        wanted = {address.key: address for address in addresses}
        listed = [key for key, node in self._nodes.items() if not node.is_joined]
        removed = [key for key in listed if key not in wanted and key not in self._leaving]
        for key in removed:
            node = self._nodes[key]
            node.set_drained(is_drained=True, is_for_good=True)
            self._relief.begin(node, grace_ms)
            until_ns = self._clock.now_ns() + (grace_ms + RETIRE_MS_MAX) * MS
            self._leaving[key] = _Leaving(until_ns)
        added, moved = [], []
        for key, address in wanted.items():
            if key not in self._nodes:
                self._add(address)
                added.append(key)
                continue
            if key in self._leaving:
                self._stay(key, address)
                added.append(key)
            if self._move(self._nodes[key], address):
                moved.append(key)
        return Reloaded(tuple(added), tuple(removed), tuple(moved))

    def tick(self, now_ns: int) -> None:
        """Part with leaving nodes that are empty, or have taken too long."""
        for key, leaving in list(self._leaving.items()):
            node, task = self._nodes[key], self._tasks.by_key.get(key)
            if not leaving.is_cut and (not node.slots or now_ns >= leaving.until_ns):
                leaving.is_cut = True
                if task is not None:
                    task.cancel()
            if leaving.is_cut and (task is None or task.done()):
                del self._leaving[key]
                self.forget(node)
                if leaving.address is not None:
                    self._add(leaving.address)

    def adopt(self, node: FleetNode) -> None:
        """Take in a node; whoever made it sees to its links."""
        self._nodes[node.key] = node
        self._desk.add(node)

    def forget(self, node: FleetNode) -> None:
        """Strike out a node that carries nothing any more."""
        del self._nodes[node.key]
        self._tasks.by_key.pop(node.key, None)
        self._relief.end(node)
        self._desk.remove(node)
        self._desk.warmth.detach(node.key)

    def _add(self, address: NodeAddress) -> None:
        node = self._make(address)
        self.adopt(node)
        self._run(node)

    def _run(self, node: FleetNode) -> None:
        if self._tasks.group is not None:
            self._tasks.by_key[node.key] = self._tasks.group.create_task(node.run())

    def _stay(self, key: str, address: NodeAddress) -> None:
        if self._leaving[key].is_cut:
            self._leaving[key].address = address
            return
        del self._leaving[key]
        self._relief.end(self._nodes[key])
        self._nodes[key].set_drained(is_drained=False)

    def _move(self, node: FleetNode, address: NodeAddress) -> bool:
        if (node.address.host, node.address.port) == (address.host, address.port):
            return False
        node.relocate(address.host, address.port)
        node.part()
        return True
