"""Who gives way, and to whom: for a more urgent class (S6), or when the pool cannot hold another token.

Victims are chosen among the active sessions by class, then by phase, then by who has the least to lose. The choice is a
key; taking lane and blocks away is the state's.
"""

from __future__ import annotations

from superfluid_core.scheduler.records import Phase, Session
from superfluid_core.scheduler.rules import Victim
from superfluid_core.scheduler.state import State
from superfluid_core.session import QosClass


def victim_for_class(state: State, qos: QosClass) -> Session | None:
    """Choose who yields a lane to a waiting session of class `qos`; None when nobody is below it.

    Batch-invariant lanes never yield. Neither does who was admitted for this very tick: an aged session that got a lane
    keeps it for one tick, or aging would be worth nothing under a stream of urgent ones.
    """
    candidates = [
        session
        for session in state.lanes
        if session.qos > qos
        and not session.spec.batch_invariant
        and session.admitted_tick != state.tick
    ]
    return max(candidates, key=lambda session: _yields(state, session), default=None)


def victim_for_blocks(state: State) -> Session | None:
    """Choose whose blocks are taken when a decoding lane cannot grow: lowest class, last admitted.

    Batch-invariant lanes are last in this line, not out of it: recomputing gives them the same tokens, and a pool of
    such lanes alone must not stand still.
    """

    def key(session: Session) -> tuple[bool, QosClass, tuple[int, int]]:
        return (not session.spec.batch_invariant, session.qos, _least_to_lose(state, session))

    return max(state.lanes, key=key, default=None)


def _yields(state: State, session: Session) -> tuple[QosClass, bool, tuple[int, int]]:
    is_decoding = session.phase is Phase.DECODING
    return (session.qos, is_decoding, _least_to_lose(state, session))


def _least_to_lose(state: State, session: Session) -> tuple[int, int]:
    if state.rules.victim is Victim.LEAST_WORK:
        return (-session.computed, session.admission)
    return (session.admission, 0)
