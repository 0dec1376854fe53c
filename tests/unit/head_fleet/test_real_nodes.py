"""The fleet over real node processes with the simulated engine: killed, frozen and drained in mid-answer."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from superfluid_core.clock import SystemClock
from superfluid_core.link.keys import write_key_file
from superfluid_core.session import FinishReason, SamplingParams, TokenLogprobs
from superfluid_head.fleet.events import EndEvent, GenerationRequest, TokensEvent
from superfluid_head.fleet.fleet import Fleet, FleetOptions, NodeAddress

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

READY_S = 40
SESSIONS = 12
HIT_MIN = 3
# whoever has more of its 60 tokens may end with what is on its way already
FAR_TOKENS = 50


class Child:
    """One `superfluid-noded` with the mock engine, on a port of its own choice."""

    def __init__(self, home: Path, name: str, key: Path) -> None:
        self.name = name
        self._ready = home / f"{name}.json"
        self._log = (home / f"{name}.log").open("wb")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "superfluid_noded.cli", "--engine", "mock"),
                *("--model", "demo", "--model-name", "demo", "--listen", "127.0.0.1:0"),
                *("--auth-file", str(key), "--identity", name, "--metrics", "off"),
                *("--ready-file", str(self._ready), "--max-batch", "8", "--mock-eos", "0"),
                *("--mock-rates", "prefill=20000,decode=400", "--drain-grace-ms", "300"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def address(self) -> NodeAddress:
        for _ in range(READY_S * 20):
            assert self.process.poll() is None, f"node {self.name} ended early"
            if self._ready.exists():
                host, port = json.loads(self._ready.read_text())["listen"][0]
                return NodeAddress(host, port, self.name)
            time.sleep(0.05)
        raise AssertionError(f"node {self.name} was not ready in time")

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._log.close()


@contextmanager
def children(home: Path, *names: str) -> Iterator[Any]:
    key = home / "fleet.key"
    keys = write_key_file(key)
    nodes = [Child(home, name, key) for name in names]
    try:
        yield keys, {node.name: node for node in nodes}
    finally:
        for node in nodes:
            node.end()


def request(number: int, tokens: int = 60) -> GenerationRequest:
    return GenerationRequest(
        f"r{number}",
        "demo",
        (1, 70 + number, 300),
        SamplingParams(seed=number, presence_penalty=0.3, logprobs=2),
        tokens,
    )


async def read(fleet: Any, asked: Any, on_count: Any = None) -> Any:
    ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    end: EndEvent | None = None
    async with fleet.generate(asked) as generation:
        async for event in generation:
            if isinstance(event, TokensEvent):
                assert event.first == len(ids)
                ids.extend(event.ids)
                logprobs.extend(event.logprobs)
                if on_count is not None:
                    on_count(len(ids), generation.node)
            elif isinstance(event, EndEvent):
                end = event
    assert end is not None
    return ids, logprobs, end


async def with_fleet(keys: Any, nodes: Any, scenario: Any, head: str = "head-1") -> None:
    addresses = tuple([node.address() for node in nodes.values()])
    fleet = Fleet(FleetOptions(addresses, head, keys), SystemClock(), random.Random(3))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(fleet.run())
        try:
            assert await fleet.wait_ready(10)
            assert all(node.is_up for node in fleet.health().nodes)
            await scenario(fleet)
        finally:
            running.cancel()


def moved_equals_unbroken(tmp_path: Any, hurt: Any, *, heal: Any = None) -> Any:
    """Read everything once in peace and once while `hurt` befalls one node; returns (moves, fleet counters, gap)."""
    outcome: dict[str, int] = {}

    async def scenario(fleet: Any, nodes: Any) -> None:
        asked = [request(n) for n in range(SESSIONS)]
        calm = await asyncio.gather(*(read(fleet, one) for one in asked))
        assert all(end.reason is FinishReason.LENGTH for _, _, end in calm)
        victims: list[str] = []
        places: dict[int, tuple[int, str]] = {}

        def place(number: int, count: int, node: Any) -> None:
            places[number] = (count, node)
            if count >= 20 and not victims:
                midway = Counter(at[1] for at in places.values() if at[0] < FAR_TOKENS and at[1])
                victim, hit = max(midway.items(), key=lambda each: each[1], default=("", 0))
                if hit >= HIT_MIN:
                    victims.append(victim)
                    hurt(nodes[victim])
                    outcome.update(hit=hit)

        results = await asyncio.gather(
            *(read(fleet, one, partial(place, number)) for number, one in enumerate(asked))
        )
        for (ids, logprobs, _), (before, logprobs_before, _) in zip(results, calm, strict=True):
            assert ids == before
            assert logprobs == logprobs_before
        if heal is not None:
            await heal(fleet, nodes[victims[0]])
        outcome.update(
            moves=sum(end.moves for _, _, end in results),
            faults=fleet.counters.faults,
            waiting=fleet.health().waiting,
        )

    with children(tmp_path, "a", "b") as (keys, nodes):
        asyncio.run(with_fleet(keys, nodes, lambda fleet: scenario(fleet, nodes)))
    return outcome


def test_a_killed_node_changes_no_token_and_no_logprob(tmp_path: Any) -> None:
    outcome = moved_equals_unbroken(tmp_path, lambda node: node.signal(signal.SIGKILL))
    assert outcome["moves"] >= outcome["hit"] >= HIT_MIN
    assert outcome["faults"] == 1
    assert outcome["waiting"] == 0


def test_a_frozen_node_changes_nothing_and_is_heard_no_more_when_it_wakes(tmp_path: Any) -> None:
    async def wake(fleet: Any, node: Any) -> None:
        node.signal(signal.SIGCONT)
        for _ in range(150):
            if all(state.is_up for state in fleet.health().nodes):
                break
            await asyncio.sleep(0.1)
        assert all(state.is_up for state in fleet.health().nodes)
        ids, _, _ = await read(fleet, request(99, 20))
        assert len(ids) == 20

    outcome = moved_equals_unbroken(tmp_path, lambda node: node.signal(signal.SIGSTOP), heal=wake)
    assert outcome["moves"] >= outcome["hit"] >= HIT_MIN


def test_a_drained_node_hands_over_and_is_not_blamed(tmp_path: Any) -> None:
    outcome = moved_equals_unbroken(tmp_path, lambda node: node.signal(signal.SIGTERM))
    assert outcome["faults"] == 0
