"""The brief version of soak_openapi.py for a test: 40 requests a route, every other route, in a process of its own (decisions 40)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FUZZ = Path(sys.prefix) / "fuzz"
CASES = 40


def judge_part(part: str) -> None:
    """Run a part and fail on any wrong answer. `part` is `1/2` or `2/2`: two files, so that two workers share them."""
    assert FUZZ.is_dir(), "make venv puts schemathesis there"
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.head_api.soak_openapi"]
    command += ["--cases", str(CASES), "--brief", "--part", part]
    environment = {**os.environ, "PYTHONPATH": str(FUZZ)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2_000:]
    asked = [line.split() for line in done.stdout.splitlines() if " sent, " in line]
    assert len(asked) > 15
    with_input = [line for line in asked if line[0] == "POST" or "{" in line[1]]
    assert all(int(line[2]) >= CASES for line in with_input), done.stdout
