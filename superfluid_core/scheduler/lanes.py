"""Who holds which lane: the prefilling and the decoding sessions, and what the engine must be told about it.

A lane number is an index of the engine's sampling rows. A lane that changed hands is announced in the next plan: its
old row is freed, its new one started. `promote` is the one door from prefilling to decoding, whoever computed the KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from superfluid_core.scheduler.plan import LaneStart
from superfluid_core.scheduler.records import Phase, Session
from superfluid_core.session import QosClass


class Lanes:
    """The lanes of one engine, numbered from 0; the lowest free one is given first. `solos` counts batch-invariant ones."""

    def __init__(self, lanes: int) -> None:
        self.total = lanes
        self.prefilling: dict[int, Session] = {}
        self.decoding: dict[int, Session] = {}
        self._free = list(range(lanes))
        self._unstarted: dict[int, Session] = {}
        self._freed: dict[int, None] = {}
        self._admissions = 0
        self._per_class = dict.fromkeys(QosClass, 0)
        self._per_tenant: dict[str, int] = {}
        self.solos = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def busy(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def __iter__(self) -> Iterator[Session]:
        yield from self.prefilling.values()
        yield from self.decoding.values()

    def of_class(self, qos: QosClass) -> int:
        return self._per_class[qos]

    def of_tenant(self, tenant: str) -> int:
        return self._per_tenant.get(tenant, 0)

    def admit(self, session: Session, tick: int, now_ns: int) -> None:
        """Move from queued to prefilling. The caller has checked `free`."""
        self._admissions += 1
        session.lane = heappop(self._free)
        session.admission = self._admissions
        session.admitted_tick = tick
        session.admitted_ns = now_ns
        session.phase = Phase.PREFILLING
        session.due = 0
        self.prefilling[session.lane] = session
        self._unstarted[session.lane] = session
        self._count(session, 1)

    def promote(self, session: Session) -> None:
        """Move from prefilling to decoding: the whole context has KV, the first output is drawn."""
        del self.prefilling[session.lane]
        session.phase = Phase.DECODING
        self.decoding[session.lane] = session

    def release(self, session: Session) -> None:
        """Take the session off its lane; its phase is the caller's to set."""
        held = self.prefilling if session.phase is Phase.PREFILLING else self.decoding
        del held[session.lane]
        if self._unstarted.pop(session.lane, None) is None:
            self._freed[session.lane] = None
        heappush(self._free, session.lane)
        self._count(session, -1)
        session.lane = -1

    def reclass(self, session: Session, qos: QosClass) -> None:
        """Change the class of a running session (S8)."""
        self._per_class[session.qos] -= 1
        session.qos = qos
        self._per_class[qos] += 1

    def drain_changes(self) -> tuple[tuple[LaneStart, ...], tuple[int, ...]]:
        """Return starts and frees that the engine has not been told of."""
        if not self._unstarted and not self._freed:
            return (), ()
        starts = tuple(
            LaneStart(lane, session.spec, tuple(session.context[session.prompt :]))
            for lane, session in self._unstarted.items()
        )
        frees = tuple(self._freed)
        self._unstarted = {}
        self._freed = {}
        return starts, frees

    def restore_changes(self, starts: tuple[LaneStart, ...], frees: tuple[int, ...]) -> None:
        """Undo a plan that carried these and was not run: tell the engine again, where it is still true."""
        for lane in frees:
            self._freed[lane] = None
        for start in starts:
            holder = self.prefilling.get(start.lane) or self.decoding.get(start.lane)
            if holder is not None and holder.spec is start.spec:
                self._unstarted[start.lane] = holder
            else:
                self._freed[start.lane] = None

    def _count(self, session: Session, change: int) -> None:
        self._per_class[session.qos] += change
        self.solos += change * session.spec.batch_invariant
        tenant = session.spec.tenant
        lanes = self._per_tenant.get(tenant, 0) + change
        if lanes:
            self._per_tenant[tenant] = lanes
        else:
            self._per_tenant.pop(tenant, None)
