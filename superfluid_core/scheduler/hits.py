"""Keeps true what waiting sessions would find in the cache, for the policies whose order depends on it.

Nobody scans the queue. A waiting session is filed under the name of the first block that it misses; when that block is published,
everybody under its name is looked at again, a bounded number of blocks a tick, and placed anew. What was evicted
meanwhile is noticed when a session comes up: its hit is counted again before it is believed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from superfluid_core.scheduler.accounts import Accounts
from superfluid_core.scheduler.queues import Queues
from superfluid_core.scheduler.records import Session

_LOOKS_MAX = 256


@dataclass(slots=True, eq=False, repr=False)
class _Group:
    """Sessions that miss the same block first."""

    name: bytes
    members: dict[int, Session] = field(default_factory=dict)


class HitWatch:
    """Owns `hit_tokens` of waiting sessions."""

    def __init__(self, accounts: Accounts, queues: Queues) -> None:
        self._accounts = accounts
        self._queues = queues
        self._groups: dict[bytes, _Group] = {}
        self._group_of: dict[int, _Group] = {}
        self._stirred: deque[_Group] = deque()

    def watch(self, session: Session) -> None:
        """File a waiting session under the block that it misses first."""
        found = session.hit_tokens // self._accounts.shape.block_tokens
        name = self._accounts.block_name(session, found)
        if name is None:
            return
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _Group(name)
            self._accounts.cache.wanted[name] = None
        group.members[session.seq] = session
        self._group_of[session.seq] = group

    def unwatch(self, session: Session) -> None:
        group = self._group_of.pop(session.seq, None)
        if group is None:
            return
        del group.members[session.seq]
        if not group.members and self._groups.get(group.name) is group:
            del self._groups[group.name]
            self._accounts.cache.wanted.pop(group.name, None)

    def settle(self) -> None:
        """Place those anew whose missing block has come, as many as a tick has time for."""
        cache = self._accounts.cache
        for name in cache.arrived:
            group = self._groups.pop(name, None)
            if group is not None:
                self._stirred.append(group)
        cache.arrived.clear()
        looks = _LOOKS_MAX
        while self._stirred and looks > 0:
            members = self._stirred[0].members
            if not members:
                self._stirred.popleft()
                continue
            session = next(iter(members.values()))
            known = session.hit_tokens // self._accounts.shape.block_tokens
            found = self._accounts.count_hits(session, known)
            looks -= 1 + found - known
            self._place(session, found)

    def is_stale(self, session: Session) -> bool:
        """Count the hit of a session that comes up; True when it was another and the session has a new place."""
        known = session.hit_tokens
        self._place(session, self._accounts.count_hits(session))
        return session.hit_tokens != known

    def _place(self, session: Session, found: int) -> None:
        self.unwatch(session)
        tokens = found * self._accounts.shape.block_tokens
        if tokens != session.hit_tokens:
            session.hit_tokens = tokens
            self._queues.refresh(session)
        self.watch(session)
