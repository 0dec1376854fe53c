"""Everything that one scheduler knows, and the few transitions that touch more than one part of it.

Queues, lanes and accounts each own their part; a session moves between them only here, so that it is in exactly one
collection at any time (S1) and its blocks, its lane and its terminal event go together. No decision is made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from superfluid_core.blockhash import root_hash
from superfluid_core.errors import ConfigError, ErrorCode
from superfluid_core.kv.blocks import PoolShape
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.accounts import Accounts
from superfluid_core.scheduler.column import Column
from superfluid_core.scheduler.hits import HitWatch
from superfluid_core.scheduler.lanes import Lanes
from superfluid_core.scheduler.parking import bring_back, give_up
from superfluid_core.scheduler.plan import (
    Effect,
    Finish,
    Interrupt,
    PressureLevel,
    TickPlan,
)
from superfluid_core.scheduler.policies import make_policy
from superfluid_core.scheduler.queues import Queues
from superfluid_core.scheduler.rates import Rates
from superfluid_core.scheduler.records import Phase, Session
from superfluid_core.scheduler.rules import Batching, Reserve, Rules
from superfluid_core.scheduler.stats import Counters, TenantMeters
from superfluid_core.scheduler.thrash import Thrash
from superfluid_core.session import FinishReason, QosClass, SessionKey, SessionSpec

_MS = 1_000_000
_SLACK = 64
_STALE_MAX = 8


@dataclass(slots=True)
class Flight:
    """The plan that the engine runs now; `lanes` are the sessions that it was made for and that have not left since.

    `rounds` counts its steps when none of its lanes has a prompt to compute, else it is 0; `steps` counts those that were committed.
    """

    plan: TickPlan
    lanes: dict[int, Session]
    prompt_tokens: int = 0
    is_interrupted: bool = False
    rounds: int = 0
    steps: int = 0


class State:
    """The parts of a scheduler. Phases of a tick are functions over it, in modules of their own."""

    def __init__(
        self, limits: SchedulerLimits, shape: PoolShape, rules: Rules, prefix_salt: bytes
    ) -> None:
        rules.check(limits)
        self.limits = limits
        self.rules = rules
        self.period_ns = max(1, limits.starvation_ticks * limits.tick_target_ms * _MS)
        self.accounts = Accounts(
            shape,
            limits.watermark_pct,
            reserves_output=rules.reserve is Reserve.FULL,
            park_blocks=_park_blocks(rules, shape),
        )
        policy = make_policy(rules)
        self.queues = Queues(policy, self.period_ns)
        self.hits = HitWatch(self.accounts, self.queues) if policy.follows_cache else None
        self.lanes = Lanes(limits.lanes)
        self.column = Column()
        self.rates = Rates()
        self.thrash = Thrash(limits.lanes, rules.thrash_pct, self.period_ns)
        self.counters = Counters()
        self.tenants = TenantMeters()
        self.sessions: dict[SessionKey, Session] = {}
        self.flight: Flight | None = None
        self.foreseen: Flight | None = None
        self.draining = False
        self.tick = 0
        self.now_ns = 0
        self.refusals = 0
        self.was_solo = False
        self.was_prefill_pass = False
        self.preempted_tick = 0
        self.pressure = PressureLevel.NONE
        self.must_shed = False
        self.no_park_until_ns = 0
        self.drops_wait = False
        self._prefix_salt = prefix_salt
        self._arrivals = 0
        # when, whose, whether it is for the start only
        self.deadlines: list[tuple[int, int, bool, Session]] = []

    # --- transitions ------------------------------------------------------------------------------

    def open(self, spec: SessionSpec) -> Session:
        """Make a record for an accepted session; it is in no collection yet."""
        self._arrivals += 1
        session = Session(
            spec,
            self._arrivals,
            spec.qos,
            [*spec.prompt, *spec.delivered],
            min(len(spec.prompt) + spec.max_output, self.accounts.shape.context_max),
            len(spec.prompt),
            self.tenants.of(spec.tenant),
        )
        session.root = root_hash(
            self._prefix_salt,
            tenant="" if self.rules.prefix_shared else spec.tenant,
            cache_salt=spec.cache_salt,
            variant="batch-invariant" if spec.batch_invariant else "",
        )
        self.sessions[spec.key] = session
        self.queues.policy.on_arrival(session)
        if spec.deadline_ns is not None:
            self._push_deadline(spec.deadline_ns, session, to_start=False)
        if spec.start_deadline_ns is not None:
            self._push_deadline(spec.start_deadline_ns, session, to_start=True)
        return session

    def enqueue(self, session: Session, now_ns: int) -> None:
        """Let a newcomer wait."""
        self.queues.add(session, now_ns)
        if self.hits is not None:
            self.hits.watch(session)

    def admit(self, session: Session, now_ns: int) -> None:
        """Move from queued to prefilling, on a free lane. All gates have been passed.

        Who comes back from the host with all its KV goes on to decode at once.
        """
        if self.hits is not None:
            self.hits.unwatch(session)
        self.queues.take(session)
        self.accounts.open(session)
        hit = session.computed
        imported, restored = bring_back(self.accounts, session)
        self.counters.prefix_hit_tokens += hit + imported
        self.counters.imported_tokens += imported
        self.counters.restored_tokens += restored
        if not session.recompute_below:
            session.cached = session.computed
        self.lanes.admit(session, self.tick, now_ns)
        if restored and session.remaining == 1:
            is_held = self.accounts.ensure(session, len(session.context))
            assert is_held, "the pool broke its promise of a context's blocks"
            self.promote_to_decode(session, session.computed)

    def promote_to_decode(self, session: Session, kv: int) -> None:
        """Let a session decode: the one door from prefilling, whoever computed the KV.

        `kv` positions at the front of the context have theirs, in the session's blocks: all but the last, whose token is fed next.
        """
        assert kv == len(session.context) - 1, "a session decodes with one token to feed"
        session.computed = kv
        session.due = self.accounts.next_due(session)
        self.lanes.promote(session)

    def preempt(self, session: Session, now_ns: int) -> None:
        """Take lane and blocks from an active session and put it before all others of its class."""
        session.recompute_below = max(session.recompute_below, session.computed)
        self._leave_lane(session)
        self.queues.put_back(session, now_ns)
        if self.hits is not None:
            self.hits.watch(session)
        self.preempted_tick = self.tick

    def finish(
        self,
        session: Session,
        reason: FinishReason,
        *,
        stop_id: int | None = None,
        code: ErrorCode | None = None,
        text: str = "",
    ) -> Finish:
        """Give a live session its one terminal event, whichever collection it is in."""
        if session.is_active:
            if reason is not FinishReason.ERROR:
                self.rates.on_finish(self.now_ns - session.admitted_ns)
            self._leave_lane(session, is_tainted=code is ErrorCode.NAN_LOGITS)
        elif session in self.queues:
            if self.hits is not None:
                self.hits.unwatch(session)
            self.queues.remove(session)
            give_up(self.accounts, session)
        session.phase = Phase.FINISHED
        del self.sessions[session.key]
        self.queues.policy.on_finish(session)
        self.counters.finished[reason] += 1
        return Finish(session.key, reason, stop_id, code, text)

    def interrupt(self, effects: list[Effect]) -> None:
        """Ask the engine to stop at its next step, once per tick."""
        flight = self.flight
        if flight is None or flight.is_interrupted:
            return
        flight.is_interrupted = True
        self.counters.interrupts += 1
        effects.append(Interrupt(flight.plan.tick))

    def trim_all(self) -> int:
        """Take back what cut-short grants left with the lanes; returns the blocks won."""
        assert self.flight is None, "the engine may be writing into them"
        return sum(self.accounts.trim(session) for session in self.lanes)

    # --- questions --------------------------------------------------------------------------------

    @property
    def admits(self) -> bool:
        """Whether a free lane may be given away now: a static batch takes nobody in until it has ended."""
        return self.rules.batching is Batching.CONTINUOUS or not self.lanes.busy

    def peek(self, qos: QosClass, now_ns: int) -> Session | None:
        """Who of a class is next, by what is cached now where the policy asks for that."""
        session = self.queues.head(qos, now_ns, self.is_capped)
        if self.hits is None:
            return session
        for _ in range(_STALE_MAX):
            if session is None or session.front or not self.hits.is_stale(session):
                break
            session = self.queues.head(qos, now_ns, self.is_capped)
        return session

    def is_capped(self, tenant: str) -> bool:
        cap = self.rules.tenant_lanes
        return cap > 0 and self.lanes.of_tenant(tenant) >= cap

    def ahead_of(self, qos: QosClass) -> int:
        """Sessions of this class or better that wait."""
        return self.queues.ahead_of(qos)

    def pop_expired(self, now_ns: int) -> Session | None:
        """Take out a live session whose deadline has passed, each once."""
        while self.deadlines and self.deadlines[0][0] <= now_ns:
            _, _, to_start, session = heappop(self.deadlines)
            if session.is_live and not (to_start and session.admission):
                return session
        return None

    # --- within -----------------------------------------------------------------------------------

    def _leave_lane(self, session: Session, *, is_tainted: bool = False) -> None:
        flight = self.flight
        if flight is not None and flight.lanes.get(session.lane) is session:
            del flight.lanes[session.lane]
        self.column.remove(session)
        self.accounts.close(session, is_tainted=is_tainted)
        self.lanes.release(session)
        self.queues.uncap(session.spec.tenant)

    def _push_deadline(self, deadline_ns: int, session: Session, *, to_start: bool) -> None:
        heappush(self.deadlines, (deadline_ns, session.seq, to_start, session))
        if len(self.deadlines) > 4 * len(self.sessions) + _SLACK:
            self.deadlines = [entry for entry in self.deadlines if entry[3].is_live]
            heapify(self.deadlines)


def _park_blocks(rules: Rules, shape: PoolShape) -> int:
    """Blocks that the host's memory may hold. Raises ConfigError for an engine that cannot move KV there."""
    if not rules.park:
        return 0
    if not shape.block_bytes:
        raise ConfigError("park: this engine cannot move KV to host memory")
    if rules.park_bytes < shape.block_bytes:
        text = (
            f"park-bytes {rules.park_bytes} is less than one KV block of {shape.block_bytes} bytes"
        )
        raise ConfigError(text)
    return rules.park_bytes // shape.block_bytes
