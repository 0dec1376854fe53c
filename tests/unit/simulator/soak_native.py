"""The compiled build says what the interpreted one says (`make native`): every scenario, and a fleet under every policy.

    python -m tests.unit.simulator.soak_native [--folder .venv/native] [--nodes 50] [--sessions 6000]

Each side is a process of its own, started outside the tree so that nothing but its path decides which modules it gets. Exit 1
when what they print differs, when one of them fails, or when the compiled one was not compiled. CPU seconds are printed beside.
Then tests run on the compiled modules: random schedules, recordings, and plans as bytes, which need what compiling takes from a class.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from importlib import import_module
suffix = sys.argv.pop(1)
for name in ("scheduler.scheduler", "kv.prefix", "placement.policies", "simulator.fleet", "session"):
    found = import_module("superfluid_core." + name).__file__
    assert found.endswith(suffix), found
from superfluid_head.cli import main
main()
"""
SECONDS_MAX = 3600
TESTS = (
    "tests/unit/scheduler/test_machine.py",
    "tests/unit/scheduler/test_parking.py",
    "tests/unit/noded/test_recording.py",
    "tests/unit/noded/test_scheduling.py",
    "tests/unit/engine_cuda/test_parallel.py::test_a_plan_comes_through_bytes_as_it_was",
)


def ask(folder: Path, suffix: str, words: list[str]) -> tuple[bytes, float]:
    """Run `superfluid` with the packages of `folder`; returns what it printed, and its CPU seconds."""
    before = getrusage(RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, suffix, *words],
            cwd=elsewhere,
            env=os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"},
            stdout=subprocess.PIPE,
            timeout=SECONDS_MAX,
            check=True,
        )
    after = getrusage(RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def questions(nodes: int, sessions: int) -> list[list[str]]:
    """List the scenarios and the fleet as words of the command line."""
    listed, _ = ask(ROOT, ".py", ["simulate", "list"])
    names = [line.split()[0] for line in listed.decode().splitlines() if line.strip()]
    assert len(names) > 10, names
    fleet = ["simulate", "fleet", "--nodes", str(nodes), "--sessions", str(sessions)]
    return [
        *(["simulate", "run", name, "--json"] for name in names),
        [*fleet, "--placement", "all", "--json"],
    ]


def run_tests(folder: Path) -> bool:
    """Run `TESTS` of this tree against the packages of `folder`; false when one fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTHONSAFEPATH": "1"},
        timeout=SECONDS_MAX,
        check=False,
    )
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description="compare the compiled build with the sources")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv/native")
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--sessions", type=int, default=6_000)
    args = parser.parse_args()
    differ = 0
    for words in questions(args.nodes, args.sessions):
        interpreted, slow_s = ask(ROOT, ".py", words)
        compiled, fast_s = ask(args.folder.resolve(), ".so", words)
        is_same = interpreted == compiled and bool(compiled.strip())
        differ += not is_same
        verdict = "same" if is_same else "DIFFERENT"
        print(f"{verdict:9}  {slow_s:6.2f} s  {fast_s:6.2f} s  {' '.join(words[1:])}", flush=True)
    is_passed = run_tests(args.folder.resolve())
    sys.exit(1 if differ or not is_passed else 0)


if __name__ == "__main__":
    main()
