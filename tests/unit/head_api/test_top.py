"""`superfluid top` and `completion`: what they print off a terminal and on one, and how they end."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from click.shell_completion import ShellComplete

from superfluid_core.errors import ErrorCode, SuperfluidError
from superfluid_head.access.keys import KeyRing, Principal
from superfluid_head.cli import PROGRAM, command, run
from superfluid_head.commands import top
from tests.unit.head_api.conftest import Bench


@pytest.fixture(autouse=True)
def no_key_of_the_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUPERFLUID_API_KEY", raising=False)


def state_of(bench: Bench, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = bench.send("GET", "/v1/fleet").json()
    found["nodes"][0] |= changes
    return found


def test_off_a_terminal_it_prints_a_row_a_node_and_ends(
    live: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert live.bench.fleet.is_ready
    assert run(["top", "--url", live.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "serving: 1 of 1 nodes up, 6 running, 1 completion waiting, 1 moves"
    assert lines[1].startswith("0 tokens/s; first token p50 -, p95 -; between tokens")
    assert lines[3].split() == [name for name in top.COLUMNS if name]
    assert lines[4].split() == [
        "n1",
        "up",
        "3/4",
        "######..",
        "2",
        "7%",
        "0",
        "-",
        "closed",
        "org/m",
    ]


def test_as_json_it_prints_what_the_head_said(
    live: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["top", "--json", "--url", live.url]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["object"], found["nodes"][0]["name"]) == ("fleet", "n1")


def test_a_head_that_is_not_there_or_refuses_is_exit_1(
    make_bench: Any, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["top", "--once", "--url", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().err
    with serve(make_bench(keys=KeyRing([("plain-key", Principal("alice"))]))) as locked:
        assert run(["top", "--once", "--url", locked.url]) == 1
    assert "refused with 401" in capsys.readouterr().err
    assert run(["top", "--interval", "0"]) == 2


def test_names_of_nodes_drive_no_terminal_and_their_troubles_are_told(bench: Bench) -> None:
    found = state_of(
        bench, name="evil\x1b[2J", state="down", detail="cut\x07 off", blocks=0, lanes=0
    )
    text = "\n".join(top.plain_lines(found))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "evil\\x1b[2J: cut\\x07 off" in text
    (row,) = top.node_rows(found)
    assert (row.cells[2], row.cells[3], row.cells[5]) == ("3/0", "........", "-")


@pytest.mark.parametrize(
    ("used", "is_full"), [(0, False), (89, False), (90, True), (100, True), (120, True)]
)
def test_a_pool_that_is_almost_full_is_marked(bench: Bench, used: int, is_full: bool) -> None:
    (row,) = top.node_rows(state_of(bench, blocks_used=used, blocks=100))
    assert (row.is_full, row.cells[5]) == (is_full, f"{used}%")


def drawn(picture: Any) -> str:
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=140).print(picture)
    return out.getvalue()


def test_a_head_that_is_gone_for_a_while_leaves_the_last_picture_and_the_reason(
    bench: Bench,
) -> None:
    picture = top._pictured(state_of(bench))

    def gone() -> dict[str, Any]:
        raise SuperfluidError("http://h: refused", code=ErrorCode.NO_WORKER)

    text = drawn(top._again(gone, picture))
    assert "n1" in text
    assert "out of date: http://h: refused" in text

    def refused() -> dict[str, Any]:
        raise SuperfluidError("refused with 403")

    with pytest.raises(SuperfluidError, match="403"):
        top._again(refused, picture)


# a test run in a shell's background hands down that SIGINT is ignored
INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from superfluid_head.cli import main
main()
"""


@pytest.mark.slow
def test_on_a_terminal_it_draws_again_until_it_is_interrupted(live: Any) -> None:
    ours, theirs = pty.openpty()
    words = [
        sys.executable,
        "-c",
        INTERRUPTIBLE,
        "top",
        "--interval",
        "0.2",
        "--url",
        live.url,
    ]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    with subprocess.Popen(
        words, stdout=theirs, stderr=theirs, stdin=theirs, env=environment
    ) as child:
        os.close(theirs)
        seen = b""
        deadline = time.monotonic() + 30
        while seen.count(b"serving") < 3 and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 65_536)
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 0
    os.close(ours)
    assert seen.count(b"serving") >= 3
    assert b"\x1b[" in seen, "it moves the cursor back"


# --- completion and suggestions ---


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_of_a_shell_is_for_both_programs(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["completion", shell]) == 0
    text = capsys.readouterr().out
    for name in ("superfluid", "superfluid-noded"):
        variable = "_" + name.replace("-", "_").upper() + "_COMPLETE"
        assert f"{variable}={shell}_complete" in text
    if shell == "bash":
        checked = subprocess.run(
            ["bash", "-n"], input=text, text=True, capture_output=True, check=False
        )
        assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("before", "typed", "wanted"),
    [
        ([], "fl", {"fleet"}),
        (["fleet"], "dr", {"drain"}),
        (["top"], "--on", {"--once"}),
        (["completion"], "", {"bash", "zsh", "fish"}),
        (["serve"], "--fleet-au", {"--fleet-auth"}),
    ],
)
def test_words_that_were_begun_are_completed(
    before: list[str], typed: str, wanted: set[str]
) -> None:
    shell = ShellComplete(command, {}, PROGRAM, "_SUPERFLUID_COMPLETE")
    assert {found.value for found in shell.get_completions(before, typed)} == wanted


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("tpo", "top"),
        ("fleet drian n1", "drain"),
        ("serve demo --flet x", "--fleet"),
        ("top --onec", "--once"),
        ("completion basch", "bash"),
    ],
)
def test_what_is_mistyped_is_exit_2_with_what_was_meant(
    line: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 2
    assert meant in capsys.readouterr().err


def test_a_name_in_a_file_that_no_setting_has_is_exit_2_with_the_nearest(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "head.toml"
    file.write_text('htp = "127.0.0.1:1"\nzzz = 1\n', encoding="utf-8")
    assert run(["config", "check", "demo", "--config", str(file)]) == 2
    assert "unknown name(s): htp (meant: http?), zzz" in capsys.readouterr().err


def test_config_check_names_the_source_of_every_value(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "head.toml"
    file.write_text('http = "127.0.0.1:7000"\nmax-queue = 7\n', encoding="utf-8")
    monkeypatch.setenv("SUPERFLUID_MAX_QUEUE", "8")
    monkeypatch.setenv("SUPERFLUID_API_KEY", "the-secret")
    words = ["config", "check", "demo", "--config", str(file), "--placement", "least-loaded"]
    assert run(words) == 0
    out = capsys.readouterr().out
    shown = {
        line.split(" = ")[0].strip(): line.split(" = ")[1]
        for line in out.splitlines()
        if " = " in line
    }
    assert shown["placement"] == "least-loaded  (flag)"
    assert shown["max-queue"] == "8  (env SUPERFLUID_MAX_QUEUE)"
    assert shown["http"] == "127.0.0.1:7000  (toml)"
    assert shown["log-format"] == "text  (default)"
    assert all(value.endswith(")") for value in shown.values())
    assert shown["api-key"] == "(set)  (env SUPERFLUID_API_KEY)"
    assert "the-secret" not in out
