"""A head over real nodes with the simulated engine, all in one process: for cases in which the engine must obey."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import httpx

from superfluid_core.clock import SystemClock
from superfluid_core.grammar.compiler import Grammars, vocabulary_of
from superfluid_head.fleet.directory import NodeAddress
from superfluid_head.fleet.fleet import Fleet, FleetOptions
from tests.unit.head_api.conftest import Bench
from tests.unit.noded.conftest import KEYS, TEXTS, NodeRig, serving


class Asking:
    """A client of the head, and the nodes behind it."""

    def __init__(self, bench: Bench, fleet: Fleet, nodes: list[NodeRig]) -> None:
        self.bench = bench
        self.fleet = fleet
        self.nodes = nodes
        transport = httpx.ASGITransport(app=bench.app)
        self._client = httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:8453", verify=False, trust_env=False
        )

    async def post(self, path: str, **members: Any) -> httpx.Response:
        return await self._client.post(path, json={"model": "m", **members}, timeout=50)

    async def chat(self, words: str = "hi", **members: Any) -> httpx.Response:
        messages = [{"role": "user", "content": words}]
        return await self.post("/v1/chat/completions", messages=messages, **members)

    async def complete(self, prompt: Any = "hi", **members: Any) -> httpx.Response:
        return await self.post("/v1/completions", prompt=prompt, **members)

    async def close(self) -> None:
        await self._client.aclose()


def _is_idle(rig: NodeRig) -> bool:
    return not rig.node.agent.roster.live


def grammars() -> Grammars:
    return Grammars(lambda: vocabulary_of(TEXTS, TEXTS.vocabulary))


@asynccontextmanager
async def asking(
    script: str = "",
    *,
    nodes: int = 1,
    head: dict[str, Any] | None = None,
    host: str = "127.0.0.1",
    **shape: Any,
) -> AsyncIterator[Asking]:
    """Start `nodes` nodes and a head; nothing may be held on the nodes at the end."""
    bench = Bench(**(head or {}))
    options = {"text_fingerprint": "fake-text", "grammars": grammars(), "host": host, **shape}
    try:
        async with AsyncExitStack() as stack:
            rigs = [
                await stack.enter_async_context(serving(script, **options)) for _ in range(nodes)
            ]
            addresses = tuple(NodeAddress(host, rig.port, f"n{n}") for n, rig in enumerate(rigs))
            fleet = Fleet(FleetOptions(addresses, "head-1", KEYS), SystemClock(), random.Random(5))
            object.__setattr__(bench.head, "fleet", fleet)
            async with asyncio.TaskGroup() as group:
                running = group.create_task(fleet.run())
                asked = Asking(bench, fleet, rigs)
                try:
                    assert await fleet.wait_ready(10)
                    yield asked
                    for rig in rigs:
                        await rig.until(partial(_is_idle, rig))
                finally:
                    await asked.close()
                    running.cancel()
    finally:
        bench.workers.close()


def content_of(response: httpx.Response) -> str:
    """The text of a chat reply of either mode."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        return str(response.json()["choices"][0]["message"]["content"])
    lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)
