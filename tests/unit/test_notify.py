"""Datagrams to the supervisor: filesystem and abstract sockets, and silence without one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from superfluid_core.notify import READY, notify, status, watchdog_interval_ms


def test_a_state_reaches_a_socket_in_the_filesystem(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(path)
        supervisor.settimeout(5)
        assert notify("\n".join((READY, status("two\nlines"))), path)
        assert supervisor.recv(4096) == b"READY=1\nSTATUS=two lines"


def test_a_state_reaches_an_abstract_socket() -> None:
    name = f"superfluid-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind("\0" + name)
        supervisor.settimeout(5)
        assert notify(READY, "@" + name)
        assert supervisor.recv(4096) == b"READY=1"


@pytest.mark.parametrize("path", [None, "", "relative", "/nowhere/at/all", "/" + "x" * 300])
def test_without_a_listener_nothing_happens(path: str | None) -> None:
    assert notify(READY, path) is False


def test_an_oversized_state_is_not_sent(tmp_path: Path) -> None:
    assert notify("X" * 5_000, str(tmp_path / "notify")) is False


@pytest.mark.parametrize(
    ("usec", "pid", "expected"),
    [
        ("30000000", None, 15_000),
        ("30000000", "7", 15_000),
        ("30000000", "8", None),
        (None, None, None),
        ("", None, None),
        ("0", None, None),
        ("abc", None, None),
        ("-5", None, None),
        ("1000", "", 1),
    ],
)
def test_the_watchdog_is_fed_at_half_its_timeout_by_the_watched_process_only(
    usec: str | None, pid: str | None, expected: int | None
) -> None:
    assert watchdog_interval_ms(usec, pid, 7) == expected
