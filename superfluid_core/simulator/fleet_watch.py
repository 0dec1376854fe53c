"""What the head sees of one simulated node's sessions, and what it keeps of them when they end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from superfluid_core.engine.compose import Step
from superfluid_core.placement.reserve import Reservation
from superfluid_core.scheduler.plan import Effect, Emits, Finish, Reject, TickPlan
from superfluid_core.scheduler.scheduler import Scheduler
from superfluid_core.session import QosClass, SessionKey
from superfluid_core.simulator.fleet_report import FleetResult


class Placed:
    """A live session: when it came, its reservation, its first token."""

    __slots__ = ("arrived_ns", "first_ns", "output", "qos", "reservation")

    def __init__(self, arrived_ns: int, qos: QosClass, reservation: Reservation) -> None:
        self.arrived_ns = arrived_ns
        self.qos = qos
        self.reservation = reservation
        self.first_ns = 0
        self.output = 0


class Watch:
    """Implements `node.Observer`. Holds live sessions only."""

    def __init__(self, result: FleetResult) -> None:
        self.live: dict[SessionKey, Placed] = {}
        self._result = result
        self._ended = 0

    def reservations(self) -> Iterator[Reservation]:
        return (each.reservation for each in self.live.values())

    def take_ended(self) -> int:
        """Return how many sessions ended since the last call."""
        ended, self._ended = self._ended, 0
        return ended

    def on_plan(self, plan: TickPlan, scheduler: Scheduler) -> None:
        """Plans are the node's own business."""

    def on_step(self, step: Step, start_ns: int, end_ns: int) -> None:
        result = self._result
        result.steps += 1
        result.lane_steps += len(step)
        result.busy_ns += end_ns - start_ns

    def on_effects(self, effects: Sequence[Effect], now_ns: int) -> None:
        for effect in effects:
            if type(effect) is Emits:
                if 0 in effect.indices:
                    self._first_of(effect, now_ns)
            elif type(effect) is Finish:
                self._finish(effect.key, now_ns)
            else:
                assert type(effect) is not Reject, "a node refused what the head had placed"

    def _first_of(self, effect: Emits, now_ns: int) -> None:
        indices = list(effect.indices)
        place = -1
        for _ in range(indices.count(0)):
            place = indices.index(0, place + 1)
            self._first(effect.keys[place], now_ns)

    def _first(self, key: SessionKey, now_ns: int) -> None:
        placed = self.live[key]
        placed.first_ns = now_ns
        placed.reservation.started()
        self._result.classes[placed.qos].ttft.add(now_ns - placed.arrived_ns)

    def _finish(self, key: SessionKey, now_ns: int) -> None:
        placed = self.live.pop(key)
        placed.reservation.release()
        self._ended += 1
        figures = self._result.classes[placed.qos]
        figures.finished += 1
        figures.stay.add(now_ns - placed.arrived_ns)
