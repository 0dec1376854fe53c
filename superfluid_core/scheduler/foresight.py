"""The tick behind the one in flight, planned while its last step runs, so that the engine need not wait for a plan.

It is the same lanes once more, without who certainly ends in that step. What is not known yet are the ids that the step draws, and
whether it draws them all: `Foreseen.complete` puts them in, where the engine is, or says that it came otherwise. Then the
plan is void, and nothing has happened: blocks that were taken for it stay with their lanes, as after a grant that was cut short.

Foresight has conditions that make it exact: nobody waits, no prompt is computed, no KV moves, the blocks are free without
pushing anything out. Until the tick's end is told, no other plan is made, so blocks of a lane that leaves meanwhile are given to nobody
who is computed before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from superfluid_core.scheduler import budgets
from superfluid_core.scheduler.plan import Effect, LanePlans, StepDone, TickDone, TickPlan
from superfluid_core.scheduler.planner import grant_decoding, is_open
from superfluid_core.scheduler.records import Session
from superfluid_core.scheduler.state import Flight, State


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A plan without the ids that its lanes are fed; `stops` are ids that end some lane."""

    plan: TickPlan
    stops: frozenset[int]

    def complete(self, last: StepDone) -> TickPlan | None:
        """Put in what the last step drew; None when it did not leave exactly these lanes. Called by whoever runs the plans."""
        lanes = self.plan.lanes
        assert isinstance(lanes, LanePlans), "foreseen plans are columns"
        if last.faults or last.prefilled or last.tick + 1 != self.plan.tick:
            return None
        ids = last.ids
        if last.lanes != lanes.lanes:
            drawn = dict(zip(last.lanes, last.ids, strict=True))
            if not drawn.keys() >= set(lanes.lanes):
                return None
            ids = [drawn[lane] for lane in lanes.lanes]
        if not self.stops.isdisjoint(ids):
            return None
        columns = (lanes.lanes, lanes.computed, ids, lanes.grants, lanes.indices)
        plan = self.plan
        return TickPlan(
            plan.tick,
            LanePlans(columns, lanes.tables, ()),
            plan.step_tokens,
            starts=plan.starts,
            frees=plan.frees,
        )


def foresee(state: State, *, cuts_are_free: bool) -> Foreseen | None:
    """Plan the tick behind the one in flight, if its last step runs and what follows is certain but for its ids."""
    flight = state.flight
    if flight is None or flight.steps + 1 != flight.rounds or not _is_calm(state, flight):
        return None
    state.column.write()
    staying = [each for each in flight.lanes.values() if each.context_limit - len(each.context) > 1]
    if not staying:
        return None
    target_ns = budgets.tick_target_ns(
        state.limits, is_open=is_open(state, is_solo=False), cuts_are_free=cuts_are_free
    )
    rounds = budgets.decode_rounds(state.limits, state.rates, len(staying), target_ns)
    rounds = _affordable(state, staying, rounds)
    if not rounds:
        return None
    lanes = {each.lane: each for each in staying}
    columns, tables = grant_decoding(state, staying, rounds, list(lanes), ahead=1)
    starts, frees = state.lanes.drain_changes()
    plan = TickPlan(
        flight.plan.tick + 1,
        LanePlans(columns, tables, ()),
        flight.plan.step_tokens,
        starts=starts,
        frees=frees,
    )
    stops = frozenset[int]().union(*[each.spec.stop_ids for each in staying])
    state.foreseen = Flight(plan, lanes, rounds=max(columns[3]))
    return Foreseen(plan, stops)


def settle(state: State, done: TickDone, *, was_interrupted: bool) -> list[Effect]:
    """Make the foreseen plan the one in flight, if the engine went on with it. Called when the tick before it has been committed.

    Who asked for an end of that tick while the engine passed it by gets it in this one.
    """
    foreseen, state.foreseen = state.foreseen, None
    if foreseen is None:
        assert not done.is_followed, "a plan that nobody made"
        return []
    if not done.is_followed:
        state.lanes.restore_changes(foreseen.plan.starts, foreseen.plan.frees)
        return []
    lanes = foreseen.lanes
    foreseen.lanes = {lane: each for lane, each in lanes.items() if each.lane == lane}
    state.tick = foreseen.plan.tick
    state.flight = foreseen
    state.counters.ticks += 1
    state.counters.decode_grant_tokens = sum(each.grant for each in foreseen.plan.lanes)
    effects: list[Effect] = []
    if was_interrupted or state.must_shed or not foreseen.lanes:
        state.interrupt(effects)
    return effects


def _is_calm(state: State, flight: Flight) -> bool:
    """Whether nothing but the lanes in flight has a say in what comes next."""
    lanes = state.lanes
    return not (
        flight.is_interrupted
        or state.foreseen is not None
        or len(state.queues)
        or lanes.prefilling
        or lanes.solos
        or len(flight.lanes) != len(lanes.decoding)
        or state.refusals
        or state.must_shed
        or state.accounts.park.has_moves
        or state.tick != flight.plan.tick
    )


def _affordable(state: State, staying: list[Session], rounds: int) -> int:
    """Lower the rounds until their blocks are free and promised to nobody; 0 when not even one step's are."""
    accounts = state.accounts
    while rounds:
        needed = unpromised = 0
        for session in staying:
            length = len(session.context) + 1
            tokens = length + min(rounds, session.context_limit - length) - 1
            needed += max(0, accounts.blocks_for(tokens) - len(session.blocks))
            unpromised += accounts.missing(session, tokens)
        if needed <= accounts.pool.free and unpromised <= accounts.available:
            break
        rounds //= 2
    return rounds
