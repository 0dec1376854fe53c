"""The only node dies in the middle of an answer and comes back. Kills and freezes with other nodes beside are tests/chaos's."""

from __future__ import annotations

import asyncio

import pytest

from superfluid_core.clock import SystemClock
from superfluid_head.bench.load import Answer, chat, chat_body, http_client
from superfluid_head.bench.rig import Rig
from superfluid_head.bench.small_fleet import SmallFleet

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TOKENS = 60


def test_without_a_second_node_the_answer_waits_for_the_first_to_come_back(rig: Rig) -> None:
    flags = ("--engine", "mock", "--model", "demo", "--mock-rates", "prefill=20000,decode=50")
    fleet = SmallFleet(rig, flags, "demo", nodes=1)
    body = chat_body(fleet.served, "Who keeps the orchard?", TOKENS, ignore_eos=True)
    killed: list[str] = []

    def on_chunk(answer: Answer) -> None:
        if not killed and len(answer.at_ms) == 10:
            killed.append("node-0")
            rig.named("node-0").kill()
            rig.start_node("node-0", *flags, key=fleet.key, listen=fleet.addresses["node-0"])

    async def both() -> tuple[Answer, Answer]:
        async with http_client() as client:
            unbroken = await chat(client, fleet.url, body, SystemClock())
            return unbroken, await chat(client, fleet.url, body, SystemClock(), on_chunk)

    unbroken, moved = asyncio.run(both())
    assert killed
    assert moved.is_complete, moved.error
    assert moved.text == unbroken.text
