"""What a node settles for torch's threads and for compilers of kernels before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from superfluid_noded.cli import settle_caches
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


def test_compiled_kernels_are_kept_where_the_node_keeps_what_can_be_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A service that may not write to its home directory could launch no kernel at all."""
    names = ("TRITON_CACHE_DIR", "TRITON_HOME", "FLASHINFER_WORKSPACE_BASE")

    def forget() -> None:
        for name in names:
            monkeypatch.setenv(name, "")  # so that what was there comes back
            monkeypatch.delenv(name)

    def found() -> list[str | None]:
        return [os.environ.get(name) for name in names]

    forget()
    settle_caches(None)
    assert found() == [None, None, None]
    settle_caches(Path("/var/cache/superfluid"))
    assert found() == ["/var/cache/superfluid/triton", None, "/var/cache/superfluid"]
    forget()
    monkeypatch.setenv("TRITON_HOME", "/elsewhere")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/there")
    settle_caches(Path("/var/cache/superfluid"))
    assert found() == [None, "/elsewhere", "/there"]


def test_the_program_has_not_loaded_torch_when_it_says_so() -> None:
    code = "import sys, superfluid_noded.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=50, check=False).returncode == 0
