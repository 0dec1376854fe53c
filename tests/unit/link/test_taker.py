"""What a link gives away where it arrives, and what it keeps for who receives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from superfluid_core.link.keys import FleetKeys
from superfluid_core.wire import messages as m
from tests.unit.link.test_link import pair, row, until


def test_a_taker_is_given_what_comes_while_somebody_waits_and_the_rest_keeps_its_order(
    keys: FleetKeys, make_fleet: Any
) -> None:
    async def main() -> None:
        async with pair(make_fleet(keys)) as (head, node):
            taken: list[m.Message] = []

            def take(message: m.Message) -> bool:
                if message == row(9, 9):
                    raise ValueError("a fault of the taker")
                if message == row(3, 3):
                    return False
                taken.append(message)
                return True

            head.offer(take)
            before = head.bytes_in
            node.send(row(1, 1))
            await until(lambda: head.bytes_in > before)
            assert taken == [], "nobody waited for it"
            assert await head.receive() == row(1, 1)
            for number in (2, 3, 4):
                asyncio.get_running_loop().call_soon(node.send, row(number, number))
            assert await head.receive() == row(3, 3), "what is not taken is received"
            assert await head.receive() == row(4, 4), "what comes behind it waits behind it"
            assert taken == [row(2, 2)]
            asyncio.get_running_loop().call_soon(node.send, row(9, 9))
            with pytest.raises(ValueError, match="a fault of the taker"):
                await head.receive()

    asyncio.run(main())
