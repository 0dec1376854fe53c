"""Reservations: what this head has placed on a node, from the instant of the choice to the end of the placement.

Choosing and reserving are one synchronous step (`place`), so a burst that is placed on one old report spreads as if every
choice were reported at once. A reservation is covered by a report once the node has acknowledged the session and then
reported: the link keeps order, so no clock is compared. It is released once, however often it is asked to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import NamedTuple, Protocol

from superfluid_core.placement.policies import Choice, Policy, Refusal, choose
from superfluid_core.placement.view import (
    FleetView,
    Load,
    NodeView,
    OtherWork,
    PlacementLimits,
    PlacementRequest,
)
from superfluid_core.session import QosClass


class Follower(Protocol):
    """Who wants to know how a placement goes on: `started` at most once, then `released` once."""

    def started(self) -> None: ...

    def released(self) -> None: ...


class Reservation:
    """One session's hold on one node. Leaving its context, or `release`, gives everything back."""

    __slots__ = (
        "_follower",
        "_held",
        "_is_acknowledged",
        "_is_released",
        "_is_reported",
        "_reprefill_ms",
        "_tokens",
        "node",
        "qos",
        "tenant",
    )

    def __init__(self, node: NodeView, request: PlacementRequest) -> None:
        self.node = node
        self.qos = request.qos
        self.tenant = request.tenant
        self._tokens = max(0, request.context - request.cached.get(node.name, 0))
        self._is_acknowledged = False
        self._is_reported = False
        self._is_released = False
        self._follower: Follower | None = None
        # the engine that serves the model
        work = node.work(node.offers[request.model])
        self._held = held = work.held
        self._reprefill_ms = work.weigh_reprefill(self._tokens) if request.is_move else 0
        held.sessions += 1
        self._count(1)
        held.reprefill_ms += self._reprefill_ms
        held.unreported_sessions += 1
        held.unreported_tokens += self._tokens
        node.touch()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def is_released(self) -> bool:
        return self._is_released

    def follow(self, follower: Follower | None) -> None:
        """Tell `follower` of the first token and of the end."""
        self._follower = follower

    def acknowledge(self) -> None:
        """Note that the node has the session: its next report counts it."""
        self._is_acknowledged = True

    def started(self) -> None:
        """Note the first token: the session no longer prefills."""
        if self._follower is not None and not self._is_released:
            self._follower.started()
        if self._reprefill_ms and not self._is_released:
            self._held.reprefill_ms -= self._reprefill_ms
            self._reprefill_ms = 0
            self.node.touch()

    def set_qos(self, qos: QosClass) -> None:
        if not self._is_released:
            self._count(-1)
            self.qos = qos
            self._count(1)
            self.node.touch()
        self.qos = qos

    def covered(self) -> None:
        """Note a report: from now on it stands for this session, if the node had it by then."""
        if not self._is_acknowledged or self._is_reported or self._is_released:
            return
        self._is_reported = True
        self._held.unreported_sessions -= 1
        self._held.unreported_tokens -= self._tokens
        self.node.touch()

    def release(self) -> None:
        """Give back, once."""
        if self._is_released:
            return
        self._is_released = True
        if self._follower is not None:
            self._follower.released()
            self._follower = None
        held = self._held
        held.sessions -= 1
        self._count(-1)
        held.reprefill_ms -= self._reprefill_ms
        if self._is_reported:
            held.departed += 1
        else:
            held.unreported_sessions -= 1
            held.unreported_tokens -= self._tokens
        self.node.touch()

    def _count(self, change: int) -> None:
        """Count this session in its class and in its tenant's."""
        held, qos = self._held, self.qos
        held.by_class[qos] += change
        counts = held.by_tenant.get(self.tenant)
        if counts is None:
            counts = held.by_tenant[self.tenant] = [0] * len(QosClass)
        counts[qos] += change
        if change < 0 and not any(counts):
            del held.by_tenant[self.tenant]


class Placed(NamedTuple):
    """A choice and the reservation that was made in the same breath."""

    choice: Choice
    reservation: Reservation


def fold_load(
    node: NodeView,
    load: Load,
    reservations: Iterable[Reservation],
    others: Mapping[int, Load] | None = None,
) -> None:
    """Take a new report: it covers the acknowledged reservations and forgets those that have departed.

    `load` is the first engine's, `others` are those of the engines beside it, by number.
    """
    node.load = load
    for number, other in (others or {}).items():
        node.others.setdefault(number, OtherWork()).load = other
    for work in node.works:
        work.held.departed = 0
    node.touch()
    for reservation in reservations:
        reservation.covered()


def place(
    view: FleetView,
    request: PlacementRequest,
    policy: Policy,
    limits: PlacementLimits,
    *,
    draw: float,
    now_ns: int,
) -> Placed | Refusal:
    """Choose a node and reserve it. `draw` in [0, 1) breaks ties between nodes that were not chosen yet."""
    verdict = choose(view, request, policy, limits, draw=draw, now_ns=now_ns)
    if isinstance(verdict, Refusal):
        return verdict
    view.choose(verdict.node)
    return Placed(verdict, Reservation(view.nodes[verdict.node], request))
