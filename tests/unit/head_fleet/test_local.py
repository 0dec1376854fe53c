"""The node of one's own: started, restarted, stopped, and gone with the head. Played by a small program."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from typing import Any

import pytest

from superfluid_core.clock import SystemClock
from superfluid_core.errors import ConfigError, ModelFilesError
from superfluid_head.fleet.local import LocalNode

PLAYED = textwrap.dedent(
    """
    import json, os, signal, sys
    arguments = sys.argv[1:]
    if "--fail" in arguments:
        sys.exit(int(arguments[arguments.index("--fail") + 1]))
    assert "--exit-with-parent" in arguments
    assert open(arguments[arguments.index("--auth-file") + 1]).read().startswith("fk1:")
    if "--stubborn" in arguments:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready = arguments[arguments.index("--ready-file") + 1]
    with open(ready + ".new", "w") as file:
        json.dump({"pid": os.getpid(), "listen": [["127.0.0.1", os.getpid() % 60000 + 1]]}, file)
    os.replace(ready + ".new", ready)
    while "--stubborn" in arguments:
        signal.pause()
    sys.stdin.read()
    """
)


@pytest.fixture
def program(tmp_path: Any) -> Any:
    path = tmp_path / "played.py"
    path.write_text(PLAYED)
    return (sys.executable, str(path))


def is_alive(pid: Any) -> Any:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until(claim: Any, seconds: Any = 10.0) -> None:
    for _ in range(int(seconds / 0.02)):
        if claim():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come about")


def test_it_is_started_restarted_after_a_kill_and_stopped_with_everything_it_left(
    program: Any,
) -> None:
    async def scenario() -> None:
        ports = []
        node = LocalNode((), SystemClock(), program=program)
        node.on_ready = lambda host, port: ports.append((host, port))
        home = node._home
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert stat.S_IMODE((home / "fleet.key").stat().st_mode) == 0o600
        async with asyncio.TaskGroup() as group:
            task = group.create_task(node.run())
            await until(lambda: len(ports) == 1)
            first = node.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            await until(lambda: len(ports) == 2)
            second = node.pid
            assert second != first
            assert ports[0] != ports[1]
            assert node.restarts == 1
            task.cancel()
        assert not is_alive(second)
        assert not home.exists()

    asyncio.run(scenario())


def test_one_that_ignores_sigterm_is_killed(program: Any) -> None:
    async def scenario() -> None:
        ready = asyncio.Event()
        node = LocalNode(("--stubborn",), SystemClock(), program=program, stop_ms=200)
        node.on_ready = lambda _host, _port: ready.set()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(node.run())
            await asyncio.wait_for(ready.wait(), 10)
            pid = node.pid
            task.cancel()
        assert not is_alive(pid)

    asyncio.run(scenario())


@pytest.mark.parametrize(("code", "error"), [(2, ConfigError), (3, ModelFilesError)])
def test_a_fault_of_configuration_or_model_is_not_retried(
    program: Any, code: Any, error: Any
) -> None:
    async def scenario() -> None:
        node = LocalNode(("--fail", str(code)), SystemClock(), program=program)
        with pytest.raises(error):
            await asyncio.wait_for(node.run(), 10)
        assert not node._home.exists()

    asyncio.run(scenario())


def test_it_ends_when_the_head_is_killed(program: Any, tmp_path: Any) -> None:
    told = tmp_path / "pid"
    head = textwrap.dedent(
        f"""
        import asyncio, pathlib
        from superfluid_core.clock import SystemClock
        from superfluid_head.fleet.local import LocalNode
        node = LocalNode((), SystemClock(), program={program!r})
        node.on_ready = lambda host, port: pathlib.Path({str(told)!r}).write_text(str(node.pid))
        asyncio.run(node.run())
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", head], env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    try:
        for _ in range(500):
            if told.exists() and told.read_text():
                break
            time.sleep(0.02)
        pid = int(told.read_text())
    finally:
        process.kill()
        process.wait(10)
    for _ in range(250):
        if not is_alive(pid):
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the child outlived its head")
