"""How the other ranks are ended: asked, killed, and never waited for without an end."""

from __future__ import annotations

import subprocess
import sys
from typing import IO, Any, cast

import pytest

from superfluid_core.clock import SECOND, SystemClock
from superfluid_core.engine.torch.parallel.launch import (
    END_SECONDS,
    KILLED_SECONDS,
    WORLD_MAX,
    Child,
    end,
)


class HandClock(SystemClock):
    """A clock that waits turn."""

    def __init__(self) -> None:
        self.at_ns = 10**12

    def now_ns(self) -> int:
        return self.at_ns


class Rank:
    """A child that ends when it is asked, when it is killed, or never."""

    stdin: IO[bytes] | None = None

    def __init__(self, clock: HandClock, ends_at: str, pid: int = 1) -> None:
        self.pid = pid
        self.said: list[str] = []
        self._clock = clock
        self._ends_at = ends_at

    def terminate(self) -> None:
        self.said.append("terminate")

    def kill(self) -> None:
        self.said.append("kill")

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "a wait without a deadline"
        if self._ends_at in self.said:
            return 0
        self._clock.at_ns += round(timeout * SECOND)
        raise subprocess.TimeoutExpired("rank", timeout)


def ended(*ranks: Rank, clock: HandClock) -> float:
    """End them; after how many seconds that returned."""
    began_ns = clock.at_ns
    end(cast("Any", ranks), clock)
    return (clock.at_ns - began_ns) / SECOND


def test_ranks_that_obey_are_not_killed() -> None:
    clock = HandClock()
    ranks = [Rank(clock, "terminate") for _ in range(3)]
    assert ended(*ranks, clock=clock) == 0
    assert [rank.said for rank in ranks] == [["terminate"]] * 3


def test_those_that_do_not_obey_are_killed_after_one_time_for_all() -> None:
    clock = HandClock()
    ranks = [Rank(clock, "kill") for _ in range(WORLD_MAX)]
    assert ended(*ranks, clock=clock) == END_SECONDS
    assert all(rank.said == ["terminate", "kill"] for rank in ranks)


def test_what_the_kernel_keeps_is_left_and_told(caplog: pytest.LogCaptureFixture) -> None:
    clock = HandClock()
    stuck, other = Rank(clock, "never", 4711), Rank(clock, "kill", 4712)
    assert ended(stuck, other, clock=clock) == END_SECONDS + KILLED_SECONDS
    told = [vars(record)["superfluid_fields"] for record in caplog.records]
    assert told == [{"pid": 4711}]


@pytest.mark.slow
def test_a_process_that_ignores_the_request_is_gone_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("superfluid_core.engine.torch.parallel.launch.END_SECONDS", 0.2)
    code = "import signal\nsignal.signal(15, 1)\nprint('up', flush=True)\nsignal.pause()"
    command = [sys.executable, "-c", code]
    child: Child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout as words:
        assert words.readline() == b"up\n"
        end([child], SystemClock())
    assert child.returncode == -9
