"""When STATUS is told, in virtual time: a busy machine neither delays nor stretches anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

from superfluid_core.limits import LinkLimits
from superfluid_noded.service import Service
from tests.sim.world import MS, Process, World


class Telling:
    """A service with one head, and when it was told a status."""

    def __init__(self) -> None:
        self.world = World()
        self.process = Process(self.world, "node")
        self.told: list[int] = []
        roster = SimpleNamespace(live={}, heads={1: "head"}, send=self._tell)
        agent = SimpleNamespace(limits=LinkLimits(), roster=roster, is_draining=False)
        self.agent = cast("Any", agent)
        service = Service(self.agent, Mock(), (), self.process, dict)
        service.status = Mock()  # type: ignore[method-assign]
        self.process.start(service.tell_status())
        self.told_within(1)

    def _tell(self, _head: object, _messages: object) -> None:
        self.told.append(self.world.now_ns)

    def change(self) -> None:
        self.process.call(self.agent.on_change)

    def told_within(self, duration_ms: int) -> list[int]:
        """The milliseconds from now at which a status is told."""
        self.told.clear()
        began_ns = self.world.now_ns
        self.world.run_until(began_ns + duration_ms * MS)
        return [(at_ns - began_ns) // MS for at_ns in self.told]


def test_status_comes_at_once_when_the_load_changes_and_keeps_its_period_while_sessions_live() -> (
    None
):
    node = Telling()
    assert node.told_within(2_000) == []
    node.agent.roster.live[1] = "session"
    node.change()
    # its least distance, then its period
    assert node.told_within(1_000) == [0, 300, 600, 900]
    node.agent.roster.live.clear()
    node.change()
    assert len(node.told_within(1_000)) <= 2
    assert node.told_within(2_000) == []


def test_changes_that_come_often_are_told_no_more_often_than_the_least_distance() -> None:
    node = Telling()
    told = []
    for _ in range(100):
        node.change()
        told += node.told_within(5)
    assert 9 <= len(told) <= 11
