"""Fixtures of what a CUDA device adds, tried on a CPU: a tiny random model, one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from superfluid_core.engine.torch.selftest.model import TinyModel, TinySizes, write_tiny_model

SIZES = TinySizes(300, 64, 96, 2, 4, 2, 16, 256)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), SIZES)
