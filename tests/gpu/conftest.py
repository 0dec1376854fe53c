"""Tests of this folder need a CUDA device that torch can use; on other machines they are marked as not for here."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    condition = not torch.cuda.is_available()
    unfit = pytest.mark.skipif(condition, reason="torch sees no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(unfit)
