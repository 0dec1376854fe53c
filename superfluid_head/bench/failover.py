"""`superfluid bench failover`: kill the node that serves, at a random token, many times, and compare with the unbroken answer.

Owns small fleets of its own (a head and two nodes each) and renews them every few kills, so that no node's circuit is open when it
is needed: what is measured is a first fault, not the protection against repeated ones. A gap is the longest
time between two pieces of text from the kill on; the median of the unbroken answer stands beside it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from superfluid_core.clock import SystemClock
from superfluid_head.bench.load import Answer, OnChunk, chat, chat_body, http_client
from superfluid_head.bench.prose import Draws, prose
from superfluid_head.bench.report import json_line, median, percentile, table
from superfluid_head.bench.rig import Child, Rig, RigError, hostport

Say = Callable[[str], None]
KILLS_PER_FLEET = 2
LINK_SECONDS = 30.0
MOCK_FLAGS = ("--engine", "mock", "--mock-rates", "prefill=4000,decode=100", "--mock-eos", "0")


@dataclass(frozen=True, slots=True)
class FailoverBench:
    """`engine` is mock or native; `model` is served by every node; one answer has `max_tokens` tokens."""

    engine: str
    runs: int
    max_tokens: int
    seed: int
    model: str = "demo"
    nodes: int = 2
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class Run:
    """One kill. `differs_at` is the first differing character, None when the texts are equal."""

    number: int
    node: str
    killed_at: int
    unbroken: Answer
    moved: Answer
    gap_ms: float

    @property
    def differs_at(self) -> int | None:
        a, b = self.unbroken.text, self.moved.text
        if a == b:
            return None
        return next(
            (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )

    @property
    def is_complete(self) -> bool:
        return self.moved.is_complete and len(self.moved.at_ms) > self.killed_at

    @property
    def is_usage_equal(self) -> bool:
        return self.moved.completion_tokens == self.unbroken.completion_tokens


class SmallFleet:
    """A head and its nodes in a rig, whose nodes can be killed and brought back at the same address."""

    def __init__(self, rig: Rig, flags: tuple[str, ...], model: str, nodes: int = 2) -> None:
        self.rig, self.flags, self.model = rig, flags, model
        self.key: Path = rig.make_key()
        started = [rig.start_node(f"node-{n}", *flags, key=self.key) for n in range(nodes)]
        rig.wait_ready(*started)
        self.addresses = {child.name: child.listen for child in started}
        self.head: Child = rig.start_head(model, nodes=list(self.addresses.values()), key=self.key)
        rig.wait_ready(self.head)
        self.wait_linked()
        self.served = self.served_name()

    @property
    def url(self) -> str:
        return self.head.url

    def served_name(self) -> str:
        listed = httpx.get(f"{self.url}/v1/models", timeout=10, trust_env=False).json()
        return str(listed["data"][0]["id"])

    def wait_linked(self) -> None:
        wait_linked(self.rig, self.head, len(self.addresses))

    def serving(self) -> Child:
        """Find the node that has a session in a lane, by its own metrics. Raises RigError when none has."""
        for name in self.addresses:
            child = self.rig.named(name)
            if child.is_running and busy_lanes(child) > 0:
                return child
        raise RigError("no node is serving")

    def restart(self, name: str) -> None:
        """Bring a killed node back where it was."""
        child = self.rig.start_node(name, *self.flags, key=self.key, listen=self.addresses[name])
        self.rig.wait_ready(child)
        self.wait_linked()


def metric(url: str, name: str) -> list[float]:
    """Read the values of one metric from a Prometheus page, over all its labels; empty when nobody answers."""
    try:
        text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
    except httpx.HTTPError:
        return []
    lines = (line for line in text.splitlines() if line.startswith((name + "{", name + " ")))
    return [float(line.rsplit(" ", 1)[1]) for line in lines]


def wait_linked(rig: Rig, head: Child, count: int) -> None:
    """Wait until the head has a usable link with `count` nodes, by its own metrics. Raises RigError."""
    deadline_ms = rig.now_ms() + LINK_SECONDS * 1000
    while sum(metric(head.url, "superfluid_head_node_up")) < count:
        if rig.now_ms() > deadline_ms:
            raise RigError(f"the head does not reach {count} node(s):\n{head.log_end()}")
        rig.sleep(0.05)


def busy_lanes(node: Child) -> float:
    """How many lanes of a node hold a session."""
    url = "http://" + hostport(node.ready["metrics"])
    states = ("prefilling", "decoding")
    return sum(sum(metric(url, f'superfluid_lanes{{state="{state}"}}')) for state in states)


def killer(fleet: SmallFleet, at_chunk: int) -> tuple[OnChunk, list[float]]:
    """Give a callback that SIGKILLs the serving node at the `at_chunk`-th piece, and the time when it did.

    Who serves is asked at the first piece, so that the asking does not stretch the gap.
    """
    killed_ms: list[float] = []

    def on_chunk(answer: Answer) -> None:
        if answer.node is None:
            answer.node = fleet.serving().name
        if not killed_ms and len(answer.at_ms) >= at_chunk:
            fleet.rig.named(answer.node).signal(signal.SIGKILL)
            killed_ms.append(fleet.rig.now_ms())

    return on_chunk, killed_ms


def one_run(fleet: SmallFleet, number: int, draws: Draws, max_tokens: int, **members: Any) -> Run:
    """Take an unbroken answer, then the same one with the serving node killed at a random token; the node comes back."""
    body = chat_body(
        fleet.served, "Tell a story. " + prose(number, 30), max_tokens, ignore_eos=True, **members
    )
    at_chunk = 2 + draws.below(max(1, max_tokens * 3 // 4))
    clock = SystemClock()

    async def both() -> tuple[Answer, Answer]:
        async with http_client() as client:
            unbroken = await chat(client, fleet.url, body, clock)
            return unbroken, await chat(client, fleet.url, body, clock, on_chunk)

    on_chunk, killed_ms = killer(fleet, at_chunk)
    unbroken, moved = asyncio.run(both())
    if not killed_ms or moved.node is None:
        raise RigError(f"no node was killed: {moved.error or 'the answer was too short'}")
    fleet.rig.named(moved.node).process.wait(timeout=10)
    times = [t for t in moved.at_ms if t >= moved.at_ms[at_chunk - 1]]
    gap_ms = max((b - a for a, b in pairwise(times)), default=0.0)
    return Run(number, moved.node, at_chunk, unbroken, moved, gap_ms)


@contextmanager
def fleets(bench: FailoverBench) -> Iterator[Callable[[], SmallFleet]]:
    """Give the function that returns a fleet with fresh circuits; ends the last one."""
    flags = MOCK_FLAGS if bench.engine == "mock" else native_flags(bench.nodes, bench.dtype)
    rigs: list[Rig] = []

    def renew() -> SmallFleet:
        while rigs:
            rigs.pop().close()
        rigs.append(Rig())
        return SmallFleet(rigs[0], (*flags, "--model", bench.model), bench.model, bench.nodes)

    try:
        yield renew
    finally:
        while rigs:
            rigs.pop().close()


def native_flags(nodes: int, dtype: str = "auto") -> tuple[str, ...]:
    """Choose the real engine, the machine's cores shared fairly by the nodes on it."""
    threads = max(1, (os.cpu_count() or 1) // nodes)
    return ("--engine", "native", "--threads", str(threads), "--dtype", dtype)


def run_failover(bench: FailoverBench, say: Say) -> list[Run]:
    """Run all kills, saying a JSON line for each. Raises RigError when a fleet does not come up."""
    draws = Draws(bench.seed)
    runs: list[Run] = []
    with fleets(bench) as renew:
        fleet: SmallFleet | None = None
        for number in range(bench.runs):
            if fleet is None or number % KILLS_PER_FLEET == 0:
                fleet = renew()
            run = one_run(fleet, number, draws, bench.max_tokens)
            runs.append(run)
            say(json_line({"bench": "failover", "engine": bench.engine, **fields(run)}))
            if (number + 1) % KILLS_PER_FLEET and number + 1 < bench.runs:
                fleet.restart(run.node)
    return runs


def fields(run: Run) -> dict[str, object]:
    return {
        "run": run.number,
        "node": run.node,
        "killed_at": run.killed_at,
        "complete": run.is_complete,
        "equal": run.differs_at is None,
        "differs_at": run.differs_at,
        "usage_equal": run.is_usage_equal,
        "gap_ms": round(run.gap_ms, 1),
        "median_ms": round(median(run.unbroken.gaps_ms()), 2),
        "error": run.moved.error or run.unbroken.error,
    }


def summary(bench: FailoverBench, runs: list[Run]) -> str:
    """Draw the table under the lines."""
    gaps = [run.gap_ms for run in runs if run.is_complete]
    row = [
        bench.engine,
        len(runs),
        sum(run.is_complete for run in runs),
        sum(run.differs_at is None for run in runs),
        sum(run.is_usage_equal for run in runs),
        percentile(gaps, 50),
        percentile(gaps, 99),
        median([gap for run in runs for gap in run.unbroken.gaps_ms()]),
    ]
    headers = ["engine", "kills", "complete", "equal", "usage equal"]
    return table([*headers, "gap ms p50", "gap ms p99", "normal ms"], [row])
