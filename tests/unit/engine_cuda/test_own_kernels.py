"""A CUDA device whose Triton cannot launch anything is served by plain torch: nobody launches what was seen to fail."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from superfluid_core.engine.torch import draw, layers, own_kernels


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    kept = (own_kernels.gap, layers._fused_layer, draw._draw_open)
    for each in kept:
        each.cache_clear()
    yield
    for each in kept:
        each.cache_clear()


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (
            RuntimeError("Failed to find C compiler.\nmore"),
            "RuntimeError: Failed to find C compiler.",
        ),
        (
            subprocess.CalledProcessError(1, ["gcc"]),
            "CalledProcessError: Command '['gcc']' returned",
        ),
        (PermissionError(13, "Permission denied"), "PermissionError: [Errno 13] Permission denied"),
    ],
    ids=["compiler", "headers", "cache"],
)
def test_kernels_that_cannot_be_launched_are_not_used(
    failure: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> float:
        raise failure

    monkeypatch.setattr(own_kernels, "_difference", fail)
    found = own_kernels.gap()
    assert found is not None
    assert found.startswith(said)
    assert layers._fused_layer() is None
    assert draw._draw_open() is None


def test_kernels_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_kernels, "_difference", lambda: 0.5)
    assert own_kernels.gap() == "a kernel is off by 0.5"
    assert layers._fused_layer() is None


def test_kernels_that_run_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_kernels, "_difference", lambda: 0.0)
    assert own_kernels.gap() is None
    assert layers._fused_layer() is not None
    assert draw._draw_open() is not None
