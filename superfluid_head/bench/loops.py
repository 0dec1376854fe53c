"""The event loop of the bench's clients: the head's own kind, uvloop where it is installed.

A client of a hundred streams on the machine of the servers has to take little of it: what it is late by looks like a pause of theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from superfluid_head.http_server import new_loop

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(work)
