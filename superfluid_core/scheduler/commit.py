"""What really happened: one forward pass after another is written into the records and told to whoever listens.

Tokens of sessions that have ended are discarded; a lane's fault ends that lane only; a tick that was cut short simply
reported less. A session's first token leaves with the step that made it (S2), and its terminal event with its last.
"""

from __future__ import annotations

from superfluid_core.errors import ErrorCode
from superfluid_core.scheduler.plan import (
    Effect,
    Emit,
    LaneFault,
    Progress,
    StepDone,
    TickDone,
    TickOutcome,
)
from superfluid_core.scheduler.records import Phase, Session
from superfluid_core.scheduler.state import Flight, State
from superfluid_core.session import FinishReason, TokenLogprobs

_REFUSALS_MAX = 2


def commit_step(state: State, step: StepDone, now_ns: int) -> list[Effect]:
    """Write one forward pass; a step of another tick than the one in flight is nothing to us."""
    flight = state.flight
    if flight is None or flight.plan.tick != step.tick:
        return []
    effects: list[Effect] = []
    prefilled = _commit_prompt(state, flight, step, effects, now_ns)
    for fault in step.faults:
        _commit_fault(state, flight, fault, effects)
    decoded = 0
    logprobs = step.logprobs
    for index, lane in enumerate(step.lanes):
        session = flight.lanes.get(lane)
        if session is None or session.lane != lane:
            continue
        decoded += 1
        _commit_token(
            state, session, step.ids[index], logprobs[index] if logprobs else None, effects
        )
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
    if not done.steps:
        state.lanes.restore_changes(flight.plan.starts, flight.plan.frees)
    if done.outcome is not TickOutcome.REFUSED:
        state.refusals = 0
        return []
    state.counters.refused_plans += 1
    return _on_refusal(state, flight)


def _on_refusal(state: State, flight: Flight) -> list[Effect]:
    """Plan again with less: nothing cached, one step, then ever fewer lanes; a lone lane that is refused ends."""
    state.refusals += 1
    while state.accounts.cache.evict_one():
        pass
    state.trim_all()
    live = [each for lane, each in flight.lanes.items() if each.lane == lane]
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
        if session is None or session.lane != lane:
            continue
        again = min(tokens, max(0, session.recompute_below - session.computed))
        session.computed += tokens
        state.accounts.publish(session)
        state.counters.prompt_tokens += tokens
        state.counters.prefix_miss_tokens += tokens
        state.counters.recomputed_tokens += again
        state.thrash.on_tokens(tokens - again, again, now_ns)
        state.queues.policy.on_tokens(session, tokens, 0)
        # a preempted session is computed anew: `done` falls back, and the cache may have forgotten
        cached = min(session.cached, session.computed)
        effects.append(Progress(session.key, session.computed, len(session.context), cached))
    return total


def _commit_token(
    state: State,
    session: Session,
    token: int,
    logprobs: TokenLogprobs | None,
    effects: list[Effect],
) -> None:
    spec = session.spec
    context = session.context
    if session.phase is Phase.PREFILLING:
        assert session.computed == len(context), "a lane drew an id before its context was computed"
        state.lanes.promote(session)
    else:
        session.computed += 1
        if not session.computed % state.accounts.shape.block_tokens:
            state.accounts.publish(session)
    index = len(context) - len(spec.prompt)
    context.append(token)
    effects.append(Emit(spec.key, index, token, logprobs))
    state.queues.policy.on_tokens(session, 0, 1)
    if token in spec.stop_ids and index >= spec.min_output:
        retire(state, session, FinishReason.STOP, effects, stop_id=token)
    elif len(context) >= session.context_limit:
        retire(state, session, FinishReason.LENGTH, effects)


def _commit_fault(state: State, flight: Flight, fault: LaneFault, effects: list[Effect]) -> None:
    session = flight.lanes.get(fault.lane)
    if session is None or session.lane != fault.lane:
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
    if flight is not None and (len(state.queues) or not flight.live):
        state.interrupt(effects)
