"""Tells heads which prefix blocks are cached: a snapshot first, then what came and went, at most every REPORT_S.

Only heads that named the feature are told. Each model has a cache: its changes are taken once and handed to every link, with a
sequence of its own there. Small pieces leave when the link has nothing else to write, so that tokens do not wait
behind them; a link that is too slow for that gets a new snapshot once what waits for it is gone: heads believe no sequence with a
gap. Hashes only, salted with the fleet's key and the tenant: nobody reads a prompt from them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from superfluid_core.kv.prefix import PrefixChanges
from superfluid_core.limits import KIB, WireLimits
from superfluid_core.wire.messages import Hello, Prefix
from superfluid_core.wire.pieces import split_prefix
from superfluid_noded.heads import Head, Roster

FEATURE = "prefix"
REPORT_S = 0.25
PIECE_BYTES = 64 * KIB
PENDING_MAX = 64
TURNS = 25


class Cache(Protocol):
    """What a scheduler tells of its cached blocks."""

    def prefix_names(self) -> list[bytes]: ...

    def drain_prefix_changes(self) -> PrefixChanges: ...


@dataclass(slots=True)
class _Told:
    """What one link was told: the number of the last report, pieces that still wait, and whether a snapshot has to come."""

    sequence: int = 0
    is_behind: bool = True
    pending: deque[Prefix] = field(default_factory=deque)


class PrefixReports:
    """Reports of all caches, by their engines' numbers, to all links. Nobody else may drain the caches' changes."""

    def __init__(self, caches: Sequence[Cache], roster: Roster) -> None:
        self._caches = tuple(caches)
        self._roster = roster
        # by link, then by engine
        self._told: dict[int, tuple[_Told, ...]] = {}
        self._limits = replace(WireLimits(), prefix_bytes_max=PIECE_BYTES)

    async def tell(self) -> None:
        """Report until cancelled."""
        while True:
            self.report()
            for turn in range(TURNS):
                if not self._has_pending():
                    await asyncio.sleep(REPORT_S * (TURNS - turn) / TURNS)
                    break
                await asyncio.sleep(REPORT_S / TURNS)
                self.send()

    def _has_pending(self) -> bool:
        return any(told.pending for each in self._told.values() for told in each)

    def report(self) -> None:
        """Note what changed, for every link that wants to know."""
        every = [cache.drain_prefix_changes() for cache in self._caches]
        heads: Mapping[int, Head] = self._roster.heads
        self._told = {number: told for number, told in self._told.items() if number in heads}
        for number, head in heads.items():
            if _wants(head):
                told = self._told.get(number)
                if told is None:
                    told = self._told[number] = tuple(_Told() for _ in self._caches)
                for engine, changes in enumerate(every):
                    self._note(told[engine], engine, changes)

    def send(self) -> None:
        """Send what waits, as far as links can take it now."""
        for number, each in self._told.items():
            head = self._roster.heads.get(number)
            for told in each:
                while head is not None and told.pending and _has_room(head):
                    self._roster.send(head, (told.pending.popleft(),))

    def _note(self, told: _Told, engine: int, changes: PrefixChanges) -> None:
        if told.is_behind:
            if not told.pending:
                told.is_behind = False
                names = self._caches[engine].prefix_names()
                self._queue(told, engine, PrefixChanges(names, []), is_snapshot=True)
        elif changes.added or changes.removed:
            if len(told.pending) >= PENDING_MAX:
                told.is_behind = True
            else:
                self._queue(told, engine, changes, is_snapshot=False)

    def _queue(
        self, told: _Told, engine: int, changes: PrefixChanges, *, is_snapshot: bool
    ) -> None:
        told.sequence += 1
        told.pending.extend(
            split_prefix(
                told.sequence,
                changes.added,
                changes.removed,
                self._limits,
                snapshot=is_snapshot,
                engine=engine,
            )
        )


def _wants(head: Head) -> bool:
    hello = head.link.peer
    return isinstance(hello, Hello) and FEATURE in hello.features


def _has_room(head: Head) -> bool:
    """Whether the peer has read what was written before."""
    transport = head.link.transport
    if transport is None or not head.link.is_open:
        return False
    return transport.get_write_buffer_size() < PIECE_BYTES // 4
