"""The head's waiting room: generations that no node has room for, in the order in which they will be placed.

Moved sessions first (a reader is in mid-sentence), then by class, interactive first; who has waited for a period rises one
class. Within a class the tenant that was served least goes first, and within a tenant who came first. New sessions are
bounded in number, in tokens and in the wait that is predicted for them, moved ones by the number of live sessions; each has
a deadline: a longer one while nodes are merely full, a short one while no node is up. Pure: ids and times, no tasks.

Fairness is the scheduler's `fair` policy (policies.py there) for a room without lanes: a counter of tokens per tenant, charged
when they are placed and produced; a tenant that becomes active is lifted to the least counter of the active ones. Those who
wait count as if everyone of their tenant before them had been placed, so that one look gives an order for many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from superfluid_core.clock import MS, SECOND
from superfluid_core.errors import CapacityError, ErrorCode
from superfluid_core.limits import FleetLimits
from superfluid_core.session import QosClass

AGING_PERIOD_MS = 16_000
RETRY_AFTER_MS_MIN = 1_000
RETRY_AFTER_MS_MAX = 120_000
PACE_WEIGHT = 0.2
OUTPUT_WEIGHT = 2
TENANTS_KEPT_MAX = 4_096


@dataclass(slots=True)
class Ticket:
    """One waiting generation. `without_node_since_ns` is set while no node could take it even if it were idle."""

    session: int
    qos: QosClass
    is_move: bool
    since_ns: int
    arrival: int
    tenant: str = ""
    tokens: int = 0
    without_node_since_ns: int | None = None
    has_waited: bool = False


class Pace:
    """The time between two places that became free to those who wait: a moving average, 0 while nobody has waited."""

    def __init__(self) -> None:
        self.ns = 0
        self._last_ns = 0

    def placed(self, since_ns: int, now_ns: int) -> None:
        """Note that one was placed who had waited since `since_ns`: time before that, when nobody waited, does not count."""
        took_ns = max(0, now_ns - max(self._last_ns, since_ns))
        self._last_ns = now_ns
        self.ns = round(self.ns + PACE_WEIGHT * (took_ns - self.ns)) if self.ns else took_ns


class MoveRate:
    """Bounds how fast sessions move in the whole fleet: at most `moves_burst` at once, `moves_per_s` in the long run."""

    def __init__(self, limits: FleetLimits) -> None:
        self._cost_ns = SECOND // limits.moves_per_s
        self._burst_ns = limits.moves_burst * self._cost_ns
        self._full_ns = 0

    def has_one(self, now_ns: int) -> bool:
        return max(self._full_ns, now_ns) + self._cost_ns - now_ns <= self._burst_ns

    def take(self, now_ns: int) -> None:
        self._full_ns = max(self._full_ns, now_ns) + self._cost_ns


class TenantShares:
    """Tokens that tenants were served, in weights; only differences between active tenants matter."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._active: dict[str, int] = {}

    def begin(self, tenant: str) -> None:
        """One more generation of this tenant lives: it has no claim from the time in which it had none."""
        if tenant not in self._active:
            own = self._served.get(tenant, 0)
            least = min((self._served.get(name, 0) for name in self._active), default=own)
            if len(self._served) > TENANTS_KEPT_MAX + len(self._active):
                self._served = {name: self._served.get(name, 0) for name in self._active}
            self._served[tenant] = max(own, least)
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def end(self, tenant: str) -> None:
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]

    def charge(self, tenant: str, prompt: int, output: int) -> None:
        self._served[tenant] = self._served.get(tenant, 0) + prompt + OUTPUT_WEIGHT * output

    def served(self, tenant: str) -> int:
        return self._served.get(tenant, 0)


class WaitingRoom:
    """Who waits, in which order, for how long at most."""

    def __init__(self, limits: FleetLimits) -> None:
        self.shares = TenantShares()
        self._limits = limits
        self._tickets: dict[int, Ticket] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(list(self._tickets.values()))

    def __contains__(self, session: object) -> bool:
        return session in self._tickets

    @property
    def tokens(self) -> int:
        """Context tokens of the new sessions that wait."""
        return sum(ticket.tokens for ticket in self._tickets.values() if not ticket.is_move)

    def by_class(self) -> tuple[int, ...]:
        counts = [0] * len(QosClass)
        for ticket in self._tickets.values():
            counts[ticket.qos] += 1
        return tuple(counts)

    def enter(
        self,
        session: int,
        qos: QosClass,
        since_ns: int,
        *,
        is_move: bool = False,
        tenant: str = "",
        tokens: int = 0,
    ) -> Ticket:
        """Take a place. `since_ns` is when its wait began, also if it was placed and refused in between."""
        self._arrivals += 1
        ticket = Ticket(session, qos, is_move, since_ns, self._arrivals, tenant, tokens)
        self._tickets[session] = ticket
        return ticket

    def judge_room(self, session: int, pace_ns: int, *, is_measured: bool = True) -> None:
        """Raise CapacityError if `session` is one too many to wait, or would wait too long; called after placing it failed.

        `pace_ns` is the time between two places. Nobody is refused by a prediction that nothing was measured for.
        """
        ticket = self._tickets.get(session)
        if ticket is None or ticket.is_move:
            return
        ahead = sum(not other.is_move for other in self._tickets.values()) - 1
        drained_ms = pace_ns * ahead // MS
        if ahead >= self._limits.queue_max:
            text = f"{ahead} requests are waiting already"
            self._refuse(ticket, ErrorCode.QUEUE_FULL, text, drained_ms)
        tokens_max = self._limits.queued_tokens_max
        if tokens_max and ahead and self.tokens > tokens_max:
            text = f"requests of {self.tokens - ticket.tokens} tokens are waiting already"
            self._refuse(ticket, ErrorCode.QUEUE_FULL, text, drained_ms)
        if self._limits.ttft_slo_ms and is_measured:
            self._judge_promise(ticket, pace_ns)

    def _judge_promise(self, ticket: Ticket, pace_ns: int) -> None:
        order = [other.session for other in self.in_order(ticket.since_ns)]
        predicted_ms = pace_ns * (order.index(ticket.session) + 1) // MS
        slo_ms = self._limits.ttft_slo_ms
        if predicted_ms > slo_ms:
            text = f"a lane is predicted in {predicted_ms} ms, more than {slo_ms} ms"
            self._refuse(ticket, ErrorCode.SLO_UNATTAINABLE, text, predicted_ms - slo_ms)

    def _refuse(self, ticket: Ticket, code: ErrorCode, text: str, retry_ms: int) -> None:
        del self._tickets[ticket.session]
        retry_ms = min(max(retry_ms, RETRY_AFTER_MS_MIN), RETRY_AFTER_MS_MAX)
        raise CapacityError(text, code=code, retry_after_ms=retry_ms)

    def leave(self, session: int) -> None:
        self._tickets.pop(session, None)

    def set_qos(self, session: int, qos: QosClass) -> None:
        ticket = self._tickets.get(session)
        if ticket is not None:
            ticket.qos = qos

    def in_order(self, now_ns: int) -> list[Ticket]:
        """Everyone, the one to place first in front."""
        turns: dict[str, int] = {}
        ranked: list[tuple[bool, int, int, int, int, Ticket]] = []
        # a tenant's own order first: each ticket's turn comes after the tokens of those before it
        for (is_late, aged, since_ns, arrival), ticket in sorted(
            (self._place(ticket, now_ns), ticket) for ticket in self._tickets.values()
        ):
            tenant = ticket.tenant
            turn = turns.setdefault(tenant, self.shares.served(tenant))
            if is_late:
                turns[tenant] = turn + ticket.tokens
            ranked.append((is_late, aged, turn if is_late else 0, since_ns, arrival, ticket))
        ranked.sort(key=lambda entry: entry[:5])
        return [entry[5] for entry in ranked]

    def _place(self, ticket: Ticket, now_ns: int) -> tuple[bool, int, int, int]:
        periods = max(0, now_ns - ticket.since_ns) // (AGING_PERIOD_MS * MS)
        return (not ticket.is_move, max(0, ticket.qos - periods), ticket.since_ns, ticket.arrival)

    def expired(self, now_ns: int) -> list[tuple[Ticket, ErrorCode]]:
        """Take out those whose wait is over, each with the code that says why."""
        over: list[tuple[Ticket, ErrorCode]] = []
        for ticket in self:
            lonely_ns = ticket.without_node_since_ns
            if lonely_ns is not None and now_ns - lonely_ns >= self._limits.no_node_wait_ms * MS:
                over.append((ticket, ErrorCode.NO_WORKER))
            elif now_ns - ticket.since_ns >= self._limits.queue_wait_ms_max * MS:
                over.append((ticket, ErrorCode.OVERLOADED))
        for ticket, _ in over:
            self.leave(ticket.session)
        return over
