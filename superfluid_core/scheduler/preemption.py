"""Who gives way, and to whom: for a more urgent class (S6), or when the pool cannot hold another token.

Victims are chosen among the active sessions by class, then by phase, then by who has the least to lose. The choice is a
key; taking lane and blocks away is the state's. What a victim loses goes to the host or is computed again (S14).
"""

from __future__ import annotations

from enum import StrEnum

from superfluid_core.kv.blocks import PoolShape
from superfluid_core.scheduler.parking import own_positions, put_away
from superfluid_core.scheduler.rates import Rates
from superfluid_core.scheduler.records import Phase, Session
from superfluid_core.scheduler.rules import PreemptMode, Victim
from superfluid_core.scheduler.state import State
from superfluid_core.session import QosClass

_SECOND_NS = 1_000_000_000


class Cause(StrEnum):
    """What a session gave way to."""

    CLASS = "class"
    BLOCKS = "blocks"
    PRESSURE = "pressure"


def preempt(state: State, victim: Session, now_ns: int, cause: Cause) -> None:
    """Take lane and blocks from a victim; its KV goes to the host where that pays and there is room."""
    is_swapped = is_worth_parking(state, victim) and put_away(state.accounts, victim)
    state.preempt(victim, now_ns)
    counters = state.counters
    match cause:
        case Cause.CLASS:
            counters.preempted_for_class += 1
            counters.swapped_for_class += is_swapped
        case Cause.BLOCKS:
            counters.preempted_for_blocks += 1
            counters.swapped_for_blocks += is_swapped
        case Cause.PRESSURE:
            counters.preempted_for_pressure += 1
            counters.swapped_for_pressure += is_swapped


def is_worth_parking(state: State, victim: Session) -> bool:
    """Weigh moving the victim's KV out and in again against computing it again; for what the victim alone holds."""
    mode = state.rules.preempt_mode
    if not state.accounts.park.is_open:
        return False
    if mode is not PreemptMode.AUTO:
        return mode is PreemptMode.SWAP
    lanes = len(state.lanes.decoding) + (victim.phase is not Phase.DECODING)
    tokens = own_positions(state.accounts, victim)
    return swap_pays(state.accounts.shape, state.rates, tokens, lanes)


def swap_pays(shape: PoolShape, rates: Rates, tokens: int, lanes: int) -> bool:
    """Tell whether two copies of a victim's `tokens` cost less than computing them in a step in which `lanes` decode.

    Each copy has an overhead beside its bytes; a recomputation rides in a step that runs anyway, free up to a point (`rates.py`).
    So the short are computed again and, where the host's measured rate is high enough, the long are swapped. While a rate is
    unknown nobody is swapped: nothing was measured, and nothing can be lost but time.
    """
    if not shape.host_copy_bytes_per_s:
        return False
    size = tokens * shape.kv_bytes_per_token
    copy_ns = shape.host_copy_overhead_ns + size * _SECOND_NS / shape.host_copy_bytes_per_s
    return 2 * copy_ns < rates.riding_ns(tokens, lanes)


def victim_for_class(state: State, qos: QosClass) -> Session | None:
    """Choose who yields a lane to a waiting session of class `qos`; None when nobody is below it.

    Batch-invariant lanes never yield. Neither does who was admitted for this very tick: an aged session that got a lane
    keeps it for one tick, or aging would be worth nothing under a stream of urgent ones.
    """
    if not any(state.lanes.of_class(each) for each in QosClass if each > qos):
        return None
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
