"""`--check`: every line is tried, and the first failure decides the exit status."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from superfluid_core.errors import EngineError, ModelFilesError
from superfluid_core.link.keys import load_keys, write_key_file
from superfluid_core.modelfiles.resolve import ModelFiles
from superfluid_noded import check, cli

FLAGS = ["--check", "--engine", "mock", "--model", "demo"]
FREE = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "setup_logging", lambda *_: None)


def lines_of(text: str) -> dict[str, str]:
    return dict(line.partition(" ")[::2] for line in text.splitlines())


def test_a_host_that_is_in_order_is_told_line_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "fleet.key"
    write_key_file(key)
    assert cli.run([*FLAGS, *FREE, "--auth-file", str(key), "--identity", "box"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "ok"
    lines = {name: words.strip() for name, words in lines_of(out).items()}
    assert lines["weights"].startswith("1 file, 94 MiB, readable, fingerprint ")
    assert lines["device"] == "none: the mock engine computes nothing"
    assert lines["key"] == f"{load_keys(key).key_id} from {key} (mode 0600)"
    assert lines["listen"] == f"127.0.0.1:0 as box (key {load_keys(key).key_id})"


def test_a_port_that_is_taken_is_status_1_and_the_other_lines_are_still_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        assert cli.run([*FLAGS, "--listen", where, "--metrics", "127.0.0.1:0"]) == 1
        shown = capsys.readouterr()
        assert f"listen   FAILED: cannot listen on {where}: Address already in use" in shown.out
        assert shown.out.splitlines()[-1] == "metrics  127.0.0.1:0"
        assert f"superfluid-noded: cannot listen on {where}" in shown.err
        assert cli.run([*FLAGS, "--listen", "127.0.0.1:0", "--metrics", where]) == 1


def test_a_device_that_cannot_be_used_is_status_3_also_when_a_port_is_taken_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> str:
        raise EngineError("torch cannot use it: NVIDIA driver 470.1, torch 2.13 built for CUDA 13")

    monkeypatch.setattr(check, "describe_device", refuse)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        assert cli.run([*FLAGS, "--listen", where, "--metrics", "off"]) == 3
    out = capsys.readouterr().out
    assert "device   FAILED: torch cannot use it: NVIDIA driver 470.1" in out
    assert out.count("FAILED") == 2


def test_weights_that_cannot_be_read_are_status_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: ModelFiles) -> str:
        raise ModelFilesError("model-00002-of-00002.safetensors: Permission denied")

    monkeypatch.setattr(ModelFiles, "weights_fingerprint", refuse)
    assert cli.run([*FLAGS, *FREE]) == 3
    assert "weights  FAILED: model-00002-of" in capsys.readouterr().out


def test_a_key_that_everybody_may_read_is_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "fleet.key"
    write_key_file(key)
    key.chmod(0o644)
    assert cli.run([*FLAGS, *FREE, "--auth-file", str(key)]) == 2
    assert "is open to everybody" in capsys.readouterr().err
