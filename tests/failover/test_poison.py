"""A prompt that kills every process that takes it, with real processes: one request never walks through the fleet."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from superfluid_core.clock import SystemClock
from superfluid_head.bench.load import Answer, chat, chat_body, http_client
from superfluid_head.bench.rig import Rig
from superfluid_head.bench.small_fleet import SmallFleet

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120)]


def test_a_poisonous_prompt_ends_with_two_nodes_and_is_refused_afterwards() -> None:
    with Rig() as rig:
        script = rig.folder / "script.jsonl"
        script.write_text(json.dumps({"match": "hemlock", "fault": "crash", "fault_at": 3}) + "\n")
        flags = ("--engine", "mock", "--model", "demo", "--mock-rates", "prefill=20000,decode=50",
                 "--mock-script", str(script))  # fmt: skip
        fleet = SmallFleet(rig, flags, "demo", nodes=3)
        poison = chat_body(fleet.served, "a cup of hemlock", 20, ignore_eos=True)

        async def ask(body: dict[str, object]) -> Answer:
            async with http_client() as client:
                return await chat(client, fleet.url, body, SystemClock())

        first = asyncio.run(ask(poison))
        assert first.error is not None
        assert not first.is_done
        alive = [rig.named(name).is_running for name in fleet.addresses]
        assert sum(alive) == 1
        del poison["stream"], poison["stream_options"]
        url = f"{fleet.url}/v1/chat/completions"
        again = httpx.post(url, json=poison, timeout=30, trust_env=False)
        assert again.status_code == 500
        assert again.json()["error"]["code"] == "request_quarantined"
        harmless = asyncio.run(ask(chat_body(fleet.served, "a cup of tea", 8, ignore_eos=True)))
        assert harmless.is_complete, harmless.error
        assert sum(rig.named(name).is_running for name in fleet.addresses) == 1
