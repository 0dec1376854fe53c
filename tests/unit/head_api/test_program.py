"""The program: settings and their sources, exit statuses, listeners, a whole run with signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from superfluid_core.errors import ConfigError
from superfluid_head.cli import run
from superfluid_head.config import build_config, read_settings, surroundings
from superfluid_head.listeners import bound, judge_exposure, loopback_ports, open_sockets


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SUPERFLUID_"):
            monkeypatch.delenv(name)


def built(file: str | None = None, **flags: Any) -> Any:
    return build_config(read_settings(flags, file), surroundings())


def test_a_flag_beats_the_environment_and_that_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "head.toml"
    file.write_text('placement = "round-robin"\nmodel = ["a"]\nlog-format = "json"\n')
    monkeypatch.setenv("SUPERFLUID_LOG_FORMAT", "text")
    settings = read_settings({"placement": "least-loaded"}, str(file))
    assert settings["placement"] == ("least-loaded", "flag")
    assert settings["log_format"] == ("text", "env")
    assert settings["model"] == (("a",), "toml")
    assert settings["http"].source == "default"
    config = build_config(settings, surroundings())
    assert config.http == (("127.0.0.1", 8453),)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "nothing to serve"),
        ({"fleet": ("gpu1",)}, "--fleet-auth"),
        ({"fleet": ("gpu1,gpu1",), "insecure_no_auth": True}, "twice"),
        ({"model": ("a", "b")}, "several models"),
        ({"model": ("a",), "http": ("127.0.0.1:x",)}, "no port"),
        ({"model": ("a",), "placement": "random"}, "none of"),
        ({"fleet": ("gpu1",), "fleet_auth": "f", "insecure_no_auth": True}, "exclude"),
        ({"fleet": ("127.0.0.1",), "model_name": "x"}, "local node"),
        ({"model": ("a",), "api_key_file": "/does/not/exist"}, "API key file"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        built(**flags)


def test_addresses_may_be_ipv6_and_loopback_nodes_need_no_key() -> None:
    config = built(fleet=("127.0.0.1:9000", "[::1]"), http=("[::]:8453", "localhost:1"))
    assert config.http == (("::", 8453), ("localhost", 1))
    assert [str(node) for node in config.fleet] == ["127.0.0.1:9000", "[::1]:8454"]


def test_secrets_come_from_the_environment_and_never_show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SUPERFLUID_API_KEY", "sk-very-secret-1")
    assert not built(model=("demo",)).keys.is_empty
    assert run(["config", "check", "demo"]) == 0
    shown = capsys.readouterr()
    assert re.search(r"^api-key += \(set\)  \(env SUPERFLUID_API_KEY\)$", shown.out, re.MULTILINE)
    assert "very-secret" not in shown.out + shown.err
    monkeypatch.setenv("SUPERFLUID_API_KEY", "short")
    assert run(["config", "check", "demo"]) == 2
    assert "short" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--help"], 0, "serve"),
        (["--version"], 0, "superfluid"),
        (["serve", "--help"], 0, "--placement"),
        (["srve"], 2, "Did you mean serve"),
        (["serve", "--flet", "x"], 2, "--fleet"),
        (["serve", "--api-key", "x"], 2, "SUPERFLUID_API_KEY"),
        (["serve"], 2, "nothing to serve"),
        (["serve", "./absent.gguf", "--http", "127.0.0.1:0"], 3, "there is no"),
        (["fleet", "ky"], 2, "Did you mean key"),
        (["config", "check", "--fleet", "far.example"], 2, "--fleet-auth"),
        (["chat", "--url", "http://127.0.0.1:1", "hi"], 1, "127.0.0.1:1"),
    ],
)
def test_the_program_ends_with_the_documented_status_and_no_traceback(
    arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == status
    shown = capsys.readouterr()
    assert words in shown.out + shown.err
    assert "Traceback" not in shown.err


def test_a_fleet_key_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.key"
    assert run(["fleet", "key", str(path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"key id [0-9a-f]{8}", said)
    assert path.read_text().split(":")[1].strip() not in said
    assert path.stat().st_mode & 0o777 == 0o600
    assert run(["fleet", "key", str(path)]) == 2


def test_listeners_are_judged_by_what_they_really_are() -> None:
    sockets = open_sockets([("127.0.0.1", 0), ("localhost", 0)])
    places = bound(sockets)
    try:
        assert all(port for _, port in places)
        assert loopback_ports(places) == {port for _, port in places}
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1"):
            open_sockets([places[0]])
    finally:
        for one in sockets:
            one.close()
    with pytest.raises(ConfigError, match="cannot listen"):
        open_sockets([("no.such.name.invalid", 0)])


@pytest.mark.parametrize(
    ("host", "has_key", "insecure", "expected"),
    [
        ("127.0.0.1", False, False, False),
        ("::1", False, False, False),
        ("0.0.0.0", True, False, False),
        ("0.0.0.0", False, True, True),
        ("::", False, False, None),
        ("192.0.2.1", False, False, None),
    ],
)
def test_off_loopback_a_key_is_needed(
    host: str, has_key: bool, insecure: bool, expected: bool | None
) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match="API key"):
            judge_exposure([(host, 1)], has_key=has_key, insecure=insecure)
    else:
        assert judge_exposure([(host, 1)], has_key=has_key, insecure=insecure) is expected


@pytest.mark.slow
def test_a_head_serves_at_once_and_ends_with_0_on_a_signal(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notices.bind(str(tmp_path / "notify"))
    notices.settimeout(20)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = taken.getsockname()[1]
        command = [
            sys.executable, "-m", "superfluid_head.cli", "serve", "--fleet", f"127.0.0.1:{nobody}",
            "--http", "127.0.0.1:0", "--http", "[::1]:0", "--ready-file", str(ready), "--log-format", "json",
        ]  # fmt: skip
        environment = {
            **os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"
        }  # fmt: skip
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        try:
            assert notices.recv(200) == b"STATUS=loading\nEXTEND_TIMEOUT_USEC=30000000"
            assert notices.recv(200) == b"READY=1\nSTATUS=serving"
            fed = b"WATCHDOG=1\nSTATUS=serving 0 models; 0 of 1 nodes up; 0 in flight"
            assert notices.recv(200) == fed
            said = json.loads(ready.read_text())
            assert said["pid"] == process.pid
            (first, port), (second, other) = said["http"]
            assert (first, second) == ("127.0.0.1", "::1")
            assert httpx.get(f"http://127.0.0.1:{port}/livez").status_code == 200
            assert httpx.get(f"http://[::1]:{other}/readyz").status_code == 503
            process.send_signal(signal.SIGTERM)
            heard = {notices.recv(200)}
            stopping = b"STOPPING=1\nEXTEND_TIMEOUT_USEC=45000000\nSTATUS=draining 0 in flight"
            while stopping not in heard:
                heard.add(notices.recv(200))
            assert heard <= {stopping, fed}
            started = time.monotonic()
            assert process.wait(10) == 0
            assert time.monotonic() - started < 5
        finally:
            process.kill()
            notices.close()
    assert process.stderr is not None
    lines = [json.loads(line) for line in process.stderr.read().splitlines()]
    process.stderr.close()
    assert any(line["message"].startswith("listening on http://[::1]:") for line in lines)
    assert lines[-1]["level"] in ("info", "warning")


@pytest.mark.slow
def test_a_head_whose_own_node_refuses_its_settings_was_never_ready(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.bind(str(tmp_path / "notify"))
        command = [
            sys.executable, "-m", "superfluid_head.cli", "serve", "demo", "--http", "127.0.0.1:0", "--offline",
            "--node-arg=--engine=mock", "--node-arg=--kv-memory=1GiB", "--ready-file", str(ready),
        ]  # fmt: skip
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False, timeout=50
        )
        assert done.returncode == 2, done.stderr
        assert "refused its configuration" in done.stderr
        assert not ready.exists()
        heard = []
        with contextlib.suppress(BlockingIOError):
            notices.setblocking(False)
            while True:
                heard.append(notices.recv(200))
        assert not any(b"READY=1" in each for each in heard)
        assert any(b"EXTEND_TIMEOUT_USEC=" in each for each in heard)


@pytest.mark.slow
def test_the_head_needs_neither_torch_nor_numpy_nor_an_http_client() -> None:
    code = (
        "import sys, superfluid_head.cli, superfluid_head.server;"
        "print(sorted({'torch', 'numpy', 'huggingface_hub', 'httpx', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_chat_client_streams_an_answer(live: Any, capsys: pytest.CaptureFixture[str]) -> None:
    live.bench.fleet.say("Good ", "day ", "😀")
    assert run(["chat", "--url", live.url, "--max-tokens", "9", "hi"]) == 0
    assert capsys.readouterr().out == "Good day 😀\n"
    assert run(["chat", "--url", live.url, "--model", "nope", "hi"]) == 1
    assert "does not exist" in capsys.readouterr().err
