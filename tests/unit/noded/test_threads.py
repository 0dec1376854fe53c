"""What a node says to torch's threads before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from superfluid_noded.config import settle_threads


def test_idle_threads_sleep_unless_the_operator_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # so that what was there comes back
    monkeypatch.delenv("OMP_WAIT_POLICY")
    settle_threads()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    settle_threads()
    assert os.environ["OMP_WAIT_POLICY"] == "active"


def test_the_program_has_not_loaded_torch_when_it_says_so() -> None:
    code = "import sys, superfluid_noded.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=50, check=False).returncode == 0
