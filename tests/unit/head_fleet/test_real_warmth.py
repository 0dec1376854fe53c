"""Planned moves and warm prefixes over real node processes with the simulated engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from superfluid_head.fleet.events import EndEvent, MovedEvent, TokensEvent
from tests.unit.head_fleet.test_real_nodes import children, read, request, with_fleet

BLOCK_TOKENS = 16

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


async def until_known(fleet: Any, tokens: int) -> None:
    """Wait until nodes have told of that many cached tokens."""
    for _ in range(1_000):
        if fleet._desk.warmth.blocks * BLOCK_TOKENS >= tokens:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{fleet._desk.warmth.blocks} blocks are known")


def test_a_head_and_its_successor_send_a_prompt_where_its_beginning_is_cached(
    tmp_path: Any,
) -> None:
    long = replace(request(1, 4), prompt=tuple(40 + n % 200 for n in range(1_200)), tenant="acme")
    homes: list[str] = []

    def home(fleet: Any, asked: Any) -> str:
        # as it was decided: when a reader comes to an event, its node may be done with the session
        (record,) = fleet.why(asked.request_id)
        return str(record.node)

    async def first(fleet: Any) -> None:
        await read(fleet, long)
        homes.append(home(fleet, long))
        await until_known(fleet, 1_150)
        for number in range(4):
            again = replace(long, request_id=f"again{number}")
            _, _, end = await read(fleet, again)
            assert home(fleet, again) == homes[0]
            assert end.cached >= 1_100

    async def successor(fleet: Any) -> None:
        await until_known(fleet, 1_150)
        await read(fleet, long)
        assert home(fleet, long) == homes[0]
        (record,) = fleet.why("r1")
        assert "cached" in record.scores[0]

    with children(tmp_path, "a", "b", "c") as (keys, nodes):
        asyncio.run(with_fleet(keys, nodes, first))
        asyncio.run(with_fleet(keys, nodes, successor, "head-2"))


def test_prompts_that_begin_alike_and_come_at_once_are_computed_once(tmp_path: Any) -> None:
    document = tuple(40 + n % 200 for n in range(2_000))

    async def scenario(fleet: Any) -> None:
        warmth = fleet._desk.warmth
        # every node has told of blocks: of one that has not nobody knows whether it caches any
        while not all(each.has_reported for each in warmth._speakers.values()):
            others = [replace(request(n, 2), prompt=(50 + n,) * 64) for n in range(6)]
            await asyncio.gather(*(read(fleet, one) for one in others))
            await asyncio.sleep(0.1)
        alike = [
            replace(request(n, 8), request_id=f"alike{n}", prompt=(*document, 300 + n), tenant="b")
            for n in range(4)
        ]
        ends = [end for _, _, end in await asyncio.gather(*(read(fleet, one) for one in alike))]
        homes = {record.node for n in range(4) for record in fleet.why(f"alike{n}")}
        assert len(homes) == 1, homes
        assert sorted(end.cached >= 1_900 for end in ends) == [False, True, True, True]

    with children(tmp_path, "a", "b", "c") as (keys, nodes):
        asyncio.run(with_fleet(keys, nodes, scenario))


LONG = 4_000
"""Tokens that no stream of this test comes to: its reader leaves before."""


class Stream:
    """One reader of a long answer, who goes on until 40 tokens after the drained node is empty."""

    def __init__(self, asked: Any) -> None:
        self.asked = asked
        self.ids: list[int] = []
        self.logprobs: list[Any] = []
        self.moves = 0
        self.gaps: list[float] = []

    async def read(self, fleet: Any, on_event: Any, is_over: asyncio.Event) -> None:
        last_s, end = 0.0, LONG
        async with fleet.generate(self.asked) as generation:
            async for event in generation:
                assert not isinstance(event, EndEvent)
                self.moves += isinstance(event, MovedEvent)
                if isinstance(event, TokensEvent):
                    assert event.first == len(self.ids)
                    self.ids += event.ids
                    self.logprobs += event.logprobs
                    now_s = time.monotonic()
                    self.gaps += [now_s - last_s] if last_s else []
                    last_s = now_s
                on_event()
                if is_over.is_set():
                    end = min(end, len(self.ids) + 40)
                    if len(self.ids) >= end:
                        return


def test_a_planned_move_keeps_every_token_and_its_pause_is_short(tmp_path: Any) -> None:
    streams = [
        Stream(replace(request(n, LONG), prompt=tuple(40 + (n + k) % 200 for k in range(4_000))))
        for n in range(6)
    ]

    async def scenario(fleet: Any) -> None:
        drained: dict[str, int] = {}
        is_over = asyncio.Event()

        def on_event() -> None:
            if drained:
                if sum(each.moves for each in streams) == sum(drained.values()):
                    is_over.set()
            elif all(len(each.ids) >= 40 for each in streams):
                # six streams over two nodes: three at least are there, wherever they were placed
                fullest = max(fleet.health().nodes, key=lambda node: node.sessions)
                drained[fullest.name] = fullest.sessions
                fleet.drain(fullest.name, 0)

        await asyncio.gather(*(each.read(fleet, on_event, is_over) for each in streams))
        ((drained_node, were_there),) = drained.items()
        assert were_there >= 3
        assert sum(each.moves for each in streams) == were_there
        assert fleet.counters.faults == 0
        state = next(node for node in fleet.health().nodes if node.name == drained_node)
        assert state.sessions == 0
        # another tenant: nothing of these prompts is cached for it
        calm = [
            replace(each.asked, request_id=f"calm{n}", max_output=len(each.ids), tenant="calm")
            for n, each in enumerate(streams)
        ]
        results = await asyncio.gather(*(read(fleet, one) for one in calm))
        for (ids, logprobs, end), each in zip(results, streams, strict=True):
            assert ids == each.ids
            assert logprobs == each.logprobs
            assert end.moves == 0

    with children(tmp_path, "a", "b") as (keys, nodes):
        asyncio.run(with_fleet(keys, nodes, scenario))
    pause_s = max(max(each.gaps) for each in streams)
    print(f"\nlongest pause in a stream through planned moves: {1e3 * pause_s:.0f} ms")
