"""Figures and prompts of the bench: every number shown was measured, every prompt is the same everywhere."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluid_head.bench.compare import comparison
from superfluid_head.bench.prose import Draws, prose
from superfluid_head.bench.report import json_line, median, percentile, shown, table

floats = st.floats(min_value=-1e9, max_value=1e9)


@given(st.lists(floats, min_size=1), st.floats(min_value=0.1, max_value=100))
def test_a_percentile_is_one_of_the_values_and_enough_lie_below(
    values: list[float], percent: float
) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= percent / 100 * len(values) - 1e-9


def test_percentiles_of_known_values() -> None:
    values = [float(n) for n in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (
        50,
        99,
        100,
    )
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert math.isnan(percentile([], 50))


def test_a_table_lines_up() -> None:
    text = table(["name", "value"], [["a", 1.5], ["longer", None], ["n", math.nan]])
    lines = text.splitlines()
    assert lines[0] == "name    value"
    assert lines[2] == "a         1.5"
    assert lines[3].endswith("-")
    assert lines[4].endswith("-")
    assert table(["only", "heads"], []).splitlines()[0] == "only  heads"


def test_cells_are_short() -> None:
    assert [shown(1234.56), shown(12.345), shown(0.00123)] == ["1235", "12.3", "0.00123"]


def test_a_json_line_holds_no_nan() -> None:
    assert json.loads(json_line({"a": math.nan, "b": 1, "c": "x"})) == {"a": None, "b": 1, "c": "x"}


def test_prose_is_the_same_for_a_seed_and_different_for_another() -> None:
    assert prose(7, 50) == prose(7, 50)
    assert prose(7, 50) != prose(8, 50)
    assert len(prose(3, 200).split()) == 200


@given(st.integers(min_value=0, max_value=1 << 62), st.integers(min_value=1, max_value=10_000))
def test_draws_stay_below_their_limit(seed: int, limit: int) -> None:
    source = Draws(seed)
    assert all(0 <= source.below(limit) < limit for _ in range(20))


def test_draws_spread() -> None:
    source = Draws(1)
    counts = [0] * 10
    for _ in range(10_000):
        counts[source.below(10)] += 1
    assert min(counts) > 800


@pytest.mark.parametrize(("theirs", "ratio"), [(50.0, "2"), (200.0, "0.5")])
def test_a_ratio_above_one_means_that_we_are_faster(theirs: float, ratio: str) -> None:
    text = comparison({"decode 1": {"native": [100.0, 90.0, 110.0], "llama-server": [theirs] * 3}})
    row = next(line for line in text.splitlines() if "llama-server" in line)
    assert row.split()[-1] == ratio
