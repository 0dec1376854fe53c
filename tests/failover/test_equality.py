"""The matrix: every kind of request, its node lost at every place, equal to its unbroken answer every time (reliability T-F)."""

from __future__ import annotations

import asyncio

import pytest

from tests.failover.kit import Reply, path
from tests.failover.matrix import Outcome, run_row
from tests.failover.rows import DIALECT_ROWS, GREEDY, PREFILL, ROWS, SHORT, STREAM, Row

CUTS_MIN = 1_000
COLLECTED = Row("collected", GREEDY | SHORT)
STREAMED = Row("streamed", GREEDY | SHORT | STREAM)


async def every_row() -> list[Outcome]:
    async with path() as asked:
        return [await run_row(asked, row, number) for number, row in enumerate(ROWS)]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_thousand_lost_nodes_change_nothing_in_any_kind_of_answer() -> None:
    outcomes = asyncio.run(every_row())
    assert {o.row: o.unlike for o in outcomes if o.unlike} == {}
    assert {o.row: o.uncut for o in outcomes if o.uncut} == {}, "a cut that did not happen"
    assert sum(outcome.cuts for outcome in outcomes) >= CUTS_MIN
    assert len(outcomes) == len({row.name for row in ROWS})


@pytest.mark.slow
@pytest.mark.parametrize("dialect", list(DIALECT_ROWS))
def test_calls_and_thoughts_are_the_same_whatever_token_their_node_is_lost_at(dialect: str) -> None:
    async def every() -> tuple[list[Outcome], list[Reply]]:
        rows = list(enumerate(DIALECT_ROWS[dialect], 100))
        async with path(dialect) as asked:
            outcomes = [await run_row(asked, row, number) for number, row in rows]
            return outcomes, [(await asked.ask(row, number))[0] for number, row in rows]

    outcomes, replies = asyncio.run(every())
    assert {o.row: o.unlike for o in outcomes if o.unlike} == {}
    assert {o.row: o.uncut for o in outcomes if o.uncut} == {}
    said = [reply.choices[0][1] for reply in replies]
    assert sum(len(one.calls) for one in said) == {"qwen3": 2, "llama3": 1}[dialect]
    assert all("Köln" in one.reasoning + "".join(one.calls.get(0, ())) for one in said)


async def lost_four_times(row: Row) -> tuple[Reply, Reply, int]:
    async with path() as asked:
        whole, _ = await asked.ask(row, 1)
        broken, name = await asked.ask(row, 1, (PREFILL, 3, 7, 11))
        return whole, broken, asked.cuts_of(name)


def test_three_moves_are_made_and_the_fourth_loss_ends_a_stream_with_an_error() -> None:
    whole, broken, cuts = asyncio.run(lost_four_times(STREAMED))
    assert cuts == 4
    assert whole.is_done
    assert not broken.is_done
    assert broken.error["code"] == "moves_exhausted"
    ((_, kept),), ((_, wanted),) = broken.choices, whole.choices
    assert wanted.text.startswith(kept.text.rstrip("\ufffd"))
    assert kept.finish is None


def test_three_moves_are_made_and_the_fourth_loss_refuses_a_collected_answer() -> None:
    _, broken, cuts = asyncio.run(lost_four_times(COLLECTED))
    assert cuts == 4
    assert broken.status >= 500
    assert broken.error["code"] == "moves_exhausted"


def test_a_loss_behind_the_last_token_moves_nothing() -> None:
    async def run() -> tuple[Reply, Reply, int]:
        async with path() as asked:
            whole, _ = await asked.ask(STREAMED, 1)
            placements = asked.fleet.counters.placements
            broken, _ = await asked.ask(STREAMED, 1, (40,))
            return whole, broken, asked.fleet.counters.placements - placements

    whole, broken, placements = asyncio.run(run())
    assert broken == whole
    assert placements == 1


def test_the_matrix_notices_a_wrong_token_at_the_cut() -> None:
    async def run() -> Outcome:
        async with path() as asked:
            asked.fleet.is_lying = True
            return await run_row(asked, Row("seen", SHORT | STREAM | {"logprobs": True}), 1, step=4)

    outcome = asyncio.run(run())
    assert len(outcome.unlike) > outcome.runs // 2
