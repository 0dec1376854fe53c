"""Rows with log-probabilities wait for turns of their own; what is said of one session stays in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from superfluid_core.session import FinishReason, TokenLogprobs
from superfluid_core.wire.messages import TokenRow, Tokens
from superfluid_head.fleet.heavy import ROWS_A_TURN, ROWS_WAITING_MAX, HeavyRows

Heard = list[tuple[int, int]]


def row(session: int, first: int = 0) -> TokenRow:
    return TokenRow(session, 1, first, (7,))


def run(scenario: Callable[[HeavyRows, Heard], Coroutine[Any, Any, None]]) -> Heard:
    heard: Heard = []

    async def main() -> None:
        await scenario(HeavyRows(lambda _link, one: heard.append((one.session, one.first))), heard)

    asyncio.run(main())
    return heard


def test_a_few_are_heard_in_every_turn_and_all_in_the_order_in_which_they_came() -> None:
    async def scenario(rows: HeavyRows, heard: Heard) -> None:
        for session in range(10):
            rows.add(1, row(session))
        assert not heard
        counts = []
        while len(rows):
            await asyncio.sleep(0)
            counts.append(len(heard))
        assert counts == [ROWS_A_TURN, 2 * ROWS_A_TURN, 10]
        rows.add(1, row(10))
        await asyncio.sleep(0)

    assert run(scenario) == [(session, 0) for session in range(11)]


def test_a_session_is_held_back_for_as_long_as_something_of_it_waits() -> None:
    async def scenario(rows: HeavyRows, heard: Heard) -> None:
        rows.add(1, row(5))
        assert 5 in rows
        rows.add(1, row(5, 1))
        rows.add(1, row(6))
        rows.flush(5)
        assert heard == [(5, 0), (5, 1)]
        assert 5 not in rows
        assert 6 in rows
        rows.flush(5)
        rows.flush()
        assert not len(rows)
        await asyncio.sleep(0)

    assert run(scenario) == [(5, 0), (5, 1), (6, 0)]


def test_rows_without_log_probabilities_come_first_and_a_sessions_rows_stay_in_order() -> None:
    told = TokenLogprobs(-0.5, ((7, -0.5),))
    step = [
        TokenRow(1, 1, 0, (7,), logprobs=(told,)), TokenRow(2, 1, 0, (8,)), TokenRow(1, 1, 1, (), FinishReason.LENGTH),
        TokenRow(3, 1, 0, (9,), logprobs=(told,)), TokenRow(4, 1, 0, (9,)),
    ]  # fmt: skip

    async def scenario(rows: HeavyRows, heard: Heard) -> None:
        heard += [(one.session, one.first) for one in rows.plain(1, step)]
        await asyncio.sleep(0)

    assert run(scenario) == [(2, 0), (4, 0), (1, 0), (1, 1), (3, 0)]


def test_no_more_wait_than_there_is_room_for() -> None:
    async def scenario(rows: HeavyRows, heard: Heard) -> None:
        for first in range(ROWS_WAITING_MAX + 3):
            rows.add(1, row(1, first))
        assert len(rows) == ROWS_WAITING_MAX
        assert heard == [(1, 0), (1, 1), (1, 2)]
        rows.flush()

    assert run(scenario) == [(1, first) for first in range(ROWS_WAITING_MAX + 3)]


def test_what_is_heard_may_have_everything_heard() -> None:
    heard: Heard = []

    async def main() -> None:
        def hear(_link: int, one: TokenRow) -> None:
            heard.append((one.session, one.first))
            rows.flush()

        rows = HeavyRows(hear)
        for session in range(6):
            rows.add(1, row(session))
        await asyncio.sleep(0)

    asyncio.run(main())
    assert heard == [(session, 0) for session in range(6)]


def relinked(runner: Any, slot: Any) -> None:
    runner.relink(slot, slot.link)


def relieved(runner: Any, slot: Any) -> None:
    runner.relief._move(runner.generations[slot.session], slot, None)


def stalled(runner: Any, slot: Any) -> None:
    runner.stalled(slot)


@pytest.mark.parametrize("replace", [relinked, relieved, stalled])
def test_what_waits_of_a_session_is_heard_before_its_placement_is_replaced(
    kit: Any, reader: Any, replace: Callable[[Any, Any], None]
) -> None:
    # found by reading: they were told to a placement that was over, so the next one computed them again
    async def scenario() -> None:
        node = kit.node("a", pause=asyncio.Event().wait)
        async with kit.fleet(node) as fleet, asyncio.timeout(20):
            request = kit.request(1, 30)
            reading = asyncio.create_task(reader(fleet, request))
            while not node.opens:  # noqa: ASYNC110 - it looks at a node
                await asyncio.sleep(0.01)
            runner = fleet._runner
            ((session, generation),) = runner.generations.items()
            slot, epoch = generation.waiting.slot, generation.machine.journal.epoch
            ids = kit.tokens_of(request)[:8]
            rows = tuple(
                TokenRow(session, epoch, first, (token,), logprobs=(TokenLogprobs(-1.0),))
                for first, token in enumerate(ids)
            )
            runner.heard(slot.link, Tokens(rows))
            assert generation.machine.journal.ids == []
            replace(runner, slot)
            assert generation.machine.journal.ids == ids
            assert generation.machine.journal.epoch == epoch + 1
            assert runner.counters.stale_rows == 0
            reading.cancel()

    asyncio.run(scenario())
