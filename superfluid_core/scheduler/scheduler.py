"""The tick scheduler of one model: inputs in, effects out, a plan when asked (scheduler.md).

A pure state machine. Its clock is handed in, its engine is whatever runs its plans. Phases of a tick: room to grow (and
preemption for it), admission (and preemption by class), chunks, grants; then the engine runs; then what happened is committed,
lanes retire, deadlines are reaped. Effects leave with the input that caused them: `plan` itself has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from superfluid_core.errors import ErrorCode
from superfluid_core.kv.blocks import PoolShape
from superfluid_core.kv.prefix import PrefixChanges
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler import foresight, gates, planner
from superfluid_core.scheduler.admission import URGENT
from superfluid_core.scheduler.commit import commit_step, commit_tick
from superfluid_core.scheduler.foresight import Foreseen
from superfluid_core.scheduler.plan import (
    Accepted,
    Cancel,
    Drain,
    Effect,
    Input,
    Pressure,
    SetQos,
    StepDone,
    Submit,
    TickDone,
    TickPlan,
)
from superfluid_core.scheduler.pressure import judge_park, on_os_pressure, relieve
from superfluid_core.scheduler.records import Phase, Session
from superfluid_core.scheduler.rules import Rules
from superfluid_core.scheduler.state import State
from superfluid_core.scheduler.stats import (
    Counters,
    SchedulerLoad,
    SchedulerStats,
    SessionView,
    TenantTokens,
)
from superfluid_core.session import FinishReason, QosClass, SessionKey, SessionSpec

__all__ = ["PoolShape", "Rules", "Scheduler"]

_TOTALS = [each.name for each in fields(Counters) if each.name not in ("finished", "refused")]


class Scheduler:
    """One per loaded model. Raises ConfigError for limits and rules that contradict each other."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: PoolShape,
        *,
        prefix_salt: bytes = b"",
        cuts_are_free: bool = False,
        rules: Rules | None = None,
    ) -> None:
        self._state = State(limits, pool, rules or Rules(), prefix_salt)
        self._cuts_are_free = cuts_are_free

    def receive(self, inputs: Sequence[Input], now_ns: int) -> list[Effect]:
        """Take inputs in order. Reaps deadlines too: `receive((), now_ns)` does nothing else."""
        state = self._state
        state.now_ns = now_ns
        judge_park(state, now_ns)
        effects: list[Effect] = []
        for each in inputs:
            # what comes most often, first
            if type(each) is StepDone:
                effects += commit_step(state, each, now_ns)
            else:
                effects += self._receive(each, now_ns)
        while state.deadlines and (session := state.pop_expired(now_ns)) is not None:
            code = ErrorCode.DEADLINE_EXCEEDED
            self._end(session, FinishReason.DEADLINE, effects, code)
        return effects

    def plan(self, now_ns: int) -> TickPlan | None:
        """Make the next tick; None when a plan is in flight or there is nothing to do.

        With no lane at work a plan may still carry host memory to be given back; it has no step.
        """
        state = self._state
        if state.flight is not None:
            return None
        judge_park(state, now_ns)
        if state.sessions:
            made = planner.plan(state, now_ns, cuts_are_free=self._cuts_are_free)
            if made is not None:
                return made
        if state.accounts.park.has_drops and not state.drops_wait:
            return planner.plan_drops(state)
        return None

    def foresee(self) -> Foreseen | None:
        """Plan the tick behind the one in flight while its last step runs; None unless nothing but its ids is uncertain.

        Whether the engine went on with it is told by the TickDone of the tick before; until then it is only a promise.
        """
        return foresight.foresee(self._state, cuts_are_free=self._cuts_are_free)

    def promote_to_decode(self, key: SessionKey, kv: int) -> bool:
        """Let a prefilling session decode whose KV was computed elsewhere and lies in its blocks: `kv` positions, all but the last.

        False, and nothing changes, when it is not prefilling here, is part of the plan in flight, or has no blocks for as many.
        """
        state = self._state
        session = state.sessions.get(key)
        if session is None or session.phase is not Phase.PREFILLING:
            return False
        if kv != len(session.context) - 1 or kv > session.places or self._is_flying(session):
            return False
        state.promote_to_decode(session, kv)
        return True

    # --- inputs -----------------------------------------------------------------------------------

    def _receive(self, item: Input, now_ns: int) -> list[Effect]:
        state = self._state
        match item:
            case StepDone():
                return commit_step(state, item, now_ns)
            case TickDone():
                effects = commit_tick(state, item)
                relieve(state)
                return effects
            case Submit():
                return self._submit(item.spec, now_ns)
            case Cancel():
                return self._cancel(item)
            case SetQos():
                return self._set_qos(item.key, item.qos)
            case Pressure():
                on_os_pressure(state, item.level)
                return []
            case Drain():
                state.draining = not item.is_over
                return []

    def _submit(self, spec: SessionSpec, now_ns: int) -> list[Effect]:
        state = self._state
        reject = gates.judge_spec(state, spec) or gates.judge_load(state, spec)
        if reject is not None:
            state.counters.rejected += 1
            refused = state.counters.refused
            refused[reject.code] = refused.get(reject.code, 0) + 1
            return [reject]
        session = state.open(spec)
        state.counters.accepted += 1
        session.hit_tokens = state.accounts.count_hits(session) * state.accounts.shape.block_tokens
        effects: list[Effect] = [Accepted(spec.key, state.ahead_of(spec.qos), session.hit_tokens)]
        last = spec.delivered[-1] if spec.delivered else None
        if last in spec.stop_ids and len(spec.delivered) > spec.min_output:
            effects.append(state.finish(session, FinishReason.STOP, stop_id=last))
        elif session.output_left <= 0:
            effects.append(state.finish(session, FinishReason.LENGTH))
        else:
            state.enqueue(session, now_ns)
            self._on_waiting(session, effects)
        return effects

    def _cancel(self, item: Cancel) -> list[Effect]:
        effects: list[Effect] = []
        session = self._state.sessions.get(item.key)
        if session is not None:
            self._end(session, item.reason, effects)
        return effects

    def _set_qos(self, key: SessionKey, qos: QosClass) -> list[Effect]:
        state = self._state
        effects: list[Effect] = []
        session = state.sessions.get(key)
        if session is None or session.qos is qos:
            return effects
        if session in state.queues:
            state.queues.move(session, qos)
            self._on_waiting(session, effects)
        else:
            state.lanes.reclass(session, qos)
        return effects

    def _end(
        self,
        session: Session,
        reason: FinishReason,
        effects: list[Effect],
        code: ErrorCode | None = None,
    ) -> None:
        """End a session from outside; a lane that is being computed for it is stopped."""
        is_flying = self._is_flying(session)
        effects.append(self._state.finish(session, reason, code=code))
        if is_flying:
            self._state.interrupt(effects)

    def _is_flying(self, session: Session) -> bool:
        flight = self._state.flight
        return flight is not None and flight.lanes.get(session.lane) is session

    def _on_waiting(self, session: Session, effects: list[Effect]) -> None:
        """Somebody joined a queue: stop the tick if he is urgent, or could have a lane at its end."""
        state = self._state
        if state.admits and (session.qos in URGENT or state.lanes.free):
            state.interrupt(effects)

    # --- what others may know ---------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """Take a snapshot; its cost does not grow with what waits."""
        state = self._state
        lanes, accounts, counters = state.lanes, state.accounts, state.counters
        park, shape = accounts.park, accounts.shape
        queued = [state.queues.depth(qos) for qos in QosClass]
        totals = {name: getattr(counters, name) for name in _TOTALS}
        return SchedulerStats(
            lanes_busy=lanes.busy,
            lanes=lanes.total,
            lanes_prefilling=len(lanes.prefilling),
            lanes_decoding=len(lanes.decoding),
            queued=(queued[0], queued[1], queued[2], queued[3]),
            queued_tokens=state.queues.tokens,
            blocks_used=accounts.used,
            blocks_cached=accounts.cache.idle,
            blocks=accounts.pool.total,
            reserved_blocks=accounts.reserved,
            kv_reserved_tokens=accounts.reserved * shape.block_tokens,
            prefill_rate=state.rates.prefill_rate,
            decode_rates=state.rates.decode_rates(),
            step_predicted_ns=self._step_predicted_ns(),
            draining=state.draining,
            preemptions=counters.preempted_for_class
            + counters.preempted_for_blocks
            + counters.preempted_for_pressure,
            prefix_evicted_blocks=accounts.cache.evicted,
            park_bytes=park.blocks * shape.block_bytes,
            park_bytes_max=park.blocks_max * shape.block_bytes,
            parked_sessions=park.sessions,
            parked_prefixes=park.prefixes,
            park_refused=park.refused,
            park_dropped=park.dropped,
            recompute_ratio=state.thrash.ratio,
            thrash_trips=state.thrash.trips,
            thrash_lanes=state.thrash.allowed,
            finished=tuple(counters.finished.items()),
            refused=tuple(counters.refused.items()),
            **totals,
        )

    def load(self) -> SchedulerLoad:
        """Take the part of a snapshot that STATUS carries."""
        state = self._state
        lanes, accounts, queues = state.lanes, state.accounts, state.queues
        first, second, third, fourth = [queues.depth(qos) for qos in QosClass]
        return SchedulerLoad(
            lanes.busy,
            lanes.total,
            (first, second, third, fourth),
            queues.tokens,
            accounts.used,
            accounts.cache.idle,
            accounts.pool.total,
            state.rates.prompt_rate,
            state.rates.decode_rates(),
            self._step_predicted_ns(),
        )

    def tenant_tokens(self) -> list[TenantTokens]:
        """Read what was computed for each tenant; those beyond the first `TENANTS_MAX` are counted together."""
        return self._state.tenants.read()

    def sessions(self) -> list[SessionView]:
        """Every live session, in order of arrival."""
        self._state.column.write()
        return [
            SessionView(
                each.key,
                str(each.phase),
                each.qos,
                each.spec.tenant,
                len(each.spec.prompt),
                each.output,
            )
            for each in self._state.sessions.values()
        ]

    def prefix_names(self) -> list[bytes]:
        """Names of all blocks that can be found, for a PREFIX snapshot."""
        return self._state.accounts.cache.names()

    def drain_prefix_changes(self) -> PrefixChanges:
        """Names that came and went since the last call."""
        return self._state.accounts.cache.drain_changes()

    def pin_prefix(self, name: bytes, *, pinned: bool) -> bool:
        """Evict this block last, or no longer so; False when it is not here."""
        cache = self._state.accounts.cache
        if pinned:
            return cache.pin(name)
        cache.unpin(name)
        return True

    def _step_predicted_ns(self) -> int:
        """Predict the slowest step of the tick in flight; 0 while unknown or idle."""
        flight = self._state.flight
        if flight is None:
            return 0
        rates = self._state.rates
        prompt = flight.prompt_tokens
        if prompt:
            return rates.prefill_ns(min(prompt + len(flight.plan.lanes), flight.plan.step_tokens))
        return rates.step_ns(len(flight.plan.lanes))
