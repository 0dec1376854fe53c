"""What no test leaves behind: how logging is set up. Some run a program in this process, which sets it up for good."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _logging_stays_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    level, disabled, before = root.level, root.manager.disable, tuple(root.handlers)
    yield
    root.setLevel(level)
    logging.disable(disabled)
    for handler in tuple(root.handlers):
        if type(handler) is logging.StreamHandler and handler not in before:
            root.removeHandler(handler)
