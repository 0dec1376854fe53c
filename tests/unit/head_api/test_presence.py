"""Work for a client that may leave: ended by the connection's own word, without a task that waits for it; and writes that leave together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request

from superfluid_head.api.body import ClientGoneError
from superfluid_head.api.gathering import GATHERED_BYTES_MAX, Gathering
from superfluid_head.api.sse import PRESENCE, while_connected


class Door:
    """A connection that tells who watches."""

    def __init__(self) -> None:
        self.has_left = False
        self.watching: set[Callable[[], None]] = set()

    def watch(self, tell: Callable[[], None]) -> None:
        self.watching.add(tell)

    def unwatch(self, tell: Callable[[], None]) -> None:
        self.watching.discard(tell)

    def leave(self) -> None:
        self.has_left = True
        for tell in list(self.watching):
            tell()


async def _never() -> Any:
    raise AssertionError("nobody has to wait for a message")


def request_at(door: Door) -> Request:
    return Request({"type": "http", PRESENCE: door}, _never)


class Work:
    """Something that takes a while and says how it ended."""

    def __init__(self) -> None:
        self.ended = ""

    async def run(self) -> str:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise
        return "done"


async def _soon() -> str:
    return "done"


def test_work_of_one_step_needs_no_turn_of_the_loop() -> None:
    async def check() -> None:
        door, turns = Door(), list[int]()
        asyncio.get_running_loop().call_soon(turns.append, 1)
        assert await while_connected(request_at(door), _soon()) == "done"
        assert not turns
        assert not door.watching

    asyncio.run(check())


def test_a_client_that_leaves_ends_the_work_and_not_the_task() -> None:
    async def check() -> None:
        door, work = Door(), Work()
        asyncio.get_running_loop().call_soon(door.leave)
        with pytest.raises(ClientGoneError):
            await while_connected(request_at(door), work.run())
        assert work.ended == "cancelled"
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        with pytest.raises(ClientGoneError):
            await while_connected(request_at(door), work.run())

    asyncio.run(check())


def test_who_cancels_the_task_as_well_is_heard() -> None:
    async def check() -> None:
        door, work = Door(), Work()
        task = asyncio.create_task(while_connected(request_at(door), work.run()))
        await asyncio.sleep(0)
        door.leave()
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()
        assert work.ended == "cancelled"

    asyncio.run(check())


def test_a_failure_is_itself_and_nobody_watches_any_longer() -> None:
    async def fail() -> None:
        raise ValueError("no")

    async def check() -> None:
        door = Door()
        with pytest.raises(ValueError, match="no"):
            await while_connected(request_at(door), fail())
        assert not door.watching

    asyncio.run(check())


class Pipe:
    """What a Gathering writes to."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.end = ""

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        self.end = "closed"

    def abort(self) -> None:
        self.end = "aborted"


def gathering() -> tuple[Pipe, Gathering]:
    pipe: Any = Pipe()
    return pipe, Gathering(pipe, asyncio.get_running_loop())


def test_what_is_written_in_one_turn_leaves_together_and_in_order() -> None:
    async def check() -> None:
        pipe, line = gathering()
        line.write(b"head ")
        line.write(b"first ")
        assert not pipe.writes
        await asyncio.sleep(0)
        assert pipe.writes == [b"head first "]
        line.write(b"second ")
        line.write_now(b"third ")
        line.write_now(b"fourth")
        assert pipe.writes[1:] == [b"second third ", b"fourth"]
        await asyncio.sleep(0)
        assert len(pipe.writes) == 3

    asyncio.run(check())


def test_much_does_not_wait_and_a_close_leaves_nothing_behind() -> None:
    async def check() -> None:
        pipe, line = gathering()
        line.write(bytes(GATHERED_BYTES_MAX + 1))
        assert len(pipe.writes) == 1
        line.write(b"last")
        line.close()
        assert (pipe.writes[-1], pipe.end) == (b"last", "closed")
        pipe, line = gathering()
        line.write(b"lost")
        line.abort()
        await asyncio.sleep(0)
        assert (pipe.writes, pipe.end) == ([], "aborted")

    asyncio.run(check())
