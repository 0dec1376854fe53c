"""Everything that one scheduler knows, and the few transitions that touch more than one part of it.

Queues, lanes and accounts each own their part; a session moves between them only here, so that it is in exactly one
collection at any time (S1) and its blocks, its lane and its terminal event go together. No decision is made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from superfluid_core.blockhash import root_hash
from superfluid_core.errors import ErrorCode
from superfluid_core.kv.blocks import PoolShape
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.accounts import Accounts
from superfluid_core.scheduler.lanes import Lanes
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
from superfluid_core.scheduler.rules import Reserve, Rules
from superfluid_core.scheduler.stats import Counters
from superfluid_core.scheduler.thrash import Thrash
from superfluid_core.session import FinishReason, QosClass, SessionKey, SessionSpec

_MS = 1_000_000
_SLACK = 64


@dataclass(slots=True)
class Flight:
    """The plan that the engine runs now; `lanes` are the sessions that it was made for."""

    plan: TickPlan
    lanes: dict[int, Session]
    live: int
    is_interrupted: bool = False


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
            shape, limits.watermark_pct, reserves_output=rules.reserve is Reserve.FULL
        )
        self.queues = Queues(make_policy(rules), self.period_ns)
        self.lanes = Lanes(limits.lanes)
        self.rates = Rates()
        self.thrash = Thrash(limits.lanes, rules.thrash_pct, self.period_ns)
        self.counters = Counters()
        self.sessions: dict[SessionKey, Session] = {}
        self.flight: Flight | None = None
        self.draining = False
        self.tick = 0
        self.now_ns = 0
        self.refusals = 0
        self.was_solo = False
        self.preempted_tick = 0
        self.pressure = PressureLevel.NONE
        self.must_shed = False
        self._prefix_salt = prefix_salt
        self._arrivals = 0
        self._deadlines: list[tuple[int, int, Session]] = []

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
            self._push_deadline(spec.deadline_ns, session)
        return session

    def admit(self, session: Session, now_ns: int) -> None:
        """Move from queued to prefilling, on a free lane. All gates have been passed."""
        self.queues.take(session)
        self.accounts.open(session)
        self.counters.prefix_hit_tokens += session.computed
        if not session.recompute_below:
            session.cached = session.computed
        self.lanes.admit(session, self.tick, now_ns)

    def preempt(self, session: Session, now_ns: int) -> None:
        """Take lane and blocks from an active session and put it before all others of its class."""
        session.recompute_below = max(session.recompute_below, session.computed)
        self._leave_lane(session)
        self.queues.put_back(session, now_ns)
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
            self.queues.remove(session)
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

    def is_capped(self, tenant: str) -> bool:
        cap = self.rules.tenant_lanes
        return cap > 0 and self.lanes.of_tenant(tenant) >= cap

    def ahead_of(self, qos: QosClass) -> int:
        """Sessions of this class or better that wait."""
        return sum(self.queues.depth(each) for each in QosClass if each <= qos)

    def pop_expired(self, now_ns: int) -> Session | None:
        """Take out a live session whose deadline has passed, each once."""
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            session = heappop(self._deadlines)[2]
            if session.is_live:
                return session
        return None

    # --- within -----------------------------------------------------------------------------------

    def _leave_lane(self, session: Session, *, is_tainted: bool = False) -> None:
        flight = self.flight
        if flight is not None and flight.lanes.get(session.lane) is session:
            flight.live -= 1
        self.accounts.close(session, is_tainted=is_tainted)
        self.lanes.release(session)
        self.queues.uncap(session.spec.tenant)

    def _push_deadline(self, deadline_ns: int, session: Session) -> None:
        heappush(self._deadlines, (deadline_ns, session.seq, session))
        if len(self._deadlines) > 2 * len(self.sessions) + _SLACK:
            self._deadlines = [entry for entry in self._deadlines if entry[2].is_live]
            heapify(self._deadlines)
