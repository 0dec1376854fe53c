"""Style as a test: sizes, leftovers and habits that no linter of ours looks at.

The figures are the hard ends of what style.md asks for (files about 400 lines, functions about 60).
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("superfluid_core", "superfluid_noded", "superfluid_head")
PACKAGE_LINES_MAX = 450
TEST_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".service", ".target", ".yaml", ".yml", ".conf", ""}

# spelled so that this file does not find itself
LEFTOVERS = re.compile(r"\b(T[O]DO|F[I]XME|X[X]X|H[A]CK)\b|raise N[o]tImplementedError")
MACHINE_PATHS = re.compile(
    r"(^|[^\w.])/(w[o]rk|r[o]ot|f[a]rm)/|f[a]rm-bench|f[a]rm-studio|\.l[i]brary|/home/[a-z]"
)


def package_files() -> list[Path]:
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def source_files() -> list[Path]:
    return package_files() + sorted((ROOT / "tests").rglob("*.py"))


def repository_texts() -> list[Path]:
    """Every text that belongs to the repository: the sources and what lies beside them."""
    folders = ("docs", "deploy", "systemd", ".ci")
    found = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".coverage"]
    found += [p for name in folders for p in (ROOT / name).rglob("*") if p.is_file()]
    texts = [path for path in found if path.suffix in TEXT_SUFFIXES]
    return source_files() + sorted(texts)


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Looks(NamedTuple):
    """What is kept of a source's tree: all trees at once are millions of objects."""

    docstring: str
    functions: tuple[tuple[str, int, int], ...]
    """Name, line and number of lines."""
    prints: tuple[int, ...]
    """Lines."""


@functools.cache
def looks(path: Path) -> Looks:
    module = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    functions, prints = [], []
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            functions.append((node.name, node.lineno, node.end_lineno - node.lineno + 1))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("print", "pprint", "breakpoint")
        ):
            prints.append(node.lineno)
    return Looks((ast.get_docstring(module) or "").strip(), tuple(functions), tuple(prints))


def test_files_stay_small_enough_to_hold_in_the_head() -> None:
    def limit(path: Path) -> int:
        return TEST_LINES_MAX if path.is_relative_to(ROOT / "tests") else PACKAGE_LINES_MAX

    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in source_files()}
    long = [f"{shown(p)}: {lines} lines" for p, lines in lengths.items() if lines > limit(p)]
    assert not long, long


def test_functions_fit_on_a_screen() -> None:
    long = [
        f"{shown(path)}:{line} {name}: {lines} lines"
        for path in source_files()
        for name, line, lines in looks(path).functions
        if lines > FUNCTION_LINES_MAX
    ]
    assert not long, long


def test_every_module_says_what_it_is() -> None:
    silent = [shown(path) for path in package_files() if not looks(path).docstring]
    assert not silent, silent


def lines_matching(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    return [
        f"{shown(path)}:{number}: {line.strip()[:80]}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]


def test_nothing_is_left_open() -> None:
    found = lines_matching(LEFTOVERS, source_files())
    assert not found, found


def test_no_test_is_skipped_for_good() -> None:
    pattern = re.compile(r"mark\.sk[i]p\b|mark\.xf[a]il|pytest\.xf[a]il\(")
    found = lines_matching(pattern, source_files())
    assert not found, found


def test_no_path_of_one_machine_is_in_the_repository() -> None:
    found = lines_matching(MACHINE_PATHS, repository_texts())
    assert not found, found


def test_only_a_cli_prints() -> None:
    found = [
        f"{shown(path)}:{line}"
        for path in package_files()
        if path.name != "cli.py"
        for line in looks(path).prints
    ]
    assert not found, found


def test_no_file_is_named_after_nothing() -> None:
    vague = {"utils.py", "util.py", "misc.py", "helpers.py", "helper.py"}
    found = [shown(path) for path in source_files() if path.name in vague]
    assert not found, found


@pytest.mark.parametrize("line", ["# T" + "ODO later", "raise N" + "otImplementedError"])
def test_the_leftover_pattern_finds_what_it_looks_for(line: str) -> None:
    assert LEFTOVERS.search(line)
