"""The short chaos of every test run: ten kills; five freezes, three black holes and a drain. The rest is `make chaos`.

Faults of a kind strike several nodes at once, so that the waits are shared; every transcript is judged off-line. Bars in time
are `make chaos`'s too: here a machine may be busy with other things, and a pause only has to end.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.chaos.crowd import Load, Run, running
from tests.chaos.on_nodes import opened
from tests.chaos.on_wires import Hole, Noticed, fall_silent
from tests.chaos.proxy import BOTH, Way
from tests.chaos.scenario import Row
from tests.chaos.site import MOCK, Setup, rates

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(150)]
CLIENTS = 6
TOKENS = 30
FREEZE_S = 5.0
PAUSE_MS_MAX = 15_000.0
FLAGS = (*MOCK, *rates(20))
# Two of five at once, and two of the other three, before anyone comes back: a start costs more than all the rest.
KILLS = ((0, 1), (2, 3), (4, 0), (1, 2), (3, 4))
BACK: dict[int, tuple[int, ...]] = {1: (0, 1, 2, 3), 3: (1, 4)}


def judge_short(row: Row) -> None:
    """Nothing is lost, repeated or different, and answers moved."""
    found = row.found
    assert not row.missed, row.missed
    assert (found.lost, found.duplicated, found.failed) == (0, 0, 0)
    assert found.moved > 0
    assert found.equal == found.complete == found.streams
    assert max(found.raw_gaps_ms) <= PAUSE_MS_MAX, found.longest


async def kill_two(run: Run, names: list[str]) -> None:
    await run.until_streaming(CLIENTS // 2)
    for name in names:
        run.fault("kill", name)
        run.site.kill(name)
    for name in names:
        run.site.reap(name)
    await run.outlive()


async def bring_back(run: Run, names: list[str]) -> None:
    starting = await asyncio.to_thread(lambda: [run.site.begin_node(name) for name in names])
    await asyncio.to_thread(run.site.rig.wait_ready, *starting)
    for name in names:
        await run.until_node(name, lambda node: bool(node["is_up"]))


async def ten_kills(row: Row) -> None:
    async with AsyncExitStack() as stack:
        site = await opened(stack, Setup(nodes=5, flags=FLAGS))
        async with running(site, Load(CLIENTS, TOKENS, seed=5)) as run:
            for turn, pair in enumerate(KILLS):
                await kill_two(run, [site.names[n] for n in pair])
                await bring_back(run, [site.names[n] for n in BACK.get(turn, ())])
        row.add(run.history)


def test_ten_kills_lose_nothing_and_repeat_nothing() -> None:
    row = Row("C1", "kill -9 in mid-stream")
    asyncio.run(ten_kills(row))
    assert row.faults == 10
    judge_short(row)


async def freeze_for(run: Run, name: str) -> None:
    run.fault("freeze", name)
    run.site.node(name).freeze()
    await asyncio.sleep(FREEZE_S)
    run.site.node(name).thaw()


async def nine_silences(row: Row) -> None:
    rounds: list[tuple[list[int], int, tuple[Way, ...]]] = [
        ([0, 1], 2, BOTH), ([2, 3], 0, (Way.DOWN,)), ([1], 3, (Way.UP,)),
    ]  # fmt: skip
    noticed = Noticed()
    async with AsyncExitStack() as stack:
        site = await opened(stack, Setup(nodes=4, flags=FLAGS))
        async with running(site, Load(CLIENTS, TOKENS, seed=6)) as run:
            for frozen, cut, ways in rounds:
                await run.until_streaming(CLIENTS // 2)
                async with asyncio.TaskGroup() as group:
                    group.create_task(fall_silent(run, Hole(site.names[cut], ways), noticed))
                    for number in frozen:
                        group.create_task(freeze_for(run, site.names[number]))
                await run.outlive()
                await run.until_up(4)
            await run.until_streaming(CLIENTS // 2)
            run.fault("drain", site.names[0])
            assert await asyncio.to_thread(site.stop, site.names[0]) == 0
        row.add(run.history)
    assert noticed.missed == 0
    assert sum(map(len, noticed.dead_s.values())) == len(rounds)


def test_freezes_black_holes_and_a_drain_are_a_pause_at_most() -> None:
    row = Row("C2", "freezes, black holes, a drain")
    asyncio.run(nine_silences(row))
    assert row.faults == 9
    judge_short(row)
