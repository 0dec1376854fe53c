"""A crowd of requests begins a few in every turn of the loop, in order; who comes alone begins at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from superfluid_head.api.turns import BEGINNINGS_A_TURN, Turns


class Inner:
    """An application that notes in which turn of the loop each request began."""

    def __init__(self) -> None:
        self.turn = 0
        self.begun: list[tuple[int, str]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.append((self.turn, scope["path"]))

    def count(self) -> None:
        self.turn += 1
        asyncio.get_running_loop().call_soon(self.count)


async def nothing() -> Message:
    raise AssertionError("nobody reads")


async def nowhere(message: Message) -> None:
    raise AssertionError("nobody answers")


def asked(path: str, method: str = "POST") -> dict[str, Any]:
    return {"type": "http", "method": method, "path": path}


def test_a_crowd_begins_a_few_a_turn_and_in_order() -> None:
    inner = Inner()
    turns = Turns(inner)

    async def main() -> None:
        inner.count()
        for _ in range(2):  # the second crowd finds all as the first did
            async with asyncio.TaskGroup() as group:
                for number in range(21):
                    group.create_task(turns(asked(f"/{number}"), nothing, nowhere))

    asyncio.run(main())
    assert [path for _, path in inner.begun] == 2 * [f"/{number}" for number in range(21)]
    begun = Counter(turn for turn, _ in inner.begun)
    assert max(begun.values()) <= BEGINNINGS_A_TURN
    assert len(begun) >= 2 * 21 / BEGINNINGS_A_TURN


def test_who_comes_alone_and_who_only_reads_begins_without_a_turn() -> None:
    inner = Inner()
    turns = Turns(inner)

    async def main() -> None:
        inner.count()
        began = inner.turn
        await turns(asked("/alone"), nothing, nowhere)
        for number in range(9):
            await turns(asked(f"/{number}", "GET"), nothing, nowhere)
        assert inner.turn == began

    asyncio.run(main())
    assert len(inner.begun) == 10


def test_who_goes_while_it_waits_takes_nobody_s_turn() -> None:
    inner = Inner()
    turns = Turns(inner)

    async def main() -> None:
        inner.count()
        tasks = [
            asyncio.create_task(turns(asked(f"/{number}"), nothing, nowhere))
            for number in range(12)
        ]
        await asyncio.sleep(0)
        for task in tasks[4:10]:
            task.cancel()
        gone = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(each, asyncio.CancelledError) for each in gone) == 6
        await turns(asked("/later"), nothing, nowhere)

    asyncio.run(main())
    assert [path for _, path in inner.begun] == [f"/{n}" for n in (0, 1, 2, 3, 10, 11)] + ["/later"]
