"""SIGHUP: the list of nodes is read again, in a real process and by itself; a wrong one changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from superfluid_core.errors import ConfigError
from superfluid_head.cli import run
from superfluid_head.config import build_config, read_fleet, read_settings, surroundings
from superfluid_head.fleet.fleet import Fleet
from superfluid_head.reload import Reloader

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SUPERFLUID_"):
            monkeypatch.delenv(name)


def until(claim: Callable[[], bool], limit_s: float = 15.0) -> None:
    start = time.monotonic()
    while not claim():
        assert time.monotonic() - start < limit_s, "it never happened"
        time.sleep(0.02)


def test_what_is_read_again_is_judged_like_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "nodes.toml"
    file.write_text('nodes = ["127.0.0.1:1", "far=far.example"]')
    texts = (f"@{file}",)
    assert [node.key for node in read_fleet(texts, is_judged=True)] == ["127.0.0.1:1", "far"]
    with pytest.raises(ConfigError, match="--fleet-auth"):
        read_fleet(texts, is_judged=False)
    config = build_config(
        read_settings({"fleet": texts, "insecure_no_auth": True}, None), surroundings()
    )
    assert config.fleet_texts == texts
    assert config.is_fleet_judged


class FakeFleet:
    """Remembers the lists that it was given."""

    def __init__(self) -> None:
        self.lists: list[list[str]] = []

    def reload(self, nodes: Any) -> None:
        self.lists.append([node.key for node in nodes])


async def hang_up(
    config: Any,
    caplog: pytest.LogCaptureFixture,
    *steps: Callable[[], object],
    is_pending: bool = False,
) -> list[list[str]]:
    """Do each step, send the signal and wait for what comes of it; return the lists that the fleet was given. `is_pending`: the first signal came before."""
    fleet = FakeFleet()

    async def outcomes(count: int) -> None:
        for _ in range(1_000):
            if len(fleet.lists) + len(caplog.records) >= count:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("nothing came of the signal")

    reloader = Reloader(config, cast("Fleet", fleet))
    if not is_pending:
        os.kill(os.getpid(), signal.SIGHUP)  # heard although nobody runs it yet
    async with asyncio.TaskGroup() as group:
        task = group.create_task(reloader.run())
        await outcomes(1)
        for number, step in enumerate(steps):
            step()
            os.kill(os.getpid(), signal.SIGHUP)
            await outcomes(number + 2)
        task.cancel()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    return fleet.lists


def test_a_wrong_file_leaves_the_old_list_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "nodes.toml"
    file.write_text('nodes = ["a=127.0.0.1:1"]')
    config = SimpleNamespace(fleet_texts=(f"@{file}",), is_fleet_judged=False)
    steps: list[Callable[[], object]] = [
        lambda: file.write_text("nodes = ["),
        lambda: file.write_text('nodes = ["far.example"]'),
        file.unlink,
        lambda: file.write_text('nodes = ["a=127.0.0.1:1", "b=127.0.0.1:2"]'),
    ]
    with caplog.at_level("INFO", "superfluid_head.reload"):
        found = asyncio.run(hang_up(config, caplog, *steps))
    assert found == [["a"], ["a", "b"]]
    said = [line.getMessage() for line in caplog.records if line.levelname == "ERROR"]
    assert said == ["the list of nodes stays as it was"] * 3


def test_a_signal_that_came_while_a_worker_started_is_not_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "nodes.toml"
    file.write_text('nodes = ["a=127.0.0.1:1"]')
    config = SimpleNamespace(fleet_texts=(f"@{file}",), is_fleet_judged=False)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # as the parent forks it
    try:
        # for this thread alone: here are others, which do not hold it back
        signal.pthread_kill(threading.get_ident(), signal.SIGHUP)
        assert asyncio.run(hang_up(config, caplog, is_pending=True)) == [["a"]]
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGHUP}
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # one that was lost must not end the tests
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_head_without_a_list_lives_on(caplog: pytest.LogCaptureFixture) -> None:
    config = SimpleNamespace(fleet_texts=(), is_fleet_judged=False)
    with caplog.at_level("INFO", "superfluid_head.reload"):
        assert asyncio.run(hang_up(config, caplog)) == []
    assert "nothing to read again" in caplog.text


def test_systemd_reloads_a_head_by_the_same_signal() -> None:
    unit = (ROOT / "systemd" / "superfluid-head.service").read_text(encoding="utf-8")
    assert re.search(r"^ExecReload=/bin/kill -HUP \$MAINPID$", unit, re.MULTILINE)


class RunningHead:
    """A head in a process of its own, with the file of its nodes."""

    def __init__(self, folder: Path, port: int) -> None:
        self.nodes, self._said = folder / "nodes.toml", folder / "log"
        ready = folder / "ready.json"
        self.nodes.write_text(f'nodes = ["a=127.0.0.1:{port}"]')
        command = [
            sys.executable, "-m", "superfluid_head.cli", "serve", "--fleet", f"@{self.nodes}", "--http",
            "127.0.0.1:0", "--ready-file", str(ready), "--log-format", "json",
        ]  # fmt: skip
        with self._said.open("w") as err:
            self.process = subprocess.Popen(command, stderr=err)
        until(ready.exists)
        self.url = f"http://127.0.0.1:{json.loads(ready.read_text())['http'][0][1]}"

    def hosts(self) -> list[str]:
        found = httpx.get(f"{self.url}/v1/fleet", trust_env=False).json()
        return [node["address"].partition(":")[0] for node in found["nodes"]]

    def name(self, text: str) -> None:
        """Write the file anew and have it read."""
        self.nodes.write_text(text)
        self.process.send_signal(signal.SIGHUP)

    def said(self) -> str:
        return self._said.read_text()


@pytest.fixture
def head(tmp_path: Path) -> Iterator[RunningHead]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        running = RunningHead(tmp_path, taken.getsockname()[1])
        try:
            yield running
        finally:
            running.process.kill()
            running.process.wait(10)


OTHER = '{ name = "b", host = "127.0.0.2", port = 9 }'


@pytest.mark.slow
def test_a_running_head_follows_its_nodes_file_and_its_commands(
    head: RunningHead, capsys: pytest.CaptureFixture[str]
) -> None:
    assert head.hosts() == ["127.0.0.1"]
    first = head.nodes.read_text()
    head.name("this is no list")
    until(lambda: "stays as it was" in head.said())
    assert head.hosts() == ["127.0.0.1"]
    head.name(first.replace("]", f", {OTHER}]"))
    until(lambda: head.hosts() == ["127.0.0.1", "127.0.0.2"])
    url = ["--url", head.url]
    assert run(["fleet", "status", *url]) == 1
    assert "127.0.0.2:9" in capsys.readouterr().out
    assert run(["fleet", "drain", *url, "b"]) == run(["fleet", "undrain", *url, "b"]) == 0
    assert run(["fleet", "drain", *url, "c"]) == 1
    assert "no node is called 'c'" in capsys.readouterr().err
    head.name(f"nodes = [{OTHER}]")
    until(lambda: head.hosts() == ["127.0.0.2"])
    events = f"{head.url}/v1/fleet/events?since=0"
    with httpx.stream("GET", events, trust_env=False) as reply:
        lines = reply.iter_lines()
        kinds = [next(line for line in lines if line.startswith("event: ")) for _ in "1234"]
        assert kinds == ["event: reloaded", "event: drain", "event: undrain", "event: reloaded"]
        started = time.monotonic()
        head.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert head.process.wait(10) == 0
    assert time.monotonic() - started < 4, "a listener does not hold up the end"
    assert "Traceback" not in head.said()
