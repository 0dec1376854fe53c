"""Every case of the handshake matrix has a test, and it is there."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MATRIX: dict[str, list[str]] = tomllib.loads((HERE / "handshake.toml").read_text(encoding="utf-8"))


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_the_matrix_has_all_cases() -> None:
    assert [int(case.split()[0]) for case in MATRIX] == list(range(1, 27))


@pytest.mark.parametrize("case", MATRIX)
def test_each_case_has_its_tests(case: str) -> None:
    assert MATRIX[case]
    for named in MATRIX[case]:
        path, _, name = named.partition("::")
        assert name in functions_of(path), named
