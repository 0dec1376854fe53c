"""The clients of a chaos run, and what is written down while they read: streaming chats in a closed loop, the head's events.

Owns the tasks of the run and its history. Every request has a prompt and a seed of its own, so that the oracle knows its
answer; nothing is judged here. `running` ends by itself: clients finish the answer that they read, within a bound.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from superfluid_core.clock import MS, SystemClock
from superfluid_head.bench.load import Answer, chat, chat_body, http_client
from superfluid_head.bench.prose import Draws, prose
from superfluid_head.bench.rig import RigError
from tests.chaos.history import TICK_MS, Entry, Event, Fault, History
from tests.chaos.site import Site

FINISH_SECONDS = 60.0
WORDS = 12
POLL_SECONDS = 0.02
RETRY_SECONDS = 0.5
LAG_MS_MIN = 10.0


def end_on_sigterm() -> None:
    """Let SIGTERM cancel the current task, so that every process of the run is ended with it."""
    task = asyncio.current_task()
    assert task is not None, "called by a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


async def until(condition: Callable[[], bool], seconds: float = FINISH_SECONDS) -> None:
    """Look again and again, for so long at most."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 # what is waited for sets no event
            await asyncio.sleep(POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class Load:
    """How many clients there are and how much each asks for."""

    clients: int = 16
    tokens: int = 36
    words: int = WORDS
    seed: int = 1


@dataclass(slots=True)
class Run:
    """A load that runs, and its history."""

    site: Site
    load: Load
    client: httpx.AsyncClient
    history: History = field(default_factory=History)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    flying: dict[int, tuple[asyncio.Event, Answer | None]] = field(default_factory=dict)
    asked: int = 0
    flights: int = 0
    is_listening: asyncio.Event = field(default_factory=asyncio.Event)
    _clock: SystemClock = field(default_factory=SystemClock)

    def now_ms(self) -> float:
        return self._clock.now_ns() / MS

    # --- requests -----------------------------------------------------------------------------

    def body(self, **members: Any) -> dict[str, Any]:
        """A request that no other is like; every third one is greedy."""
        self.asked += 1
        number = self.load.seed * 1_000_003 + self.asked
        heat = 0.9 if number % 3 else 0
        wanted = {"temperature": heat, "seed": number, "ignore_eos": True, **members}
        tokens = wanted.pop("max_completion_tokens", self.load.tokens)
        return chat_body(self.site.served, prose(number, self.load.words), tokens, **wanted)

    async def one(self, body: dict[str, Any] | None = None, *, may_fail: bool = False) -> Answer:
        """Ask once and write it down."""
        asked = self.body() if body is None else body
        self.flights += 1
        number, ended = self.flights, asyncio.Event()
        self.flying[number] = (ended, None)

        def seen(answer: Answer) -> None:
            self.flying[number] = (ended, answer)

        try:
            answer = await chat(self.client, self.site.url, asked, self._clock, seen)
        finally:
            ended.set()
            del self.flying[number]
        self.history.entries.append(Entry(asked, answer, may_fail))
        return answer

    async def loop(self) -> None:
        """Ask again and again. One that is refused comes back a little later, as clients do."""
        while not self.stopping.is_set():
            answer = await self.one()
            if not answer.is_complete:
                await asyncio.sleep(RETRY_SECONDS)

    async def until_streaming(self, count: int) -> None:
        """Wait until so many answers are in the middle of their text."""
        await until(lambda: sum(one is not None for _, one in self.flying.values()) >= count)

    async def outlive(self) -> None:
        """Wait until every answer that is being read now has ended: the next fault meets other ones."""
        async with asyncio.timeout(FINISH_SECONDS):
            for ended, _ in list(self.flying.values()):
                await ended.wait()

    # --- faults -------------------------------------------------------------------------------

    def fault(self, kind: str, node: str = "") -> float:
        at_ms = self.now_ms()
        self.history.faults.append(Fault(at_ms, kind, node))
        return at_ms

    async def fleet(self) -> list[dict[str, Any]]:
        reply = await self.client.get(self.site.url + "/v1/fleet", timeout=10)
        nodes: list[dict[str, Any]] = reply.json()["nodes"]
        return nodes

    async def victim(self, draws: Draws, avoid: tuple[str, ...] = ()) -> str:
        """Draw a node that serves sessions while another one is up, rested and not to be avoided."""
        async with asyncio.timeout(FINISH_SECONDS):
            while True:
                nodes = [n for n in await self.fleet() if n["is_up"] and n["name"] not in avoid]
                rested = {n["name"] for n in nodes if n["circuit"] == "closed"}
                busy: list[str] = sorted(n["name"] for n in nodes if n["sessions"] > 0)
                found = [name for name in busy if rested - {name}]
                if found:
                    return found[draws.below(len(found))]
                await asyncio.sleep(POLL_SECONDS)

    async def until_up(self, count: int) -> None:
        """Wait until the head has so many usable nodes."""
        await self.until_nodes(lambda nodes: sum(node["is_up"] for node in nodes) >= count)

    async def until_nodes(self, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Wait until the head's nodes, as it shows them, are as wished."""
        async with asyncio.timeout(FINISH_SECONDS):
            while not condition(await self.fleet()):  # noqa: ASYNC110 # it sets no event
                await asyncio.sleep(POLL_SECONDS)

    async def until_node(self, name: str, condition: Callable[[dict[str, Any]], bool]) -> None:
        await self.until_nodes(lambda nodes: any(n["name"] == name and condition(n) for n in nodes))

    async def watch_lag(self) -> None:
        """Write down when this process itself was late: what it measures then is its own doing."""
        while True:
            began_ms = self.now_ms()
            await asyncio.sleep(TICK_MS / 1000)
            late_ms = self.now_ms() - began_ms - TICK_MS
            if late_ms > LAG_MS_MIN:
                self.history.late_ms.append((self.now_ms(), late_ms))

    # --- what the head tells --------------------------------------------------------------------

    async def listen(self) -> None:
        """Write down the head's events as they come, until the head ends the stream."""
        try:
            async with self.client.stream("GET", self.site.url + "/v1/fleet/events") as reply:
                self.is_listening.set()
                async for line in reply.aiter_lines():
                    if line.startswith("data:"):
                        self._note(json.loads(line[5:]))
        except httpx.HTTPError:
            self.is_listening.set()

    def _note(self, told: dict[str, Any]) -> None:
        if told.get("kind") == "missed":
            raise RigError("the recorder did not keep up with the head's events")
        if "kind" in told:
            self.history.events.append(Event(self.now_ms(), told["kind"], told))


@asynccontextmanager
async def running(site: Site, load: Load) -> AsyncIterator[Run]:
    """Keep `load` on `site` while the body runs; then let every answer end."""
    async with http_client(load.clients + 256) as client, asyncio.TaskGroup() as group:
        run = Run(site, load, client)
        listener = group.create_task(run.listen())
        lag = group.create_task(run.watch_lag())
        await run.is_listening.wait()
        clients = [group.create_task(run.loop()) for _ in range(load.clients)]
        try:
            yield run
        finally:
            run.stopping.set()
            if clients:
                _, late = await asyncio.wait(clients, timeout=FINISH_SECONDS)
                for task in late:
                    task.cancel()
                    run.history.entries.append(Entry(run.body(), _hung(run.now_ms())))
            await asyncio.sleep(POLL_SECONDS)
            listener.cancel()
            lag.cancel()


def _hung(now_ms: float) -> Answer:
    """Stand for an answer that never ended."""
    return Answer(now_ms, now_ms, error=f"did not end within {FINISH_SECONDS:.0f} s")
