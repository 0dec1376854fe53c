"""Room for the next token of every decoding lane, before anybody new is admitted.

When the pool cannot give it, spare blocks of cut-short grants are taken back first, then the lowest class, last
admitted session gives up everything. The best and oldest session can always grow: a context
that the pool cannot hold ends with `length` before it gets here, so this cannot livelock.
"""

from __future__ import annotations

from superfluid_core.scheduler.preemption import Cause, preempt, victim_for_blocks
from superfluid_core.scheduler.records import Phase, Session
from superfluid_core.scheduler.state import State


def make_room(state: State, now_ns: int) -> None:
    """Every session that is decoding afterwards holds the blocks for one more step."""
    growing = [
        session
        for session in state.lanes.decoding.values()
        if session.places < len(session.context)
    ]
    if len(growing) > 1:
        growing.sort(key=lambda session: (session.qos, session.admission))
    for session in growing:
        _grow(state, session, now_ns)


def _grow(state: State, session: Session, now_ns: int) -> None:
    accounts = state.accounts
    while session.phase is Phase.DECODING:
        if accounts.ensure(session, len(session.context)):
            return
        if state.trim_all():
            continue
        victim = victim_for_blocks(state)
        assert victim is not None, "a decoding session must be active"
        preempt(state, victim, now_ns, Cause.BLOCKS)
