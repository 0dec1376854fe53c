"""`superfluid selftest`: exit statuses, what it says of what it left out, and that a wrong kernel or engine does not pass."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from superfluid_core.engine.torch.selftest import engines, kernels
from superfluid_core.engine.torch.selftest.engines import engine_checks
from superfluid_core.engine.torch.selftest.kernels import Bench, draw_scene
from superfluid_core.engine.torch.selftest.model import TinySizes
from superfluid_core.engine.torch.selftest.report import Check, Found, LeftOut, near, run_check
from superfluid_noded import bench_peers, selftest

CPU = torch.device("cpu")
SIZES = TinySizes(300, 64, 96, 2, 4, 2, 16, 256)


def invoke(*arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    done = CliRunner().invoke(selftest.main, list(arguments))
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.exit_code, lines, done.stderr


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's environment stays as it is."""
    monkeypatch.setattr(selftest, "settle_triton", lambda **_: None)
    monkeypatch.setattr(selftest, "settle_threads", lambda: None)


def say(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> None:
    monkeypatch.setattr(selftest, "checks", lambda *_: iter(checks))


def test_all_that_holds_is_exit_0_and_what_is_left_out_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say(monkeypatch, Check("a", "ok", "fine"), Check("b", "left out", "no such device"))
    status, lines, _ = invoke("--device", "cpu", "--only", "kernels", "--json")
    assert status == 0
    assert lines[0]["versions"]["torch"] == torch.__version__
    assert lines[1:] == [
        {"name": "a", "verdict": "ok", "detail": "fine"},
        {"name": "b", "verdict": "left out", "detail": "no such device"},
        {"checks": {"ok": 1, "failed": 0, "left out": 1}},
    ]


def test_one_failure_is_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, Check("a", "failed", "off by 3"), Check("b", "ok", ""))
    assert invoke("--device", "cpu", "--only", "engines")[0] == 1


def test_a_device_that_cannot_be_used_is_exit_3_and_names_the_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "superfluid_core.engine.torch.device.Machine.cuda_works", lambda _self: False
    )
    status, lines, said = invoke("--device", "cuda", "--only", "kernels")
    assert status == 3
    assert lines == []
    assert f"torch {torch.__version__}" in said
    assert invoke("--device", "tpu")[0] == 2


def test_our_own_engine_must_be_measurable_and_the_others_need_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lines(*found: dict[str, Any]) -> int:
        monkeypatch.setattr(selftest, "speed_lines", lambda *_: iter(found))
        return invoke("--device", "cpu", "--only", "speed")[0]

    ours = {"engine": "native", "tok_s": 3.0}
    assert lines(ours, {"engine": "vllm", "error": "broken"}) == 0
    assert lines({"engine": "native", "error": "broken"}) == 1


def test_what_has_not_begun_in_time_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def endless(*_: object) -> Iterator[Check]:
        while True:
            begun.append("one")
            yield Check("a", "ok", "fine")

    monkeypatch.setattr(selftest, "checks", endless)
    monkeypatch.setattr(selftest.TimeLeft, "seconds", lambda _self: 2.5 - len(begun))
    monkeypatch.setattr(selftest, "speed_lines", lambda *_: iter([{"engine": "never"}]))
    armed: list[float] = []
    monkeypatch.setattr(
        "faulthandler.dump_traceback_later", lambda seconds, **_: armed.append(seconds)
    )
    status, lines, _ = invoke("--device", "cpu", "--seconds", "100", "--json")
    assert status == 0
    assert armed == [100 + selftest.HANG_SECONDS]
    assert [line.get("verdict") for line in lines[1:-2]] == ["ok", "ok", "ok", "left out"]
    assert lines[-2] == {"engine": "native", "left out": "the time is over"}
    assert lines[-1] == {"checks": {"ok": 3, "failed": 0, "left out": 1}}


def test_speed_has_the_time_that_checks_left(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *_, **__: None)

    def nothing(_model: str, _device: str, seconds: float) -> Iterator[dict[str, Any]]:
        given.append(seconds)
        return iter(())

    monkeypatch.setattr(selftest, "speed_lines", nothing)
    assert invoke("--device", "cpu", "--only", "speed")[0] == 0
    assert invoke("--device", "cpu", "--only", "speed", "--seconds", "50")[0] == 0
    assert given[0] == bench_peers.MEASURE_SECONDS
    assert 0 < given[1] <= 50


def test_speed_names_what_is_not_installed_and_what_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_peers, "PEERS", {"native": "torch", "sglang": "no_such_package_here"})
    monkeypatch.setattr(bench_peers, "STREAMS", {"cpu": (1,)})
    found = list(bench_peers.speed_lines("/nowhere/at-all", "cpu"))
    assert found[0]["engine"] == "native"
    assert "ModelFilesError" in found[0]["error"]
    assert found[1] == {"engine": "sglang", "left out": "no_such_package_here is not installed"}


def test_a_check_that_raises_is_a_failure_and_the_next_one_runs() -> None:
    def broken() -> str:
        raise ValueError("first line\nsecond line")

    def absent() -> str:
        raise LeftOut("nobody is here")

    assert run_check("x", broken) == Check("x", "failed", "ValueError: first line")
    assert run_check("x", absent) == Check("x", "left out", "nobody is here")
    assert run_check("x", lambda: "7") == Check("x", "ok", "7")


def test_numbers_that_are_none_are_not_near() -> None:
    one = torch.ones(3)
    assert near(one, one + 0.5, 0.5) == "off by 0.5 at most"
    for other in (one + 0.6, one * float("nan"), torch.ones(2)):
        with pytest.raises(Found):
            near(one, other, 0.5)


@pytest.mark.slow
def test_whole_engines_agree_here(tmp_path: Path) -> None:
    found = list(engine_checks(CPU, tmp_path, SIZES))
    assert [check for check in found if check.verdict != "ok"] == []
    assert len(found) == 6


@pytest.mark.slow
def test_a_wrong_feedback_of_ids_does_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "superfluid_core.engine.torch.cuda.graphs.DecodeGraphs.feed", lambda *_: None
    )
    found = {check.name: check.verdict for check in engine_checks(CPU, tmp_path, SIZES)}
    assert found["greedy and drawn ids, recorded steps"] == "failed"
    assert found["greedy and drawn ids, eager"] == "ok"


def test_a_park_store_that_mixes_blocks_up_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from superfluid_core.engine.torch.kvcache import KvPool

    whole = KvPool.park_in
    monkeypatch.setattr(KvPool, "park_in", lambda self, t, blocks: whole(self, t, blocks[::-1]))
    with pytest.raises(Found, match="came back changed"):
        engines._park(CPU)


def test_scenes_follow_from_their_seed_and_differ_between_seeds() -> None:
    scenes = [draw_scene(Bench(CPU, torch.float32, seed)) for seed in range(1, 30)]
    again = [draw_scene(Bench(CPU, torch.float32, seed)) for seed in range(1, 30)]
    assert scenes == again
    assert len({scene.site.shape for scene in scenes}) > 10
    kinds = {(lane.decoding, lane.computed > 0) for scene in scenes for lane in scene.lanes}
    assert {(False, False), (False, True), (True, True)} <= kinds
    assert {scene.site.block_tokens for scene in scenes} == {4, 16}
    assert kernels.BACKENDS_LISTED == ("flashinfer", "varlen", "triton", "padded")
