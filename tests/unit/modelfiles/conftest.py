"""Shared models: the demo, read once."""

from __future__ import annotations

from typing import Any

import pytest

from superfluid_core.modelfiles.gguf import GgufFile
from superfluid_core.modelfiles.resolve import ModelFiles, resolve
from superfluid_core.modelfiles.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def demo() -> ModelFiles:
    return resolve("demo")


@pytest.fixture(scope="session")
def demo_metadata(demo: ModelFiles) -> dict[str, Any]:
    file = GgufFile.open(demo.path)
    try:
        return file.metadata
    finally:
        file.close()


@pytest.fixture(scope="session")
def tokenizer(demo: ModelFiles) -> Tokenizer:
    return demo.tokenizer()
