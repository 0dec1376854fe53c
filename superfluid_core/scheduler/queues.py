"""The waiting sessions: one queue per class, served best class first, with aging between the classes (S3, S4).

Each class keeps its order per tenant in heaps with lazy deletion: an entry is void once its session's ticket moved on.
A class is as old as its longest waiter: nobody hides behind a younger head. Cost grows with what changed, never
with what waits. Preempted sessions stand before all others of their class, the last one put back first. Behind them stand those
that another node began: their readers are in mid-sentence. They take turns with whoever starves, so that no stream of them
keeps a newcomer waiting for ever; among themselves they have the policy's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from superfluid_core.scheduler.policies import QueuePolicy
from superfluid_core.scheduler.records import Phase, Session
from superfluid_core.session import QosClass

_SLACK = 64
# Places before all others of a class: those that another node began share one, each preempted one has its own before it.
_CONTINUED = -1
# front, policy key, arrival, ticket: no two entries are equal, so sessions are never compared
_Order = tuple[int, int, int, int]
_Entry = tuple[_Order, Session]
_Head = tuple[int, int, _Order, str]
IsCapped = Callable[[str], bool]


class _Heap:
    """Sessions by an order that is fixed when they enter."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self.live = 0

    def push(self, order: _Order, session: Session) -> None:
        heappush(self._entries, (order, session))
        self.live += 1
        if len(self._entries) > 2 * self.live + _SLACK:
            self._entries = [entry for entry in self._entries if _is_valid(entry)]
            heapify(self._entries)

    def first(self) -> _Entry | None:
        while self._entries:
            if _is_valid(self._entries[0]):
                return self._entries[0]
            heappop(self._entries)
        return None


def _is_valid(entry: _Entry) -> bool:
    return entry[0][3] == entry[1].ticket


class ClassQueue:
    """One class: a heap per tenant, a heap of tenants, and who has waited longest."""

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._tenants: dict[str, _Heap] = {}
        # lower bounds of each tenant's place; refreshed when they come up
        self._heads: list[_Head] = []
        # the newest entry of each tenant is the one that counts: without it every stale one would be pushed anew
        self._newest: dict[str, _Head] = {}
        self._waiters = _Heap()
        self._capped: set[str] = set()
        self._was_continued = False
        self.live = 0

    def push(self, session: Session) -> None:
        tenant = session.spec.tenant
        order = (session.front, self._policy.key(session), session.seq, session.ticket)
        heap = self._tenants.setdefault(tenant, _Heap())
        heap.push(order, session)
        self._waiters.push((session.queued_ns, 0, session.seq, session.ticket), session)
        self.live += 1
        first = heap.first()
        if first is not None and first[0] == order:
            self._push_head(tenant, order)

    def on_removed(self, session: Session) -> None:
        """Note that the session's ticket moved on: its entries are void."""
        tenant = session.spec.tenant
        heap = self._tenants[tenant]
        heap.live -= 1
        if not heap.live:
            del self._tenants[tenant]
        self._waiters.live -= 1
        self.live -= 1

    def on_taken(self, session: Session) -> None:
        """Note who got a lane: who was begun elsewhere, and one that starves, take turns."""
        if session.front in (0, _CONTINUED):
            self._was_continued = session.front == _CONTINUED

    def uncap(self, tenant: str) -> None:
        """Note that the tenant is below its lane cap again."""
        if tenant not in self._capped:
            return
        self._capped.discard(tenant)
        heap = self._tenants.get(tenant)
        first = heap.first() if heap is not None else None
        if first is not None:
            self._push_head(tenant, first[0])

    def waiter(self) -> Session | None:
        """Who has waited longest."""
        entry = self._waiters.first()
        return entry[1] if entry is not None else None

    def peek(self, period_ns: int, now_ns: int, is_capped: IsCapped) -> Session | None:
        """Who is next; sessions of tenants at their lane cap are passed over."""
        session = self._head(is_capped)
        if session is None or session.front < _CONTINUED:
            return session
        if not (self._was_continued if session.front else self._policy.ages):
            return session
        oldest = self.waiter()
        if oldest is None or not oldest.has_waited(period_ns, now_ns):
            return session
        return session if is_capped(oldest.spec.tenant) else oldest

    def _head(self, is_capped: IsCapped) -> Session | None:
        while self._heads:
            order, tenant = self._heads[0][2:]
            heap = self._tenants.get(tenant)
            first = heap.first() if heap is not None else None
            if self._newest.get(tenant) != self._heads[0]:
                heappop(self._heads)
            elif first is None or tenant in self._capped:
                heappop(self._heads)
                del self._newest[tenant]
            elif first[0] != order or self._place(tenant, order) != self._heads[0][:2]:
                heappop(self._heads)
                self._push_head(tenant, first[0])
            elif is_capped(tenant):
                heappop(self._heads)
                del self._newest[tenant]
                self._capped.add(tenant)
            else:
                return first[1]
        return None

    def _place(self, tenant: str, order: _Order) -> tuple[int, int]:
        return (min(order[0], 0), self._policy.tenant_key(tenant))

    def _push_head(self, tenant: str, order: _Order) -> None:
        entry = (*self._place(tenant, order), order, tenant)
        self._newest[tenant] = entry
        heappush(self._heads, entry)
        if len(self._heads) > 2 * len(self._tenants) + _SLACK:
            self._newest = {}
            for name, heap in self._tenants.items():
                first = heap.first()
                if first is not None and name not in self._capped:
                    self._newest[name] = (*self._place(name, first[0]), first[0], name)
            self._heads = list(self._newest.values())
            heapify(self._heads)


class Queues:
    """All classes. Owns `queued_ns`, `ticket` and `front` of sessions."""

    def __init__(self, policy: QueuePolicy, period_ns: int) -> None:
        self.policy = policy
        self.period_ns = period_ns
        self._classes = {qos: ClassQueue(policy) for qos in QosClass}
        self._by_rank = list(self._classes.values())
        self._members: dict[int, Session] = {}
        self._fronts = _CONTINUED
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._members.values())

    def __contains__(self, session: Session) -> bool:
        return session.seq in self._members

    def depth(self, qos: QosClass) -> int:
        return self._classes[qos].live

    def ahead_of(self, qos: QosClass) -> int:
        """Sessions of this class or better."""
        return sum(queue.live for queue in self._by_rank[: qos + 1])

    def add(self, session: Session, now_ns: int) -> None:
        """Take a newcomer, behind those who came before it; one that another node began, before the others."""
        session.queued_ns = now_ns
        session.front = _CONTINUED if session.spec.delivered else 0
        self._enter(session)

    def put_back(self, session: Session, now_ns: int) -> None:
        """Take back a preempted session, before all others of its class: behind them it could livelock."""
        self._fronts -= 1
        session.front = self._fronts
        session.queued_ns = now_ns
        self._enter(session)

    def remove(self, session: Session) -> None:
        """Taken by a lane, or ended."""
        session.ticket += 1
        del self._members[session.seq]
        self.tokens -= len(session.context)
        self._classes[session.qos].on_removed(session)

    def take(self, session: Session) -> None:
        """Give the session to a lane: its place of honour, if it had one, is used up."""
        self.remove(session)
        self._classes[session.qos].on_taken(session)
        session.front = 0

    def move(self, session: Session, qos: QosClass) -> None:
        """Change the class of a waiting session, keeping its order of arrival there (S8)."""
        self.remove(session)
        session.qos = qos
        self._enter(session)

    def refresh(self, session: Session) -> None:
        """Place a waiting session anew after its policy key changed."""
        self.move(session, session.qos)

    def uncap(self, tenant: str) -> None:
        for queue in self._by_rank:
            queue.uncap(tenant)

    def head(self, qos: QosClass, now_ns: int, is_capped: IsCapped) -> Session | None:
        return self._classes[qos].peek(self.period_ns, now_ns, is_capped)

    def classes_by_age(self, now_ns: int) -> list[QosClass]:
        """Classes with somebody waiting, best first: one rank up for every period of the longest wait (S4)."""
        ranked: list[tuple[int, int, int, QosClass]] = []
        for qos, queue in self._classes.items():
            waiter = queue.waiter() if queue.live else None
            if waiter is not None:
                risen = (now_ns - waiter.queued_ns) // self.period_ns
                ranked.append((max(0, qos - risen), waiter.queued_ns, waiter.seq, qos))
        ranked.sort()
        return [each[3] for each in ranked]

    def _enter(self, session: Session) -> None:
        session.phase = Phase.QUEUED
        session.ticket += 1
        self._members[session.seq] = session
        self.tokens += len(session.context)
        self._classes[session.qos].push(session)
