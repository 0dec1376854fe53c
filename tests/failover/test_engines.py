"""Engines over libraries lose nodes as ours does: two of a kind, a node lost in the middle, the same answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.failover.kit import Reply, path
from tests.failover.rows import GREEDY, PENALTIES, PREFILL, SEEDED, STREAM, Row
from tests.unit.engine_library.conftest import (  # noqa: F401 - fixtures
    Make,
    checkpoint,
    gguf_file,
    library,
    make,
)

LENGTH = {"max_completion_tokens": 20, "ignore_eos": True}
ROWS = (
    Row("seeded", SEEDED | STREAM | LENGTH),
    Row("greedy", GREEDY | STREAM | LENGTH),
    Row("penalties", SEEDED | LENGTH | PENALTIES),
    Row("pattern", SEEDED | STREAM | {"guided_regex": "[a-c]{4}(-[0-9]{2}){2,4}"}),
    Row("two choices", SEEDED | STREAM | LENGTH | {"n": 2}),
)
CUTS = ((PREFILL, 7), (12,))


async def every(engines: tuple[Any, Any]) -> dict[str, list[Reply]]:
    found: dict[str, list[Reply]] = {}
    async with path(engines=engines) as asked:
        for number, row in enumerate(ROWS):
            found[row.name] = [(await asked.ask(row, number))[0]]
            for cuts in CUTS:
                reply, name = await asked.ask(row, number, cuts)
                assert asked.cuts_of(name) >= len(cuts)
                found[row.name].append(reply)
    return found


@pytest.mark.slow
def test_an_answer_whose_node_is_lost_equals_the_unbroken_one(make: Make) -> None:  # noqa: F811
    options = {"kv_blocks": 128, "lanes": 4}
    found = asyncio.run(every((make(**options), make(**options))))
    for name, (whole, *moved) in found.items():
        assert whole.status == 200, name
        assert whole.error is None, name
        assert moved == [whole] * len(CUTS), name
