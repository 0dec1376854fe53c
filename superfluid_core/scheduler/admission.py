"""Free lanes are given to waiting sessions; urgent ones that find no free lane take one (S3 to S7, S10).

Each waiting session passes all gates or stays where it is. A hold closes its class for this tick and leaves the
other classes open; nobody of its own class passes it. A lane freed by preemption goes to who caused it.
"""

from __future__ import annotations

from superfluid_core.scheduler import gates
from superfluid_core.scheduler.gates import Hold
from superfluid_core.scheduler.preemption import Cause, preempt, victim_for_class
from superfluid_core.scheduler.records import Session
from superfluid_core.scheduler.rules import Batching
from superfluid_core.scheduler.state import State
from superfluid_core.session import QosClass

URGENT = (QosClass.INTERACTIVE, QosClass.COMPLETION)


def admit(state: State, now_ns: int) -> None:
    """Fill the free lanes, then let the urgent classes preempt. Called with no plan in flight."""
    if not len(state.queues) or not state.admits:
        return
    if state.hits is not None:
        state.hits.settle()
    closed: set[QosClass] = set()
    while state.lanes.free:
        session = _next(state, closed, now_ns)
        if session is None:
            break
        reason = gates.hold(state, session, now_ns)
        if reason is None:
            state.admit(session, now_ns)
            # who shares a prefix with the admitted one may fit now
            closed.clear()
        else:
            _count(state, reason)
            _close(closed, session)
    if state.rules.batching is Batching.STATIC:
        return
    for qos in URGENT:
        while not state.lanes.free and qos not in closed:
            if not _preempt_for(state, qos, closed, now_ns):
                break


def _next(state: State, closed: set[QosClass], now_ns: int) -> Session | None:
    for qos in state.queues.classes_by_age(now_ns):
        if qos not in closed:
            session = state.peek(qos, now_ns)
            if session is not None:
                return session
            state.counters.held_tenant += 1
            closed.add(qos)
    return None


def _preempt_for(state: State, qos: QosClass, closed: set[QosClass], now_ns: int) -> bool:
    """One lane changes hands, or nothing happens and the answer is False."""
    if not state.queues.depth(qos) or gates.is_class_full(state, qos):
        return False
    session = state.peek(qos, now_ns)
    if session is None:
        return False
    victim = victim_for_class(state, qos)
    if victim is None:
        if session.spec.batch_invariant:
            _close(closed, session)
        return False
    if not state.accounts.fits(session, yielding=victim):
        state.counters.held_blocks += 1
        return False
    preempt(state, victim, now_ns, Cause.CLASS)
    state.admit(session, now_ns)
    return True


def _close(closed: set[QosClass], session: Session) -> None:
    """Nobody else of this class is admitted; behind a batch-invariant session, nobody below it either (S7)."""
    closed.add(session.qos)
    if session.spec.batch_invariant:
        closed.update(qos for qos in QosClass if qos > session.qos)


def _count(state: State, reason: Hold) -> None:
    counters = state.counters
    match reason:
        case Hold.BLOCKS:
            counters.held_blocks += 1
        case Hold.RESERVATION:
            counters.held_reservation += 1
        case Hold.CLASS:
            counters.held_class += 1
        case Hold.STEP:
            counters.held_step += 1
        case Hold.THRASH:
            counters.held_thrash += 1
        case Hold.PRESSURE:
            counters.held_pressure += 1
