"""tests/advisories.toml: every known hole of the survey has a row, every row has tests, every test exists.

Tests are found by reading the sources, not by collecting them, so this is cheap and imports nothing of theirs.
"""

from __future__ import annotations

import ast
import functools
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "advisories.toml"

# The survey: the ids of every advisory, bug and guide that was read for the design.
CVES = """
2025-32444 2025-29783 2025-47277 2025-30165 2025-30202 2026-93034 2026-3059 2026-3060 2026-14890 2026-93088
2026-7301 2026-86793 2026-15969 2026-15976 2026-7304 2025-66455 2025-33255 2026-24142 2026-65119 2026-34159
2026-137567 2026-118375 2024-42478 2024-42479 2026-43629 2024-23605 2026-21869 2026-134540 2023-48022 2023-6019
2025-62593 2023-48023 2025-63389 2024-28224 2024-37032 2024-45436 2026-103663 2026-7020 2025-44779 2024-12886
2025-0315 2025-1975 2025-0312 2025-0317 2024-8063 2024-39720 2024-12055 2026-7482 2025-51471 2026-5530 2026-42249
2026-34940 2026-24779 2026-34753 2026-33626 2026-24269 2026-100650 2026-109225 2026-7302 2026-5760 2026-42203
2026-115911 2026-115918 2026-55574 2025-71379 2025-29770 2026-105757 2026-34756 2026-114051 2026-116173
2026-116180 2026-93989 2026-105756 2026-105754 2026-111392 2025-46722 2025-46570 2025-25183 2026-89032
2026-105755 2026-112266 2026-110807 2026-110809 2026-92972 2026-107206 2026-22778 2026-22773 2026-49468
2026-48710 2026-42208 2026-136536 2025-59425 2026-23996 2025-62727 2025-54121 2025-43859 2023-44487 2026-114613
2026-57585
"""
PYSECS = "2026-387 2026-2013 2026-3933 2026-3704 2026-2303 2026-4353 2026-388 2026-4070"
OTHER = (
    "GHSA-69j4-grxj-j64p", "GHSA-hf3c-wxg2-49q9", "vLLM security guide", "OTel bearertokenauth",
    "cpython #114921", "cpython #152431", "cpython #142352", "Dynamo #7634", "Dynamo PR 2038",
    "Dynamo 7930", "Dynamo 13600", "Responses API",
)  # fmt: skip
SURVEY = {
    *(f"CVE-{n}" for n in CVES.split()),
    *(f"PYSEC-{n}" for n in PYSECS.split()),
    *OTHER,
}


@functools.cache
def table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


@functools.cache
def named_tests(path: str) -> frozenset[str]:
    """Names of the test functions of a file; empty when there is no such file."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"), filename=path)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(
        n.name for n in ast.walk(tree) if isinstance(n, kinds) and n.name[:5] == "test_"
    )


def is_there(node_id: str) -> bool:
    path, _, name = node_id.partition("::")
    return path.startswith("tests/") and name in named_tests(path)


def missing(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"{row['ids'][0]}: {test}" for row in rows for test in row["tests"] if not is_there(test)
    ]


def ids() -> list[str]:
    rows = [*table()["advisory"], *table().get("later", [])]
    return [one for row in rows for one in row["ids"]]


def test_every_id_of_the_survey_has_exactly_one_row() -> None:
    counts = Counter(ids())
    assert sorted(SURVEY - set(counts)) == []
    assert sorted(set(counts) - SURVEY) == []
    assert [one for one, count in counts.items() if count > 1] == []
    assert len(SURVEY) > 110


def test_every_row_says_what_it_is_about_and_names_tests_that_exist() -> None:
    rows = table()["advisory"]
    assert [row["ids"] for row in rows if not row["about"].strip() or not row["tests"]] == []
    assert missing(rows) == []
    assert all(set(row) <= {"ids", "about", "tests", "unverified"} for row in rows)
    assert all(set(row.get("unverified", ())) <= set(row["ids"]) for row in rows)


def arrived(row: dict[str, Any]) -> list[str]:
    """Which of the files that bring a later feature are here."""
    return [path for path in row["arrives_with"] if any(ROOT.glob(path))]


def test_rows_of_later_features_are_mapped_as_soon_as_their_feature_is_here() -> None:
    rows = table().get("later", [])
    assert [
        row["ids"] for row in rows if not row["reason"].strip() or not row["arrives_with"]
    ] == []
    here = {row["ids"][0]: arrived(row) for row in rows if arrived(row)}
    assert not here, f"move these rows to [[advisory]] and name their tests: {here}"


@pytest.mark.parametrize(
    ("test", "found"),
    [
        ("tests/unit/test_advisories.py::test_a_test_that_is_not_there_is_noticed", True),
        ("tests/unit/test_advisories.py::test_nothing_of_that_name", False),
        ("tests/unit/test_advisories.py::named_tests", False),
        ("tests/unit/test_no_such_file.py::test_x", False),
        ("superfluid_core/clock.py::test_x", False),
    ],
)
def test_a_test_that_is_not_there_is_noticed(test: str, found: bool) -> None:
    assert is_there(test) == found
    assert bool(missing([{"ids": ["X"], "tests": [test]}])) != found
