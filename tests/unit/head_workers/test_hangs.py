"""When the parent takes a worker for hung, what it does about it, and what it tells the real supervisor meanwhile."""

from __future__ import annotations

import faulthandler
import selectors
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from superfluid_core.clock import MS, SystemClock
from superfluid_core.errors import ConfigError
from superfluid_core.limits import WorkerLimits
from superfluid_core.notify import READY, WATCHDOG, notify
from superfluid_head.workers.board import DIED, HUNG, Board
from superfluid_head.workers.children import Child
from superfluid_head.workers.parent import Parent, Told

LIMITS = WorkerLimits(hang_ms=4_000, start_silent_ms=9_000, abort_ms=2_000, own_pause_ms=1_000)
WATCHDOG_MS = 8_000


class HandClock(SystemClock):
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.at_ns = 10**12

    def now_ns(self) -> int:
        return self.at_ns

    def turn(self, ms: int) -> None:
        self.at_ns += ms * MS


class Puppet(Child):
    """A worker without a process: it tells what the test has it tell, and notes what it is sent."""

    def __init__(self, number: int, folder: Path) -> None:
        super().__init__(number, folder, LIMITS)
        self.sent: list[int] = []
        self.status: int | None = None
        self.pid = 1_000_000 + number

    def send(self, number: int) -> None:
        if self.pid:
            self.sent.append(number)

    def reap(self) -> int | None:
        found = self.status
        if found is not None:
            self.pid, self.status = 0, None
        return found

    def tell(self, *words: str) -> None:
        assert notify("\n".join(words), str(self.path))


class Stage:
    """A parent of two puppets, and what the supervisor hears."""

    def __init__(self, folder: Path) -> None:
        self.clock = HandClock()
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.channel.bind(str(folder / "notify"))
        self.channel.setblocking(False)
        told = Told(2, 1_000, str(folder / "notify"), WATCHDOG_MS, LIMITS)
        self.parent = Parent(told, self.clock)
        self.children = [Puppet(number, folder) for number in range(2)]
        self.parent._children = list(self.children)
        self.parent._woken.setblocking(False)
        self.parent._selector.register(self.parent._woken, selectors.EVENT_READ, None)
        for child in self.children:
            child.begin(self.clock.now_ns())

    def look(self, ms: int) -> list[str]:
        """Have the parent look after so long; returns what the supervisor hears."""
        self.clock.turn(ms)
        for child in self.children:
            self.parent._hear(child)
        self.parent._wake.send(b"x")  # it waits for nothing
        self.parent._look()
        heard: list[str] = []
        while True:
            try:
                heard += self.channel.recv(4_096).decode().split("\n")
            except BlockingIOError:
                return heard

    def serve(self) -> None:
        for child in self.children:
            child.tell(READY)
        assert READY in self.look(0)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(faulthandler, "is_enabled", lambda: True)
    made = Stage(tmp_path)
    try:
        yield made
    finally:
        made.parent._clean()
        made.channel.close()


def test_a_worker_that_is_silent_for_too_long_is_ended_alone_and_counted(stage: Stage) -> None:
    stage.serve()
    first, second = stage.children
    fed = 0
    for _ in range(5):
        second.tell(WATCHDOG)
        fed += WATCHDOG in stage.look(1_000)
    assert fed >= 2, "the service lives while one worker hangs"
    assert (first.sent, second.sent) == ([signal.SIGABRT], [])
    for _ in range(3):
        second.tell(WATCHDOG)
        stage.look(1_000)
    assert first.sent == [signal.SIGABRT, signal.SIGKILL], "what cannot tell its stack is killed"
    first.status = -signal.SIGKILL
    second.tell(WATCHDOG)
    stage.look(100)
    assert stage.parent._board.ends() == {HUNG: 1, DIED: 0}
    assert first.due_ns > stage.clock.now_ns(), "it is started again after a pause"


def test_a_worker_that_cannot_be_ended_starves_the_supervisor(stage: Stage) -> None:
    stage.serve()
    second = stage.children[1]
    heard = []
    for _ in range(12):
        second.tell(WATCHDOG)
        heard.append(WATCHDOG in stage.look(1_000))
    assert any(heard[:7])
    assert not any(heard[8:])


def test_without_a_worker_that_serves_the_supervisor_is_not_fed(stage: Stage) -> None:
    stage.serve()
    for child in stage.children:
        child.status = 1
    assert WATCHDOG not in stage.look(3_000)
    assert stage.parent._board.ends() == {HUNG: 0, DIED: 2}


def test_one_that_loads_may_be_silent_for_longer_but_not_for_ever(stage: Stage) -> None:
    first, second = stage.children
    for _ in range(9):
        first.tell("STATUS=loading")
        stage.look(1_000)
    assert (first.sent, second.sent) == ([], [])
    first.tell("STATUS=loading")
    stage.look(1_000)
    assert (first.sent, second.sent) == ([], [signal.SIGABRT])


def test_a_pause_of_the_parents_own_is_nobodys_fault(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.serve()
    stage.look(60_000)
    assert [child.sent for child in stage.children] == [[], []]
    assert "the parent of the workers stood still" in caplog.text
    for _ in range(5):
        stage.look(1_000)
    assert [child.sent for child in stage.children] == [[signal.SIGABRT]] * 2


def test_what_a_worker_said_last_is_not_what_the_next_one_says(stage: Stage) -> None:
    first, second = stage.children
    first.tell(READY)
    first.status = 1
    stage.parent._on_end(first, 1)
    second.tell(READY)
    assert READY not in stage.look(0)


def test_one_that_was_ready_is_started_again_whatever_its_status(stage: Stage) -> None:
    first, second = stage.children
    first.tell(READY)
    stage.look(0)
    stage.parent._on_end(first, 2)
    with pytest.raises(ConfigError):
        stage.parent._on_end(second, 2)


@pytest.mark.parametrize(
    ("watchdog_ms", "hang_ms"), [(None, 15_000), (30_000, 15_000), (12_000, 6_000)]
)
def test_the_verdict_on_a_worker_comes_before_the_supervisors_on_all(
    watchdog_ms: int | None, hang_ms: int
) -> None:
    assert Told(2, 0, None, watchdog_ms).judged().hang_ms == hang_ms


def test_ends_are_counted_by_cause() -> None:
    board = Board()
    board.count(HUNG)
    board.count(HUNG)
    assert board.ends() == {DIED: 0, HUNG: 2}
