"""Cost models by hand-computed numbers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from superfluid_core.errors import ConfigError
from superfluid_core.simulator.costs import Measured, StepLoad, parse_cost
from superfluid_core.simulator.hardware import find_model, transfer_ns

UNIT = 1_000


def test_a_unit_step_costs_one_unit_whatever_it_carries() -> None:
    cost = parse_cost("unit", UNIT)
    assert cost.step_ns(StepLoad(1, 0, 5)) == cost.step_ns(StepLoad(9, 4_000, 9_000)) == UNIT


@pytest.mark.parametrize(("tokens", "units"), [(1, 10), (500, 10), (501, 10.02), (4_004, 80.08)])
def test_a_stream_has_a_floor_and_then_counts_tokens_exactly(tokens: int, units: float) -> None:
    assert parse_cost("stream(10, 50)", UNIT).step_ns(StepLoad(0, tokens, 0)) == round(units * UNIT)


def test_a_roofline_is_the_larger_of_bytes_and_operations() -> None:
    cost = parse_cost("roofline(rtx4090, 8b-q4)", UNIT)
    weights_ns = transfer_ns(find_model("8b-q4").weight_bytes, 1_008 * 10**9)
    assert cost.step_ns(StepLoad(1, 0, 0)) == weights_ns
    # 1,000 tokens of 16.06 GFLOP at 165.2 TFLOP/s
    assert cost.step_ns(StepLoad(0, 1_000, 1_000)) == pytest.approx(97_215_496, abs=1)
    halved = parse_cost("roofline(rtx4090, 8b-q4, 50)", UNIT)
    assert halved.step_ns(StepLoad(0, 1_000, 1_000)) == pytest.approx(194_430_993, abs=1)


def _table() -> dict[str, object]:
    return {
        "format": "superfluid-costs/1",
        "decode": [[1, 1_000], [8, 1_700]],
        "prefill": [[100, 5_000], [200, 9_000]],
        "context_ps": 2_000,
    }


def test_measured_costs_are_interpolated_and_continued() -> None:
    cost = Measured.parse(_table(), "table")
    assert cost.step_ns(StepLoad(1, 0, 0)) == 1_000
    assert cost.step_ns(StepLoad(4, 0, 0)) == 1_300
    assert cost.step_ns(StepLoad(18, 0, 0)) == 2_700
    assert cost.step_ns(StepLoad(0, 150, 0)) == 7_000
    assert cost.step_ns(StepLoad(8, 200, 0)) == 9_700
    assert cost.step_ns(StepLoad(1, 0, 10)) == 1_020


def test_measured_costs_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(_table()))
    assert parse_cost(f"measured({path})", UNIT).step_ns(StepLoad(8, 0, 0)) == 1_700


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"decode": []},
        {"decode": [[0, 5]]},
        {"decode": [[1, -5]]},
        {"decode": [[1, 2, 3]]},
        {"prefill": [["a", 2]]},
        {"prefill": "none"},
        {"context_ps": -1},
        {"context_ps": True},
    ],
)
def test_a_table_that_is_none_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Measured.parse(_table() | change, "table")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "units",
        "unit(3)",
        "stream(10)",
        "stream(10, 50",
        "stream(0, 50)",
        "stream(a, 50)",
        "roofline(none, 8b)",
        "roofline(h100, none)",
        "measured(/does/not/exist)",
    ],
)
def test_an_unknown_cost_model_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_cost(text, UNIT)
