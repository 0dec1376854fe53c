"""A node restarts and sixteen heads come back to it (T-D 9)."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest

from superfluid_core.clock import SystemClock
from superfluid_core.wire.messages import Hello, Welcome
from superfluid_head.fleet.fleet import Fleet, FleetOptions
from tests.unit.head_fleet.conftest import FakeNode

HEADS = 16
PER_SECOND_MAX = 40


class Counting(FakeNode):
    """A node that notes when heads come."""

    arrivals: list[float]

    def _welcome(self, _hello: Hello) -> Welcome:
        self.arrivals.append(time.monotonic())
        return super()._welcome(_hello)


@pytest.mark.slow
def test_sixteen_heads_come_back_spread_out_and_below_forty_connections_a_second(keys: Any) -> None:
    node = Counting("n", keys)
    node.arrivals = []

    async def main() -> None:
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(asyncio.TaskGroup())
            await node.start(group)
            running = []
            fleets = []
            for number in range(HEADS):
                options = FleetOptions((node.address(),), f"head-{number}", keys)
                fleets.append(Fleet(options, SystemClock(), random.Random(number)))
                running.append(group.create_task(fleets[-1].run()))
            for fleet in fleets:
                assert await fleet.wait_ready(10)
            await node.die()
            node.arrivals.clear()
            await node.start(group)
            async with asyncio.timeout(20):
                while not all(fleet.health().is_ready for fleet in fleets):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            await node.die()

    asyncio.run(main())
    times = sorted(node.arrivals)
    assert len(times) == HEADS
    assert times[-1] - times[0] > 0.1
    assert max(sum(0 <= other - each < 1 for other in times) for each in times) <= PER_SECOND_MAX
