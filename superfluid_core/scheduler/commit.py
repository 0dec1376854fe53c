"""What really happened: one forward pass after another is written into the records and told to whoever listens.

Tokens of sessions that have ended are discarded; a lane's fault ends that lane only; a tick that was cut short simply
reported less. A session's first token leaves with the step that made it (S2), and its terminal event with its last.
"""

from __future__ import annotations

from itertools import compress

from superfluid_core.errors import ErrorCode
from superfluid_core.scheduler.foresight import settle
from superfluid_core.scheduler.plan import (
    Effect,
    Emits,
    LaneFault,
    Progress,
    StepDone,
    TickDone,
    TickOutcome,
)
from superfluid_core.scheduler.records import Phase, Session
from superfluid_core.scheduler.state import Flight, State
from superfluid_core.session import FinishReason

_REFUSALS_MAX = 2


def commit_step(state: State, step: StepDone, now_ns: int) -> list[Effect]:
    """Write one forward pass; a step of another tick than the one in flight is nothing to us."""
    flight = state.flight
    if flight is None or flight.plan.tick != step.tick:
        return []
    effects: list[Effect] = []
    prefilled = _commit_prompt(state, flight, step, effects, now_ns) if step.prefilled else 0
    for fault in step.faults:
        _commit_fault(state, flight, fault, effects)
    decoded = _commit_tokens(state, flight, step, effects)
    flight.steps += 1
    state.counters.steps += 1
    state.counters.output_tokens += decoded
    state.rates.on_step(len(step.lanes), prefilled, step.elapsed_ns)
    state.thrash.on_tokens(decoded, 0, now_ns)
    return effects


def commit_tick(state: State, done: TickDone) -> list[Effect]:
    """Clear the plan in flight; one that did nothing did not start its lanes either."""
    flight = state.flight
    if flight is None or flight.plan.tick != done.tick:
        return []
    state.flight = None
    state.column.write()
    _commit_moves(state, flight, done.outcome)
    if not done.steps:
        state.lanes.restore_changes(flight.plan.starts, flight.plan.frees)
    is_refused = done.outcome is TickOutcome.REFUSED
    state.counters.refused_plans += is_refused
    # a refused plan of drops alone is not made again at once: they wait for lanes, or for the host's next word
    state.drops_wait = is_refused and not flight.plan.lanes
    effects = settle(state, done, was_interrupted=flight.is_interrupted)
    if not is_refused or state.drops_wait:
        state.refusals = 0
        return effects
    return _on_refusal(state, flight)


def _commit_moves(state: State, flight: Flight, outcome: TickOutcome) -> None:
    """KV moved to and from the host, or is still to be moved."""
    park = state.accounts.park
    plan = flight.plan
    if not (plan.park_out or plan.park_in or plan.park_drop):
        return
    if outcome is TickOutcome.REFUSED:
        park.refuse({ticket for session in state.lanes for ticket in session.imports})
        return
    park.landed()
    if plan.park_in:
        for session in state.lanes:
            session.imports = []


def _on_refusal(state: State, flight: Flight) -> list[Effect]:
    """Plan again with less: nothing cached, one step, then ever fewer lanes; a lone lane that is refused ends."""
    state.refusals += 1
    while state.accounts.cache.evict_one(to_host=False):
        pass
    state.trim_all()
    live = list(flight.lanes.values())
    if state.refusals <= _REFUSALS_MAX or len(live) != 1:
        return []
    state.refusals = 0
    text = "the engine refused to run this session alone"
    return [state.finish(live[0], FinishReason.ERROR, code=ErrorCode.PREEMPT_FAILED, text=text)]


def _commit_prompt(
    state: State, flight: Flight, step: StepDone, effects: list[Effect], now_ns: int
) -> int:
    total = 0
    for lane, tokens in step.prefilled:
        total += tokens
        session = flight.lanes.get(lane)
        if session is None:
            continue
        again = min(tokens, max(0, session.recompute_below - session.computed))
        session.computed += tokens
        state.accounts.publish(session)
        session.meter[0] += tokens
        state.counters.prompt_tokens += tokens
        state.counters.prefix_miss_tokens += tokens
        state.counters.recomputed_tokens += again
        state.thrash.on_tokens(tokens - again, again, now_ns)
        state.queues.policy.on_tokens(session, tokens, 0)
        # a preempted session is computed anew: `done` falls back, and the cache may have forgotten
        cached = min(session.cached, session.computed)
        effects.append(Progress(session.key, session.computed, len(session.context), cached))
    return total


def _commit_tokens(state: State, flight: Flight, step: StepDone, effects: list[Effect]) -> int:
    """Take the ids that the step drew; returns how many of them counted.

    Every decoding lane passes here in every step, and mostly it only gets longer: see column.py. What else may happen to it
    happens when its context reaches `due` (a block is full, its last token) or at a stop id.
    """
    ids, logprobs = step.ids, step.logprobs
    column = state.column
    if column.lanes is None or column.lanes != step.lanes:
        column.align(step.lanes, flight.lanes)
        if len(column.sessions) < len(ids):
            # somebody left: what was drawn for him is discarded
            here = [lane in flight.lanes for lane in step.lanes]
            ids = list(compress(ids, here))
            logprobs = None if logprobs is None else list(compress(logprobs, here))
    sessions = column.sessions
    if not sessions:
        return 0
    decoded = len(sessions)
    reached = column.add(ids)
    effects.append(Emits(column.keys, column.indices, ids, logprobs))
    policy = state.queues.policy
    if policy.charges:
        for session in sessions:
            policy.on_tokens(session, 0, 1)
    if reached:
        for session, token in reached:
            _reach(state, session, token, effects)
        column.judge(reached)
    return decoded


def _reach(state: State, session: Session, token: int, effects: list[Effect]) -> None:
    """Judge a token that means more: the first one, one behind a full block, the last one."""
    context = session.context
    length = len(context)
    if session.phase is Phase.PREFILLING:
        state.promote_to_decode(session, length - 1)
    else:
        if not session.computed % state.accounts.shape.block_tokens:
            state.accounts.publish(session)
        session.due = state.accounts.next_due(session)
    spec = session.spec
    if token in spec.stop_ids and session.output > spec.min_output:
        retire(state, session, FinishReason.STOP, effects, stop_id=token)
    elif length >= session.context_limit:
        retire(state, session, FinishReason.LENGTH, effects)


def _commit_fault(state: State, flight: Flight, fault: LaneFault, effects: list[Effect]) -> None:
    session = flight.lanes.get(fault.lane)
    if session is None:
        return
    effects.append(state.finish(session, FinishReason.ERROR, code=fault.code, text=fault.text))
    _free_engine(state, effects)


def retire(
    state: State,
    session: Session,
    reason: FinishReason,
    effects: list[Effect],
    *,
    stop_id: int | None = None,
) -> None:
    """End a session that has all its tokens."""
    effects.append(state.finish(session, reason, stop_id=stop_id))
    _free_engine(state, effects)


def _free_engine(state: State, effects: list[Effect]) -> None:
    """Stop the tick after a lane's end when somebody waits for the lane, or nobody is left in it."""
    flight = state.flight
    if flight is not None and (len(state.queues) or not flight.lanes):
        state.interrupt(effects)
