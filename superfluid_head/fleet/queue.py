"""The head's waiting room: generations that no node has room for, in the order in which they will be placed.

Moved sessions first (a reader is in mid-sentence), then by class, interactive first. Within a class the tenant that was served
least goes first, and within a tenant who came first. Whoever waits raises one place of its class by a class for every period; who
gets that place is again the tenants' order, or a long backlog would pass every newcomer. New sessions are
bounded in number, in tokens and in the wait that is predicted for them, moved ones by the number of live sessions; each has
a deadline: a longer one while nodes are merely full, a short one while no node is up. Pure: ids and times, no tasks.

Fairness is the scheduler's `fair` policy (policies.py there) for a room without lanes: a counter of tokens per tenant, charged
when they are placed and produced; a tenant that becomes active is lifted to the least counter of the active ones. The order also
counts what is still to come of those that run, at the expected output: else who is behind would be given place after place,
for none of which it has paid, and would be ahead by all of them. Those who wait count as if everyone of their tenant before
them had been placed, so that one look gives an order for many.
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
WHOLE_SHARE = 1_000
"""What a token costs a tenant of weight 1; whole numbers stay whole for all weights up to this."""


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
    expected: int = 0
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
    """Tokens that tenants were served, by weight; only differences between active tenants matter.

    A tenant of weight w is charged a w-th of its tokens, so it gets w times as many. Of sessions that run, what is expected
    beyond what was produced is `coming`.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._active: dict[str, int] = {}
        self._weights: dict[str, int] = {}
        self._coming: dict[str, int] = {}
        self._left: dict[int, int] = {}

    def begin(self, tenant: str, weight: int = 1) -> None:
        """One more generation of this tenant lives: it has no claim from the time in which it had none."""
        self._weights[tenant] = weight
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
            del self._weights[tenant]

    def placed(self, session: int, tenant: str, prompt: int, expected: int) -> None:
        """Charge the prompt, and expect that much output."""
        self._charge(tenant, prompt)
        self._left[session] = expected
        self._comes(tenant, expected)

    def produced(self, session: int, tenant: str, output: int) -> None:
        """Charge tokens; they are no longer to come."""
        share = OUTPUT_WEIGHT * output * WHOLE_SHARE // self._weights.get(tenant, 1)
        self._served[tenant] = self._served.get(tenant, 0) + share
        left = self._left.get(session)
        if left:
            came = output if output < left else left
            self._left[session] = left - came
            self._comes(tenant, -came)

    def over(self, session: int, tenant: str) -> None:
        """Expect nothing more of a session."""
        self._comes(tenant, -self._left.pop(session, 0))

    def cost(self, tenant: str, prompt: int, output: int = 0) -> int:
        """Return what so many tokens cost a tenant."""
        tokens = prompt + OUTPUT_WEIGHT * output
        return tokens * WHOLE_SHARE // self._weights.get(tenant, 1)

    def served(self, tenant: str) -> int:
        return self._served.get(tenant, 0)

    def granted(self, tenant: str) -> int:
        """Return what was served and what is to come."""
        return self.served(tenant) + self.cost(tenant, 0, self._coming.get(tenant, 0))

    def _charge(self, tenant: str, tokens: int) -> None:
        self._served[tenant] = self._served.get(tenant, 0) + self.cost(tenant, tokens)

    def _comes(self, tenant: str, change: int) -> None:
        coming = self._coming.pop(tenant, 0) + change
        if coming:
            self._coming[tenant] = coming


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
        tickets = self._tickets.values()
        if len(tickets) < 2:  # as nearly always: who comes is placed at once
            return list(tickets)
        moved = [ticket for ticket in tickets if ticket.is_move]
        moved.sort(key=lambda each: (_aged(each, each.since_ns, now_ns), *_age(each)))
        late: list[tuple[int, Ticket]] = []
        for qos in QosClass:
            of_class = sorted((t for t in tickets if t.qos is qos and not t.is_move), key=_age)
            since_ns = [ticket.since_ns for ticket in of_class]
            # waits raise the class, tokens say who of it goes: a long backlog gives its tenant no claim
            fair = self._by_turn([(0, ticket) for ticket in of_class])
            late += [
                (_aged(ticket, since, now_ns), ticket)
                for ticket, since in zip(fair, since_ns, strict=True)
            ]
        return moved + self._by_turn(late)

    def _by_turn(self, ranked: list[tuple[int, Ticket]]) -> list[Ticket]:
        """Order by rank, and within a rank by the tenants' tokens: each one's turn comes after those of its tenant before it."""
        ranked.sort(key=lambda entry: (entry[0], *_age(entry[1])))
        turns: dict[str, int] = {}
        placed: list[tuple[int, int, int, int, Ticket]] = []
        for rank, ticket in ranked:
            tenant = ticket.tenant
            if tenant not in turns:
                turns[tenant] = self.shares.granted(tenant)
            turn = turns[tenant]
            turns[tenant] = turn + self.shares.cost(tenant, ticket.tokens, ticket.expected)
            placed.append((rank, turn, *_age(ticket), ticket))
        placed.sort(key=lambda entry: entry[:4])
        return [entry[4] for entry in placed]

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


def _age(ticket: Ticket) -> tuple[int, int]:
    return ticket.since_ns, ticket.arrival


def _aged(ticket: Ticket, since_ns: int, now_ns: int) -> int:
    """Return the class as which a ticket counts that has waited, or whose class has, since then."""
    periods = max(0, now_ns - since_ns) // (AGING_PERIOD_MS * MS)
    return max(0, ticket.qos - periods)
