"""`superfluid simulate` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from superfluid_head.cli import command


def _type(*words: str) -> Result:
    return CliRunner().invoke(command, ["simulate", *words])


def test_list_names_every_scenario() -> None:
    output = _type("list").output
    assert "continuous-batching" in output
    assert "shared-prefix" in output


def test_run_prints_known_answers_and_says_that_they_are_met() -> None:
    result = _type("run", "continuous-batching", "--timeline", "3")
    assert result.exit_code == 0
    assert "= finish: 12 3 7 20 8 16 12 27" in result.output
    assert "... and 24 more steps" in result.output


def test_a_changed_flag_voids_the_known_answers() -> None:
    result = _type("run", "continuous-batching", "--set", "max-batch=8")
    assert result.exit_code == 0
    assert "  steps: 20" in result.output


def test_json_is_one_document() -> None:
    data = json.loads(_type("run", "mixed-batch-256", "--json", "--timeline", "2").output)
    assert data["figures"][0] == {"name": "step 1", "value": "1 + 255", "must_be": "1 + 255"}
    assert data["cases"][0]["timeline"][1]["prompt"] == [["prompt", 255]]


def test_a_mistyped_name_is_answered_with_the_known_ones() -> None:
    result = _type("run", "continous")
    assert result.exit_code != 0
    assert "continuous-batching" in str(result.exception)


def test_sweep_prints_a_row_per_combination(tmp_path: Path) -> None:
    plot = tmp_path / "sweep.html"
    words = ("chunked-prefill", "--over", "step-tokens=128,256", "--over", "max-batch=5,8")
    result = _type("sweep", *words, "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert result.output.count("step-tokens=128 max-batch=5") == 1
    assert plot.read_text().startswith("<!doctype html>")


def test_a_trace_is_replayed_and_plotted(tmp_path: Path) -> None:
    trace, plot = tmp_path / "trace.jsonl", tmp_path / "trace.png"
    row = {"timestamp": 0, "prompt_tokens": 30, "output_tokens": 5, "tenant": "a"}
    rows = [row, row | {"timestamp": 0.5, "tenant": "b"}]
    trace.write_text("\n".join(json.dumps(each) for each in rows))
    result = _type("trace", str(trace), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert "fairness between 2 tenants: 1.000" in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_fleet_is_simulated_under_all_policies() -> None:
    words = ("--nodes", "2", "--sessions", "40", "--placement", "all", "--output", "5")
    result = _type("fleet", *words)
    assert result.exit_code == 0, result.output
    assert "round-robin all" in result.output
    data = json.loads(_type("fleet", *words, "--json").output)
    assert [each["finished"] for each in data["fleet"]] == [40, 40, 40]
