"""The program from outside: what it prints, where it listens, and with which status it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from superfluid_core.engine.loop import EngineLoop
from superfluid_core.errors import EngineError
from superfluid_core.limits import LinkLimits
from superfluid_core.link.dial import dial
from superfluid_core.link.keys import load_keys, write_key_file
from superfluid_core.modelfiles.resolve import resolve
from superfluid_core.wire.messages import MINOR, CloseReason, Goaway, Hello, Welcome
from superfluid_noded import cli, server
from tests.unit.noded.conftest import HeadEnd, JumpClock

PROGRAM = (sys.executable, "-m", "superfluid_noded.cli")
MOCK = ("--engine", "mock", "--model", "demo", "--mock-eos", "0")
LOOPBACK = ("--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
SECONDS = 40


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SUPERFLUID_")}
    return {**kept, "PYTHONUNBUFFERED": "1"}


Here = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """Run the command in this process, for what ends before it serves."""
    for name in [name for name in os.environ if name.startswith("SUPERFLUID_")]:
        monkeypatch.delenv(name)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    interval = sys.getswitchinterval()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        status = cli.run(list(arguments))
        captured = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, captured.out, captured.err)

    yield run
    root.handlers[:] = handlers
    root.setLevel(level)
    sys.setswitchinterval(interval)


class Started:
    """A node in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], ready: Path) -> None:
        self.process = process
        deadline = time.monotonic() + SECONDS
        while not ready.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "the node did not come up"
            time.sleep(0.02)
        self.facts: dict[str, Any] = json.loads(ready.read_text())

    @property
    def port(self) -> int:
        return int(self.facts["listen"][0][1])

    def get(self, path: str) -> bytes:
        host, port = self.facts["metrics"]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{host}:{port}{path}", timeout=10) as reply:
            return bytes(reply.read())

    def end(self) -> tuple[int, str, str]:
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, out, err


@contextmanager
def started(
    tmp_path: Path, *arguments: str, env: dict[str, str] | None = None
) -> Iterator[Started]:
    ready = tmp_path / "ready.json"
    process = subprocess.Popen(
        [*PROGRAM, *MOCK, *LOOPBACK, "--ready-file", str(ready), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment(), **(env or {})},
    )
    try:
        yield Started(process, ready)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_mock_node_serves_says_so_in_two_lines_and_ends_with_0(tmp_path: Path) -> None:
    with started(tmp_path, "--identity", "box", "--model-name", "a", "--model-name", "b") as node:
        assert node.facts["pid"] == node.process.pid
        assert node.facts["models"] == ["a", "b"]
        assert b"superfluid_lanes" in node.get("/metrics")
        assert json.loads(node.get("/scheduler/stats"))["scheduler"]["lanes"] == 8
        assert json.loads(node.get("/healthz"))["status"] == "ok"
        status, out, err = node.end()
    assert status == 0, err
    lines = out.splitlines()
    assert len(lines) == 2
    assert "a, b on sim/1" in lines[0]
    assert "8 lanes" in lines[0]
    assert f"listening on 127.0.0.1:{node.port} as box (no key)" in lines[1]
    assert "Traceback" not in err
    assert not (tmp_path / "ready.json").exists()


async def converse(node: Started, key: Path, prompt: tuple[int, ...]) -> list[int]:
    """Open one session, ask the node to stop in its midst, and read it to its end."""
    clock = JumpClock()
    link = await dial(
        "127.0.0.1",
        node.port,
        keys=load_keys(key),
        hello=Hello(MINOR, (), "head-1"),
        limits=LinkLimits(),
        clock=clock,
    )
    assert isinstance(link.peer, Welcome)
    (offer,) = link.peer.models
    head = HeadEnd(link, clock)
    async with asyncio.TaskGroup() as group:
        reader = group.create_task(head.read())
        head.open(model=offer.name, prompt=prompt, max_output=50)
        await head.until(lambda: head.rows() or head.refused())
        node.process.send_signal(signal.SIGTERM)
        await head.until(lambda: head.is_finished() or head.closed())
        await reader
    assert head.rows()[-1].stop_id in offer.eos_ids
    return head.ids()


@pytest.mark.slow
def test_a_session_runs_over_a_keyed_link_and_sigterm_lets_it_finish(tmp_path: Path) -> None:
    key, script = tmp_path / "fleet.key", tmp_path / "script.jsonl"
    write_key_file(key)
    answer = {"match": "hello", "pieces": ["Hel", "lo", " 😀", {"eos": True}], "delay_ms": 150}
    script.write_text(json.dumps(answer) + "\n")
    tokenizer = resolve("demo").tokenizer()
    prompt = tuple(tokenizer.encode("say hello", allow_special=False))
    with started(tmp_path, "--auth-file", str(key), "--mock-script", str(script)) as node:
        ids = asyncio.run(converse(node, key, prompt))
        out, err = node.process.communicate(timeout=SECONDS)
    assert b"".join(map(tokenizer.token_bytes, ids[:-1])).decode() == "Hello 😀"
    assert node.process.returncode == 0, err
    assert key.read_text().strip() not in out + err
    assert f"key {load_keys(key).key_id}" in out


@pytest.mark.slow
def test_a_node_that_a_head_started_ends_with_it(tmp_path: Path) -> None:
    with started(tmp_path, "--exit-with-parent") as node:
        assert node.process.stdin is not None
        node.process.stdin.close()
        assert node.process.wait(timeout=SECONDS) == 0
        node.process.stdin = None


async def stream_until_lost(node: Started, key: Path) -> list[int]:
    clock = JumpClock()
    link = await dial(
        "127.0.0.1",
        node.port,
        keys=load_keys(key),
        hello=Hello(MINOR, (), "head-1"),
        limits=LinkLimits(),
        clock=clock,
    )
    assert isinstance(link.peer, Welcome)
    head = HeadEnd(link, clock)
    head.open(model=link.peer.models[0].name, prompt=(1, 2), max_output=50)
    async with asyncio.timeout(20):
        await head.read()
    link.abort("over")
    return head.ids()


@pytest.mark.slow
def test_a_scripted_crash_ends_the_process_at_once(tmp_path: Path) -> None:
    key, script = tmp_path / "fleet.key", tmp_path / "script.jsonl"
    write_key_file(key)
    script.write_text(
        '{"pieces": ["a"], "repeat": 100, "delay_ms": 50, "fault": "crash", "fault_at": 3}\n'
    )
    with started(tmp_path, "--auth-file", str(key), "--mock-script", str(script)) as node:
        assert 2 <= len(asyncio.run(stream_until_lost(node, key))) <= 3
        assert node.process.wait(timeout=SECONDS) == 70


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        ((), 2, "--model is needed"),
        (("--bogus",), 2, "bogus"),
        ((*MOCK, "--listen", "0.0.0.0:0"), 2, "without a fleet key"),
        ((*MOCK, "--listen", "[::]:0"), 2, "without a fleet key"),
        ((*MOCK, *LOOPBACK, "--auth-file", "/nowhere/key"), 2, "key"),
        (("--engine", "mock", "--model", "/nowhere/model", *LOOPBACK), 3, "there is no"),
        ((*MOCK, *LOOPBACK, "--max-context", "999999"), 2, "at most 8192"),
        ((*MOCK, *LOOPBACK, "--mock-script", "/nowhere/x"), 2, "--mock-script"),
        ((*MOCK, "--listen", "no-such-name.invalid:1"), 2, "--listen"),
    ],
)  # fmt: skip
def test_refusals_are_one_line_with_their_status(
    here: Here, arguments: tuple[str, ...], status: int, word: str
) -> None:
    done = here(*arguments)
    assert done.returncode == status, done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_without_a_tokenizer_is_status_3(here: Here, tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 100,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = here("--engine", "mock", "--model", str(tmp_path), *LOOPBACK)
    assert done.returncode == 3, done.stderr
    assert "tokenizer" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_engine_is_status_1_and_one_line(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(_: EngineLoop) -> None:
        raise EngineError("the device fell off the bus")

    monkeypatch.setattr(EngineLoop, "run", run)
    done = here(*MOCK, *LOOPBACK)
    assert done.returncode == 1
    assert "the device fell off the bus" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_engine_that_cannot_be_made_is_status_3(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_engines(*_: object) -> None:
        raise EngineError("no usable device")

    monkeypatch.setattr(server, "build_engines", build_engines)
    done = here(*MOCK, *LOOPBACK)
    assert done.returncode == 3
    assert "no usable device" in done.stderr


@pytest.mark.slow
def test_a_second_sigterm_ends_the_grace(tmp_path: Path) -> None:
    async def insist(node: Started) -> None:
        clock = JumpClock()
        hello = Hello(MINOR, (), "head-1")
        limits = LinkLimits()
        link = await dial(
            "127.0.0.1", node.port, keys=None, hello=hello, limits=limits, clock=clock
        )
        assert isinstance(link.peer, Welcome)
        head = HeadEnd(link, clock)
        async with asyncio.TaskGroup() as group:
            group.create_task(head.read())
            name = link.peer.models[0].name
            head.open(model=name, prompt=(1, 2), max_output=8_000, ignore_eos=True)
            await head.until(head.rows)
            node.process.send_signal(signal.SIGTERM)
            await head.until(lambda: head.of(Goaway))
            seen = len(head.ids())
            await head.until(lambda: len(head.ids()) > seen)
            node.process.send_signal(signal.SIGTERM)
            await head.until(head.closed)
        closed = head.closed()
        assert closed is not None
        assert closed.reason is CloseReason.DRAIN

    with started(tmp_path, "--mock-rates", "decode=50", "--drain-grace-ms", "600000") as node:
        asyncio.run(insist(node))
        assert node.process.wait(timeout=SECONDS) == 0


@pytest.mark.slow
def test_an_address_in_use_is_status_1(here: Here) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = here(*MOCK, "--listen", f"127.0.0.1:{port}", "--metrics", "off")
        assert done.returncode == 1, done.stderr
        assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
        done = here(*MOCK, "--listen", "127.0.0.1:0", "--metrics", f"127.0.0.1:{port}")
        assert done.returncode == 1, done.stderr
        assert "--metrics moves them" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_check_says_what_would_run_and_print_config_where_values_come_from(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "fleet.key"
    write_key_file(key)
    flags = ("--auth-file", str(key), "--identity", "box", "--mock-rates", "decode=50")
    done = here(*MOCK, *LOOPBACK, "--check", *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ok"
    assert "SmolLM2-135M-Instruct" in done.stdout
    assert "127.0.0.1:0 as box" in done.stdout
    monkeypatch.setenv("SUPERFLUID_DTYPE", "bfloat16")
    done = here("--print-config", "--max-batch", "3")
    assert done.returncode == 0
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert lines["max-batch"].endswith("= 3  (flag)")
    assert lines["dtype"].endswith("= bfloat16  (env)")
    assert lines["engine"].endswith("= native  (default)")
