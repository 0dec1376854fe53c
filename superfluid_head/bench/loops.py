"""The event loop of the bench's clients, and what else a process that measures others should not be late by.

It is the head's own kind, uvloop where it is installed: a client of a hundred streams on the machine of the servers has to take little
of it, for what it is late by looks like a pause of theirs. For the same reason a full garbage collection is made before, not amid.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

from superfluid_core.collector import Collector
from superfluid_head.http_server import new_loop

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(_undisturbed(work))


async def _undisturbed(work: Coroutine[Any, Any, T]) -> T:
    """Collect garbage as a server does that is never idle."""
    gc.collect()
    collector = Collector(lambda: False)
    collector.begin()
    collecting = asyncio.get_running_loop().create_task(collector.run())
    await asyncio.sleep(0)  # one that never began would put nothing back
    try:
        return await work
    finally:
        collecting.cancel()
        await asyncio.wait([collecting])
