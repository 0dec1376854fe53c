"""The head's waiting room: generations that no node has room for, in the order in which they will be placed.

Moved sessions first (a reader is in mid-sentence), then by class, interactive first, and within a class by arrival; who has
waited for a period rises one class. New sessions are bounded in number, moved ones by the number of live sessions; each
has a deadline: a longer one while nodes are merely full, a short one while no node is up. Pure: ids and times, no tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from superfluid_core.clock import MS
from superfluid_core.errors import CapacityError, ErrorCode
from superfluid_core.limits import FleetLimits
from superfluid_core.session import QosClass

AGING_PERIOD_MS = 16_000
RETRY_AFTER_MS_MIN = 1_000
RETRY_AFTER_MS_MAX = 60_000


@dataclass(slots=True)
class Ticket:
    """One waiting generation. `without_node_since_ns` is set while no node could take it even if it were idle."""

    session: int
    qos: QosClass
    is_move: bool
    since_ns: int
    arrival: int
    without_node_since_ns: int | None = None


class WaitingRoom:
    """Who waits, in which order, for how long at most."""

    def __init__(self, limits: FleetLimits) -> None:
        self._limits = limits
        self._tickets: dict[int, Ticket] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(list(self._tickets.values()))

    def __contains__(self, session: object) -> bool:
        return session in self._tickets

    def by_class(self) -> tuple[int, ...]:
        counts = [0] * len(QosClass)
        for ticket in self._tickets.values():
            counts[ticket.qos] += 1
        return tuple(counts)

    def enter(self, session: int, qos: QosClass, since_ns: int, *, is_move: bool = False) -> Ticket:
        """Take a place. `since_ns` is when its wait began, also if it was placed and refused in between."""
        self._arrivals += 1
        ticket = Ticket(session, qos, is_move, since_ns, self._arrivals)
        self._tickets[session] = ticket
        return ticket

    def judge_room(self, session: int, seconds_each: float) -> None:
        """Raise CapacityError if `session` is one too many to wait; called after placing it failed."""
        ticket = self._tickets.get(session)
        if ticket is None or ticket.is_move:
            return
        waiting = sum(not other.is_move for other in self._tickets.values())
        if waiting <= self._limits.queue_max:
            return
        del self._tickets[session]
        retry_ms = int(1_000 * seconds_each * waiting)
        raise CapacityError(
            f"{waiting - 1} requests are waiting already",
            code=ErrorCode.QUEUE_FULL,
            retry_after_ms=min(max(retry_ms, RETRY_AFTER_MS_MIN), RETRY_AFTER_MS_MAX),
        )

    def leave(self, session: int) -> None:
        self._tickets.pop(session, None)

    def set_qos(self, session: int, qos: QosClass) -> None:
        ticket = self._tickets.get(session)
        if ticket is not None:
            ticket.qos = qos

    def in_order(self, now_ns: int) -> list[Ticket]:
        """Everyone, the one to place first in front."""

        def rank(ticket: Ticket) -> tuple[bool, int, int, int]:
            periods = max(0, now_ns - ticket.since_ns) // (AGING_PERIOD_MS * MS)
            aged = max(0, ticket.qos - periods)
            return (not ticket.is_move, aged, ticket.since_ns, ticket.arrival)

        return sorted(self._tickets.values(), key=rank)

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
