"""tests/cases/cases.toml: every public bug report of the fixed list has a row, every row tests, and every test exists."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from tests.unit.test_advisories import missing

TABLE = Path(__file__).with_name("cases.toml")
CASES = {
    *(f"O-{number:02}" for number in range(1, 31)),
    *(f"OX-{number}" for number in range(1, 5)),
}


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(TABLE.read_text(encoding="utf-8"))["case"]
    return found


def test_every_report_has_exactly_one_row() -> None:
    counts = Counter(row["id"] for row in rows())
    assert sorted(CASES - set(counts)) == []
    assert sorted(set(counts) - CASES) == []
    assert [one for one, count in counts.items() if count > 1] == []
    assert len(CASES) == 34


def test_every_row_says_what_it_is_about_and_names_tests_that_exist() -> None:
    assert [row["id"] for row in rows() if not row["about"].strip() or not row["tests"]] == []
    assert all(set(row) == {"id", "about", "tests"} for row in rows())
    assert missing([{"ids": [row["id"]], "tests": row["tests"]} for row in rows()]) == []


def test_a_row_that_names_nothing_or_something_else_is_noticed() -> None:
    wrong = "tests/cases/test_index.py::test_nothing_of_that_name"
    assert missing([{"ids": ["O-01"], "tests": [wrong]}]) == [f"O-01: {wrong}"]
