"""Makes one tick: room to grow, admissions, chunks of prompt, grants of decode steps, and the plan that names them.

Every number in a plan is decided here; nothing is emitted here. Blocks for what is planned are held when the plan leaves,
so an engine that follows it cannot run out. What was not reached is still to be done, and is planned again.
"""

from __future__ import annotations

from dataclasses import dataclass

from superfluid_core.scheduler import budgets
from superfluid_core.scheduler.admission import URGENT, admit
from superfluid_core.scheduler.budgets import PrefillCap
from superfluid_core.scheduler.growth import make_room
from superfluid_core.scheduler.plan import LanePlan, TickPlan
from superfluid_core.scheduler.pressure import shed
from superfluid_core.scheduler.records import Phase, Session
from superfluid_core.scheduler.state import Flight, State
from superfluid_core.session import QosClass


@dataclass(slots=True)
class _Share:
    """One lane's part of the tick; `first_step` is the step in which it draws its first id, if it does."""

    session: Session
    chunk: int
    first_step: int
    samples: bool
    decoding: bool

    def grant(self, rounds: int) -> int:
        """Ids to draw in a tick of `rounds` steps."""
        if not self.samples:
            return 0
        session = self.session
        left = session.context_limit - len(session.context)
        share = rounds - self.first_step + 1
        return left if left < share else max(1, share)


def plan(state: State, now_ns: int, *, cuts_are_free: bool) -> TickPlan | None:
    """Make the next tick, or None when no lane has work. Called with no plan in flight."""
    state.tick += 1
    shed(state, now_ns)
    make_room(state, now_ns)
    _adopt(state)
    is_calm = state.rules.admit_after_preempt or state.preempted_tick != state.tick
    if is_calm or not state.lanes.busy:
        admit(state, now_ns)
    if not state.lanes.busy:
        return None
    members, is_solo = _members(state)
    is_open = _is_open(state, is_solo=is_solo)
    cap = budgets.prefill_cap(state.limits, state.rates, is_open=is_open)
    shares = [_Share(each, 1, 1, True, True) for each in members if each.phase is Phase.DECODING]
    waiting = [each for each in members if each.phase is Phase.PREFILLING]
    chunks = _chunks(state, waiting, cap.tokens, now_ns) if waiting else []
    room = max(1, cap.step_tokens - len(shares))
    tokens = 0
    for session, chunk in chunks:
        tokens += chunk
        samples = chunk == session.remaining
        shares.append(_Share(session, chunk, -(-tokens // room), samples, False))
    target_ns = budgets.tick_target_ns(state.limits, is_open=is_open, cuts_are_free=cuts_are_free)
    rounds = _rounds(state, shares, target_ns)
    return _launch(state, shares, rounds, cap, is_solo=is_solo)


# --- who takes part -------------------------------------------------------------------------------


def _members(state: State) -> tuple[list[Session], bool]:
    """Choose the lanes of this tick: a batch-invariant one alone and the others together take turns (S7)."""
    together = [each for each in state.lanes if not each.spec.batch_invariant]
    if len(together) < state.lanes.busy and not (state.was_solo and together):
        state.was_solo = True
        solo = min(
            (each for each in state.lanes if each.spec.batch_invariant),
            key=lambda each: (each.solo_tick, each.admission),
        )
        solo.solo_tick = state.tick
        return [solo], True
    state.was_solo = False
    if state.refusals:
        # the engine refused the last plan: try ever fewer lanes, the best and oldest first
        together.sort(key=lambda each: (each.qos, each.admission))
        return together[: max(1, state.limits.lanes >> state.refusals)], False
    return together, False


def _is_open(state: State, *, is_solo: bool) -> bool:
    """Tell whether somebody could come in at the end of this tick: then it is short."""
    if state.lanes.free or any(state.queues.depth(qos) for qos in URGENT):
        return True
    if is_solo and state.lanes.busy > 1:
        return True
    step_ns = state.rates.step_ns(len(state.lanes.decoding))
    if not step_ns:
        return True
    soon = budgets.OPEN_NS // step_ns
    return any(each.output_left <= soon for each in state.lanes.decoding.values())


# --- prompt ---------------------------------------------------------------------------------------


def _adopt(state: State) -> None:
    """Move prefilling lanes past what others published since; before admission, for it makes room."""
    for session in state.lanes.prefilling.values():
        saved = state.accounts.adopt(session)
        if saved:
            state.counters.prefix_hit_tokens += saved
            if not session.recompute_below:
                session.cached += saved


def _chunks(
    state: State, waiting: list[Session], budget: int, now_ns: int
) -> list[tuple[Session, int]]:
    """Give out the prompt tokens of this tick, in the order in which they will be computed (S13).

    A session whose next block is being computed by another lane in this very tick waits for it and shares it (S15).
    """
    accounts = state.accounts
    period_ns = state.period_ns
    waiting.sort(
        key=lambda each: (
            not each.has_waited(period_ns, now_ns),
            each.qos,
            each.remaining,
            each.seq,
        )
    )
    chunks: list[tuple[Session, int]] = []
    coming: set[bytes] = set()
    floor: QosClass | None = None
    for session in waiting:
        if not budget:
            break
        if floor is not None and session.qos > floor:
            continue
        if coming and accounts.next_name(session) in coming:
            continue
        chunk = min(budget, session.remaining)
        end = session.computed + chunk
        is_held = accounts.ensure(session, end)
        assert is_held, "the pool broke its promise of a prompt's blocks"
        if len(waiting) > 1:
            coming.update(accounts.names_between(session, session.computed, end))
        budget -= chunk
        chunks.append((session, chunk))
        if chunk == session.remaining and session.qos in URGENT and floor is None:
            floor = session.qos
    return chunks


# --- decode ---------------------------------------------------------------------------------------


def _rounds(state: State, shares: list[_Share], target_ns: int) -> int:
    """Count the steps of this tick. Prompts that do not finish in it keep it as short as their chunks are."""
    prompts = [share for share in shares if not share.decoding]
    steps = max((share.first_step for share in prompts), default=1)
    unfinished = len(state.lanes.prefilling) - sum(share.samples for share in prompts)
    if state.refusals or (prompts and unfinished):
        return steps if state.refusals else _affordable(state, shares, steps)
    tokens = sum(share.chunk for share in prompts)
    left_ns = max(0, target_ns - state.rates.prefill_ns(tokens))
    more = budgets.decode_rounds(state.limits, state.rates, max(1, len(shares)), left_ns)
    return _affordable(state, shares, steps - 1 + more)


def _affordable(state: State, shares: list[_Share], rounds: int) -> int:
    """Lower the rounds when the pool does not hold the blocks for more; the first of each lane is held already.

    A grant of more than a block may not push cached prefixes out: it would trade what is known for what may never be.
    """
    accounts = state.accounts
    available = accounts.available
    size = accounts.shape.block_tokens
    unused = min(available, accounts.pool.free)
    while rounds > 1:
        room = available if rounds <= size else unused
        if len(shares) * (rounds // size + 1) <= room:
            break
        needed = 0
        for share in shares:
            grant = share.grant(rounds)
            if grant > 1:
                tokens = len(share.session.context) + grant - 1
                needed += accounts.missing(share.session, tokens)
        if needed <= room:
            break
        rounds = max(1, rounds // 2)
    return rounds


# --- the plan -------------------------------------------------------------------------------------


def _launch(
    state: State, shares: list[_Share], rounds: int, cap: PrefillCap, *, is_solo: bool
) -> TickPlan | None:
    if not shares:
        return None
    accounts = state.accounts
    lanes: list[LanePlan] = []
    flight: dict[int, Session] = {}
    granted = 0
    for share in shares:
        session = share.session
        grant = share.grant(rounds)
        context = session.context
        if grant > 1:
            is_held = accounts.ensure(session, len(context) + grant - 1)
            assert is_held, "grants were measured against the pool"
        start = session.computed
        lane = session.lane
        lanes.append(
            LanePlan(
                lane,
                share.decoding,
                start,
                (context[-1],) if share.decoding else tuple(context[start : start + share.chunk]),
                grant,
                len(context) - len(session.spec.prompt),
                session.table or accounts.table(session),
            )
        )
        flight[lane] = session
        granted += grant
    starts, frees = state.lanes.drain_changes()
    made = TickPlan(
        state.tick,
        tuple(lanes),
        cap.step_tokens,
        starts=starts,
        frees=frees,
        batch_invariant=is_solo,
    )
    state.flight = Flight(made, flight, len(flight))
    state.counters.ticks += 1
    state.counters.prefill_budget_tokens = cap.tokens
    state.counters.decode_grant_tokens = granted
    return made
