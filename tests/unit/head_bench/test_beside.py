"""Servers take turns round by round, ours are judged, and one of the others may be missing or break."""

from __future__ import annotations

import importlib.util
import json
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
from click.testing import CliRunner

from superfluid_core.errors import ConfigError
from superfluid_head.bench import peers
from superfluid_head.bench.cli import bench
from superfluid_head.bench.rig import Rig, RigError
from superfluid_head.bench.scenarios import beside, run
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario
from superfluid_head.bench.scenarios.beside import Player
from superfluid_head.bench.scenarios.run import run_scenario
from superfluid_noded import bench_servers

PLAN = Plan(rounds=2, is_beside=True)


class Timed(Scenario):
    """A scenario of one figure: the number of the round."""

    name = "timed"
    about = "nothing happens"
    bars = (Bar("figure", most=2.0),)

    def round(self, number: int) -> Figures:
        return {"figure": float(number)}


class Slow(Timed):
    """A server that misses the bar."""

    def round(self, number: int) -> Figures:
        return {"figure": 10.0 + number}


class Breaks(Timed):
    """A server that is gone in the second counted round."""

    def round(self, number: int) -> Figures:
        if number == 2:
            raise RigError("it is gone")
        return super().round(number)


class Alone(Timed):
    """One that needs its own processes."""

    needs_rig = "it kills processes"


def played(monkeypatch: pytest.MonkeyPatch, *players: Player) -> tuple[bool, list[str]]:
    monkeypatch.setattr(run, "together", lambda *_: list(players))
    lines: list[str] = []
    return run_scenario(Timed, PLAN, lines.append), lines


def test_every_round_visits_all_servers_and_only_ours_are_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = Player("vllm", Slow(PLAN), is_ours=False)
    is_passed, lines = played(monkeypatch, Player("native", Timed(PLAN)), theirs)
    told = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(each["round"], each["engine"]) for each in told] == [
        (0, "native"), (0, "vllm"), (1, "native"), (1, "vllm"), (2, "native"), (2, "vllm"),
    ]  # fmt: skip
    assert is_passed
    heads = next(line for line in lines if "median" in line).splitlines()
    assert any(line.split() == ["median", "native", "vllm"] for line in heads)
    assert any(line.split() == ["figure", "1", "11"] for line in heads)
    assert [line for line in lines if "met " in line] == ["met     figure <= 2: 1 (native)"]


def test_one_of_ours_that_misses_its_bar_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    is_passed, lines = played(
        monkeypatch, Player("native", Timed(PLAN)), Player("llamacpp", Slow(PLAN))
    )
    assert not is_passed
    assert lines[-1] == "MISSED  figure <= 2: 11 (llamacpp)"


def test_one_of_the_others_that_breaks_is_left_out_and_one_of_ours_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = Player("llama-server", Breaks(PLAN), is_ours=False)
    is_passed, lines = played(monkeypatch, Player("native", Timed(PLAN)), theirs)
    assert is_passed
    assert "llama-server: left out from round 2 on: it is gone" in lines
    assert theirs.rounds == [{"figure": 1.0}]
    with pytest.raises(RigError, match="it is gone"):
        played(monkeypatch, Player("native", Breaks(PLAN)))


def test_a_server_of_others_that_does_not_come_up_is_said_and_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(_rig: Rig, _plan: Plan) -> str:
        raise RigError("no wheel")

    monkeypatch.setattr(beside, "_llama_server", refuse)
    monkeypatch.setattr(beside, "_folder", lambda _rig, _plan: tmp_path)
    monkeypatch.setattr(beside, "_window", lambda _plan: 4096)
    lines: list[str] = []
    plan = Plan(is_beside=True, vllm_python="/bin/false")
    with ExitStack() as stack:
        players = beside.together(Timed, plan, stack, lines.append)
    assert [(each.name, each.is_ours) for each in players] == [("native", True), ("llamacpp", True)]
    assert lines[0] == "llama-server: left out: no wheel"
    assert lines[1].startswith("vllm: left out: vllm does not serve")


class Asked(Timed):
    """One that remembers which model it was to serve."""

    asked: ClassVar[list[str]] = []

    def setup(self, stack: ExitStack) -> None:
        self.asked.append(self.plan.model)


def test_mlx_gets_a_directory_of_safetensors_and_the_others_what_was_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(beside, "_folder", lambda _rig, _plan, *, engine: tmp_path / engine)
    for engine in ("mlx", "llamacpp"):
        with ExitStack() as stack:
            beside.alone(Asked, Plan(engine=engine), stack)
    assert Asked.asked == [str(tmp_path / "mlx"), "demo"]


def test_an_engine_that_is_not_installed_is_told_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "mlx_lm" else find_spec(name)
    )
    with pytest.raises(ConfigError, match=r"needs mlx_lm: pip install 'superfluid-fleet\[mlx\]'"):
        bench_servers.main.main(
            ["plain-folder", "--model", "demo", "--engine", "mlx", "nowhere"], standalone_mode=False
        )


def has_ended(pid: int) -> bool:
    """It is gone, or only its exit is left for somebody to read."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return True
    return told.rpartition(")")[2].split()[0] == "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_server_that_does_not_come_up_in_time_is_ended_before_the_others_play(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\ntrap '' TERM\nsleep 60 & echo $! ; wait; wait\n", encoding="utf-8"
    )
    python.chmod(0o700)
    monkeypatch.setattr(beside, "_folder", lambda _rig, _plan: tmp_path)
    monkeypatch.setattr(beside, "_window", lambda _plan: 4096)
    monkeypatch.setattr(beside, "START_SECONDS", 1.0)
    monkeypatch.setattr(beside, "END_SECONDS", 1.0)
    with Rig() as rig, ExitStack() as stack:
        with pytest.raises(RigError, match="vllm does not serve"):
            beside._vllm(rig, stack, PLAN, str(python))
        child = rig.named("vllm")
        assert not child.is_running
        grandchild = int(child.log_text())
        while not has_ended(grandchild):
            rig.sleep(0.01)


def test_a_server_that_takes_a_question_and_never_answers_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "ASK_SECONDS", 0.05)
    with Rig() as rig, socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        child = rig.spawn_plain("mute", ["sleep", "60"])
        for question in (peers.chat_request(url, "m"), httpx.Request("GET", f"{url}/health")):
            with pytest.raises(RigError, match="mute does not serve"):
                peers.wait_served(rig, child, question, 0.2)
        assert child.is_running


def test_what_needs_its_own_processes_is_not_played_beside_others() -> None:
    with pytest.raises(RigError, match="it kills processes"):
        run_scenario(Alone, PLAN, lambda _line: None)


@pytest.mark.parametrize(
    "flags", [("--beside", "--engine", "mock"), ("--vllm-python", "/usr/bin/python3")]
)
def test_flags_that_contradict_each_other_are_refused(flags: tuple[str, ...]) -> None:
    refused = CliRunner().invoke(bench, ["scenario", "agents-and-chat", *flags])
    assert refused.exit_code == 2
    assert "--beside" in refused.output


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_llama_server_answers_in_a_process_of_its_own_and_ends_with_the_rig() -> None:
    pytest.importorskip("xllamacpp")
    with Rig() as rig:
        url = beside._llama_server(rig, Plan())
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        assert reply.json()["usage"]["completion_tokens"] == 2
        child = rig.named("llama-server")
    assert not child.is_running
