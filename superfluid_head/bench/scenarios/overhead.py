"""`overhead`: what a streamed token and a request cost the process between client and node, beside servers that do less.

32 streams, a chunk a token, CPU of that process alone. Two lengths of answer tell the cost of a token from that of a request. In
the same round the same streams come from a bare ASGI application (`bare_app.py`), and, where `--peer-venv` names an environment
that has them, through other routers in front of it. Then one stream at a time, for what the head adds to the time to the first
token, and a thousand at once.

The time to the first token ends with the first chunk that has text; one with a role alone does not count. Every token of the
simulated engine and of the bare application is text by itself and has a chunk of its own (the bar on `head_chunks` holds the head to
it), so for all sides that chunk is the first token's. The node alone is timed from OPEN to its first row of TOKENS.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superfluid_core.clock import SystemClock
from superfluid_head.bench.bare_app import MODEL
from superfluid_head.bench.direct import first_tokens_ms
from superfluid_head.bench.loops import run
from superfluid_head.bench.peers import start_peers
from superfluid_head.bench.prose import prose
from superfluid_head.bench.report import percentile
from superfluid_head.bench.rig import Child, Rig, RigError
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario
from superfluid_head.bench.scenarios.stage import Stage, engine_flags, own_fleet
from superfluid_head.bench.small_fleet import Shape
from superfluid_head.bench.spent import cpu_ns, rss_bytes, tree_cpu_ns
from superfluid_head.bench.streams import Outcome, request_of, stream, stream_all

NODES = 2
STREAMS = 32
LONG, SHORT = 200, 20
PACE = 50
CROWD, CROWD_TOKENS, CROWD_PACE = 1_000, 40, 2
SINGLES = 40
PROMPT_TOKENS = 40
WORDS = 12
MIB = 1 << 20
MS_PER_NS = 1e-6
US_PER_NS = 1e-3


@dataclass(frozen=True, slots=True)
class Side:
    """One of those that are measured."""

    name: str
    url: str
    model: str
    pid: int
    spent_ns: Callable[[int], int] = cpu_ns

    def cpu_ns(self) -> int:
        return self.spent_ns(self.pid)


class Overhead(Scenario):
    """The scenario."""

    name = "overhead"
    about = "CPU of the head per streamed token and per request, added TTFT, 1,000 streams"
    needs_rig = "it reads the CPU time of the processes"
    engine = "mock"
    bars = (
        Bar("head_us_per_token", most=20.0),
        Bar("head_ms_per_request", most=4.0),
        Bar("added_ttft_ms_p50", most=2.0),
        Bar("head_chunks", least=0.95 * LONG),
        Bar("failed", most=0, of_every=True),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.streams = plan.streams or STREAMS
        self.crowd = self.size(CROWD, 100)
        self.waves = self.size(2, 1)
        self.clock = SystemClock()
        self._asked = 0

    def setup(self, stack: ExitStack) -> None:
        lanes = -(-self.streams // NODES)
        flags = self._flags(lanes, PACE)
        shape = Shape(("--max-queue", "4096", "--log-level", "warning"))
        self.stage = own_fleet(stack, self.plan, flags, NODES, shape)
        crowded = self._flags(-(-self.crowd // NODES), CROWD_PACE)
        self.hall = own_fleet(stack, self.plan, crowded, NODES, shape)
        rig = stack.enter_context(Rig())
        command = [sys.executable, "-m", "superfluid_head.bench.bare_app", "--pace", str(PACE)]
        bare = rig.spawn("bare", command)
        rig.wait_ready(bare)
        self.bare = Side("bare", bare.url, MODEL, bare.pid)
        self.sides = [self._head_side(), self.bare]
        for name, child, url in self._peers(rig, bare.url):
            self.sides.append(Side(name, url, MODEL, child.pid, tree_cpu_ns))
        self.notes.append("measured: " + ", ".join(side.name for side in self.sides))

    def _flags(self, lanes: int, pace: int) -> tuple[str, ...]:
        more = ("--max-batch", str(lanes), "--log-level", "warning")
        return engine_flags(
            self.plan, self.engine_in_use, NODES, *more, rates=f"prefill=0,decode={pace}"
        )

    def _head_side(self) -> Side:
        assert self.stage.head is not None, "a fleet of our own has a head"
        return Side("head", self.stage.url, self.stage.model, self.stage.head.pid)

    def _peers(self, rig: Rig, backend: str) -> list[tuple[str, Child, str]]:
        venv = self.plan.peer_venv
        return [] if venv is None else start_peers(rig, Path(venv), backend, MODEL)

    def round(self, number: int) -> Figures:
        figures: Figures = {"failed": 0.0}
        for side in self.sides:
            figures |= run(self._costs(side, figures))
        figures |= run(self._added(figures))
        if number:
            figures |= run(self._crowd(figures))
        return figures

    async def _costs(self, side: Side, figures: Figures) -> Figures:
        """Tell tokens from requests: two lengths, two unknowns."""
        long_ns, long_chunks = await self._spent(side, LONG, self.waves, figures)
        short_ns, _ = await self._spent(side, SHORT, 2 * self.waves, figures)
        per_token = (long_ns - short_ns) / (LONG - SHORT)
        per_request = short_ns - SHORT * per_token
        return {
            f"{side.name}_us_per_token": per_token * US_PER_NS,
            f"{side.name}_ms_per_request": per_request * MS_PER_NS,
            f"{side.name}_chunks": long_chunks,
        }

    async def _spent(
        self, side: Side, tokens: int, waves: int, figures: Figures
    ) -> tuple[float, float]:
        """Return the CPU of a request of so many tokens, in ns, and how many chunks it had."""
        chunks = 0
        before = side.cpu_ns()
        for _ in range(waves):
            outcomes = await stream_all(
                side.url, self._requests(side, tokens, self.streams), self.clock
            )
            chunks += sum(outcome.chunks for outcome in outcomes)
            self._judge(outcomes, side.name, figures)
        count = waves * self.streams
        return (side.cpu_ns() - before) / count, chunks / count

    def _requests(self, side: Side, tokens: int, count: int) -> list[bytes]:
        return [self._request(side.url, side.model, tokens) for _ in range(count)]

    def _request(self, url: str, model: str, tokens: int) -> bytes:
        self._asked += 1
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": prose(self._asked, WORDS)}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
        }
        return request_of(url, body, self.plan.api_key)

    def _judge(self, outcomes: list[Outcome], name: str, figures: Figures) -> None:
        broken = [outcome.error for outcome in outcomes if not outcome.is_whole]
        figures["failed"] += len(broken)
        if broken and len(self.notes) < 8:
            self.notes.append(f"{name}: {broken[0]}")

    async def _added(self, figures: Figures) -> Figures:
        """One stream at a time: the head's time to the first token, less that of its node."""
        stage = self.stage
        assert stage.fleet is not None, "a fleet of our own"
        firsts = await self._firsts(self.sides[0], figures)
        bare = await self._firsts(self.bare, figures)
        listen = next(iter(stage.fleet.addresses.values()))
        prompt = tuple(range(1_000, 1_000 + PROMPT_TOKENS))
        direct = await first_tokens_ms(listen, stage.fleet.key, prompt, SINGLES, self.clock)
        p50 = percentile(firsts, 50)
        return {
            "head_ttft_ms_p50": p50,
            "node_ttft_ms_p50": percentile(direct, 50),
            "bare_ttft_ms_p50": percentile(bare, 50),
            "added_ttft_ms_p50": p50 - percentile(direct, 50),
            "added_ttft_ms_p99": percentile(firsts, 99) - percentile(direct, 50),
        }

    async def _firsts(self, side: Side, figures: Figures) -> list[float]:
        found: list[float] = []
        for _ in range(SINGLES):
            outcome = await stream(side.url, self._request(side.url, side.model, 4), self.clock)
            self._judge([outcome], side.name, figures)
            found.append(math.nan if outcome.first_ms is None else outcome.first_ms)
            await asyncio.sleep(0.02)
        return found

    async def _crowd(self, figures: Figures) -> Figures:
        """Ask for a thousand streams at once: all whole, and what they take."""
        hall: Stage = self.hall
        if hall.head is None:
            raise RigError("a fleet of our own has a head")
        pid = hall.head.pid
        requests = [self._request(hall.url, hall.model, CROWD_TOKENS) for _ in range(self.crowd)]
        before = rss_bytes(pid)
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(stream_all(hall.url, requests, self.clock))
            peak = group.create_task(_peak_rss(pid, asked))
        self._judge(asked.result(), "crowd", figures)
        return {
            "crowd": self.crowd,
            "crowd_rss_mib": peak.result() / MIB,
            "crowd_grew_mib": (peak.result() - before) / MIB,
        }


async def _peak_rss(pid: int, until: asyncio.Task[Any]) -> int:
    peak = 0
    while not until.done():
        peak = max(peak, rss_bytes(pid))
        await asyncio.sleep(0.25)
    return peak


SCENARIO = Overhead
