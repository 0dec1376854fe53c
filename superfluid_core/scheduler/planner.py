"""Makes one tick: room to grow, admissions, chunks of prompt, grants of decode steps, and the plan that names them.

Every number in a plan is decided here; nothing is emitted here. Blocks for what is planned are held when the plan leaves,
so an engine that follows it cannot run out. What was not reached is still to be done, and is planned again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from superfluid_core.scheduler import budgets
from superfluid_core.scheduler.admission import URGENT, admit
from superfluid_core.scheduler.budgets import PrefillCap
from superfluid_core.scheduler.growth import make_room
from superfluid_core.scheduler.plan import LanePlan, LanePlans, Park, TickPlan
from superfluid_core.scheduler.pressure import shed
from superfluid_core.scheduler.records import Phase, Session
from superfluid_core.scheduler.rules import PrefillMode
from superfluid_core.scheduler.state import Flight, State
from superfluid_core.session import QosClass

_Columns = tuple[list[int], list[int], list[int], list[int], list[int]]


@dataclass(slots=True)
class _Share:
    """One prompt's part of the tick; `first_step` is the step in which it draws its first id, if it does."""

    session: Session
    chunk: int
    first_step: int
    samples: bool

    def grant(self, rounds: int) -> int:
        """Ids to draw in a tick of `rounds` steps."""
        if not self.samples:
            return 0
        session = self.session
        left = session.context_limit - len(session.context)
        share = rounds - self.first_step + 1
        return left if left < share else max(1, share)


class _Work(NamedTuple):
    """Who takes part in a tick: decoding lanes, and prompts in the order in which they are computed."""

    decoding: list[Session]
    prompts: list[_Share]

    @property
    def lanes(self) -> int:
        return len(self.decoding) + len(self.prompts)


class _Members(NamedTuple):
    """The lanes that a tick may use; `is_solo`: a batch-invariant one alone (S7)."""

    decoding: list[Session]
    waiting: list[Session]
    is_solo: bool


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
    members = _members(state)
    is_short = is_open(state, is_solo=members.is_solo)
    cap = budgets.prefill_cap(state.limits, state.rates, is_open=is_short)
    members = _one_pass(state, members)
    chunks = _chunks(state, members, cap, now_ns) if members.waiting else []
    cap = _whole_prompts(state, members, chunks, cap)
    work = _Work(members.decoding, _shares(members, chunks, cap))
    target_ns = budgets.tick_target_ns(state.limits, is_open=is_short, cuts_are_free=cuts_are_free)
    return _launch(state, work, _rounds(state, work, target_ns), cap, is_solo=members.is_solo)


def plan_drops(state: State) -> TickPlan:
    """Make a tick without lanes: the host's memory is given back although nobody has work."""
    state.tick += 1
    drops, outs, ins = state.accounts.park.drain()
    made = TickPlan(state.tick, (), 0, park_out=_parks(outs), park_in=_parks(ins), park_drop=drops)
    state.flight = Flight(made, {})
    return made


# --- who takes part -------------------------------------------------------------------------------


def _members(state: State) -> _Members:
    """Choose the lanes of this tick: a batch-invariant one alone and the others together take turns (S7)."""
    lanes = state.lanes
    is_solo = bool(lanes.solos) and not (state.was_solo and lanes.busy > lanes.solos)
    state.was_solo = is_solo
    if is_solo:
        solo = min(
            (each for each in lanes if each.spec.batch_invariant),
            key=lambda each: (each.solo_tick, each.admission),
        )
        solo.solo_tick = state.tick
        return _by_phase([solo], is_solo=True)
    if not lanes.solos and not state.refusals:
        return _Members(list(lanes.decoding.values()), list(lanes.prefilling.values()), is_solo)
    together = [each for each in lanes if not each.spec.batch_invariant]
    if state.refusals:
        # the engine refused the last plan: try ever fewer lanes, the best and oldest first
        together.sort(key=lambda each: (each.qos, each.admission))
        together = together[: max(1, state.limits.lanes >> state.refusals)]
    return _by_phase(together, is_solo=False)


def _by_phase(sessions: list[Session], *, is_solo: bool) -> _Members:
    return _Members(
        [each for each in sessions if each.phase is Phase.DECODING],
        [each for each in sessions if each.phase is Phase.PREFILLING],
        is_solo,
    )


def _one_pass(state: State, members: _Members) -> _Members:
    """Under `--prefill-mode alternating` prompts and decoding lanes take turns, a pass each."""
    is_mixed = bool(members.decoding and members.waiting)
    if not is_mixed or state.rules.prefill_mode is not PrefillMode.ALTERNATING:
        return members
    state.was_prefill_pass = not state.was_prefill_pass
    if state.was_prefill_pass:
        return members._replace(decoding=[])
    return members._replace(waiting=[])


def is_open(state: State, *, is_solo: bool) -> bool:
    """Tell whether somebody could come in at the end of this tick: then it is short."""
    if not state.admits:
        return not state.rates.step_ns(len(state.lanes.decoding))
    if state.lanes.free or any(state.queues.depth(qos) for qos in URGENT):
        return True
    if is_solo and state.lanes.busy > 1:
        return True
    step_ns = state.rates.step_ns(len(state.lanes.decoding))
    if not step_ns:
        return True
    soon = budgets.OPEN_NS // step_ns
    return any(
        each.context_limit - len(each.context) <= soon for each in state.lanes.decoding.values()
    )


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
    state: State, members: _Members, cap: PrefillCap, now_ns: int
) -> list[tuple[Session, int]]:
    """Give out the prompt tokens of this tick, in the order in which they will be computed (S13).

    A session whose next block is being computed by another lane in this very tick waits for it and shares it (S15).
    """
    mode = state.rules.prefill_mode
    budget = cap.tokens
    if mode is PrefillMode.ALTERNATING:
        budget = min(budget, cap.step_tokens)
    is_whole = mode is PrefillMode.MONOLITHIC
    waiting = members.waiting
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
        if budget <= 0 or (is_whole and chunks and session.remaining > budget):
            break
        if floor is not None and session.qos > floor:
            continue
        if coming and accounts.next_name(session) in coming:
            continue
        chunk = session.remaining if is_whole else min(budget, session.remaining)
        end = session.computed + chunk
        is_held = accounts.ensure(session, end)
        assert is_held, "the pool broke its promise of a prompt's blocks"
        if len(waiting) > 1:
            # from the first that is not findable yet: those that come in from the host are no more so than computed ones
            start = session.published * accounts.shape.block_tokens
            coming.update(accounts.names_between(session, start, end))
        budget -= chunk
        chunks.append((session, chunk))
        if chunk == session.remaining and session.qos in URGENT and floor is None:
            floor = session.qos
    return chunks


def _whole_prompts(
    state: State, members: _Members, chunks: list[tuple[Session, int]], cap: PrefillCap
) -> PrefillCap:
    """Under `--prefill-mode monolithic` all prompt tokens of the tick go into one step."""
    if state.rules.prefill_mode is not PrefillMode.MONOLITHIC:
        return cap
    tokens = sum(chunk for _, chunk in chunks)
    return cap._replace(step_tokens=max(cap.step_tokens, tokens + len(members.decoding)))


def _shares(members: _Members, chunks: list[tuple[Session, int]], cap: PrefillCap) -> list[_Share]:
    room = max(1, cap.step_tokens - len(members.decoding))
    shares: list[_Share] = []
    tokens = 0
    for session, chunk in chunks:
        tokens += chunk
        shares.append(_Share(session, chunk, -(-tokens // room), chunk == session.remaining))
    return shares


# --- decode ---------------------------------------------------------------------------------------


def _rounds(state: State, work: _Work, target_ns: int) -> int:
    """Count the steps of this tick. Prompts that do not finish in it keep it as short as their chunks are."""
    prompts = work.prompts
    steps = max((share.first_step for share in prompts), default=1)
    unfinished = len(state.lanes.prefilling) - sum(share.samples for share in prompts)
    if state.refusals:
        return steps
    takes_turns = (
        state.rules.prefill_mode is PrefillMode.ALTERNATING
        and state.lanes.prefilling
        and state.lanes.decoding
    )
    if takes_turns or (prompts and unfinished):
        return _affordable(state, work, steps)
    tokens = sum(share.chunk for share in prompts)
    left_ns = max(0, target_ns - state.rates.prefill_ns(tokens))
    more = budgets.decode_rounds(state.limits, state.rates, max(1, work.lanes), left_ns)
    return _affordable(state, work, steps - 1 + more)


def _affordable(state: State, work: _Work, rounds: int) -> int:
    """Lower the rounds when the pool does not hold the blocks for more; the first of each lane is held already.

    A grant of more than a block may not push cached prefixes out: it would trade what is known for what may never be.
    """
    accounts = state.accounts
    available = accounts.available
    size = accounts.shape.block_tokens
    unused = min(available, accounts.pool.free)
    while rounds > 1:
        room = available if rounds <= size else unused
        if work.lanes * (rounds // size + 1) <= room:
            break
        needed = 0
        for session in work.decoding:
            length = len(session.context)
            grant = min(rounds, session.context_limit - length)
            needed += accounts.missing(session, length + grant - 1)
        for share in work.prompts:
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
    state: State, work: _Work, rounds: int, cap: PrefillCap, *, is_solo: bool
) -> TickPlan | None:
    if not work.lanes:
        return None
    if state.column.sessions != work.decoding:
        state.column.clear()
    everybody = state.lanes.decoding
    if len(everybody) == len(work.decoding):
        flight = everybody.copy()
    else:
        flight = {session.lane: session for session in work.decoding}
    columns, tables = grant_decoding(state, work.decoding, rounds, list(flight))
    prompts: list[LanePlan] = []
    for share in work.prompts:
        session = share.session
        prompts.append(_lane_of_prompt(state, share, share.grant(rounds)))
        flight[session.lane] = session
    starts, frees = state.lanes.drain_changes()
    drops, outs, ins = state.accounts.park.drain()
    made = TickPlan(
        state.tick,
        LanePlans(columns, tables, prompts),
        cap.step_tokens,
        starts=starts,
        frees=frees,
        park_out=_parks(outs),
        park_in=_parks(ins),
        park_drop=drops,
        batch_invariant=is_solo,
    )
    steps = 0 if prompts else max(columns[3])
    state.flight = Flight(made, flight, sum([share.chunk for share in work.prompts]), rounds=steps)
    state.counters.ticks += 1
    state.counters.prefill_budget_tokens = cap.tokens
    granted = sum(columns[3]) + sum([each.grant for each in prompts])
    state.counters.decode_grant_tokens = granted
    return made


def grant_decoding(
    state: State, decoding: list[Session], rounds: int, lanes: list[int], ahead: int = 0
) -> tuple[_Columns, list[tuple[int, ...]]]:
    """Plan every decoding lane, the hot loop of a tick: the columns of `LanePlans`, and the block tables.

    `ahead` ids more will be in every context when the plan begins.
    """
    accounts = state.accounts
    lengths = [len(session.context) + ahead for session in decoding]
    lefts = [
        session.context_limit - length for session, length in zip(decoding, lengths, strict=True)
    ]
    grants = [rounds] * len(lefts)
    if lefts and min(lefts) < rounds:
        grants = [left if left < rounds else rounds for left in lefts]
    for session, length, grant in zip(decoding, lengths, grants, strict=True):
        if length + grant - 1 > session.places:
            is_held = accounts.ensure(session, length + grant - 1)
            assert is_held, "grants were measured against the pool"
    columns = (
        lanes,
        [length - 1 for length in lengths],
        [session.context[-1] for session in decoding],
        grants,
        [length - session.prompt for session, length in zip(decoding, lengths, strict=True)],
    )
    return columns, [session.table or accounts.table(session) for session in decoding]


def _lane_of_prompt(state: State, share: _Share, grant: int) -> LanePlan:
    session = share.session
    accounts = state.accounts
    context = session.context
    if grant > 1:
        is_held = accounts.ensure(session, len(context) + grant - 1)
        assert is_held, "grants were measured against the pool"
    start = session.computed
    return LanePlan(
        lane=session.lane,
        decoding=False,
        computed=start,
        inputs=tuple(context[start : start + share.chunk]),
        grant=grant,
        output_index=len(context) - session.prompt,
        blocks=accounts.table(session),
    )


def _parks(moves: tuple[tuple[int, tuple[int, ...]], ...]) -> tuple[Park, ...]:
    return tuple(Park(ticket, blocks) for ticket, blocks in moves)
