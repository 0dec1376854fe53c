"""The pressure ladder: after every tick the pool is kept below its marks, and the host's memory is heeded.

Cached prefixes go first, least recently used leaf first; live lanes never, except that decoding background lanes are
preempted when the host is in a critical state. A host that is short of memory gets back what prefixes hold of it, and takes nothing for a
minute after its last word.
"""

from __future__ import annotations

from superfluid_core.scheduler.plan import PressureLevel
from superfluid_core.scheduler.preemption import Cause, preempt
from superfluid_core.scheduler.state import State
from superfluid_core.session import QosClass

_NO_PARK_NS = 60_000_000_000


def relieve(state: State) -> None:
    """Above the high mark, evict down to the low one. Occupancy counts held and cached blocks."""
    pool, cache = state.accounts.pool, state.accounts.cache
    total = pool.total
    if (total - pool.free) * 100 <= state.rules.pressure_high_pct * total:
        return
    low = state.rules.pressure_low_pct * total // 100
    for _ in range(total - pool.free - low):
        if not cache.evict_one():
            break
        state.counters.evicted_for_pressure += 1


def on_os_pressure(state: State, level: PressureLevel) -> None:
    """Drop host-held prefixes and evict one round on a warning; preempt every decoding background lane too when it is critical.

    Lanes change hands between ticks only: while a plan is in flight the preemption is remembered for its end.
    """
    state.pressure = level
    if level is PressureLevel.NONE:
        return
    state.no_park_until_ns = state.now_ns + _NO_PARK_NS
    judge_park(state, state.now_ns)
    state.accounts.park.drop_prefixes()
    state.drops_wait = False
    low = state.rules.pressure_low_pct * state.accounts.pool.total // 100
    pool = state.accounts.pool
    while pool.total - pool.free > low and state.accounts.cache.evict_one():
        state.counters.evicted_for_pressure += 1
    if level is PressureLevel.CRITICAL:
        state.must_shed = True


def judge_park(state: State, now_ns: int) -> None:
    """Say whether KV may move to the host now."""
    park = state.accounts.park
    if not park.blocks_max:
        return
    is_calm = state.pressure is PressureLevel.NONE and now_ns >= state.no_park_until_ns
    park.is_open = is_calm


def shed(state: State, now_ns: int) -> None:
    """Preempt what a critical host asked for. Called with no plan in flight."""
    if not state.must_shed:
        return
    state.must_shed = False
    for session in list(state.lanes.decoding.values()):
        if session.qos is QosClass.BACKGROUND and not session.spec.batch_invariant:
            preempt(state, session, now_ns, Cause.PRESSURE)
