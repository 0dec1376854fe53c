"""A node of the tests' own over real loopback links: it tells the oracle's tokens and misbehaves on demand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from superfluid_core.clock import Clock, SystemClock
from superfluid_core.errors import ErrorCode
from superfluid_core.limits import FleetLimits, LinkLimits
from superfluid_core.link.keys import FleetKeys, write_key_file
from superfluid_core.link.link import Link, LinkClosedError
from superfluid_core.link.listen import Listener
from superfluid_core.session import Determinism, FinishReason, SamplingParams
from superfluid_core.wire.messages import (
    CancelSession,
    Closed,
    CloseReason,
    DrainOrder,
    Hello,
    ModelOffer,
    Open,
    Opened,
    ProgressReport,
    Refuse,
    Renew,
    Status,
    TokenRow,
    Tokens,
    Welcome,
)
from superfluid_head.fleet.events import EndEvent, GenerationRequest, TokensEvent
from superfluid_head.fleet.fleet import Fleet, FleetOptions, NodeAddress

MODEL = "m"
VOCABULARY = 1_000
EOS = 2


def oracle(seed: int, index: int) -> int:
    """The token that every node tells at `index`: never the end of text."""
    return 3 + (seed * 7_919 + index * 104_729) % (VOCABULARY - 3)


def tokens_of(request: GenerationRequest) -> list[int]:
    return [oracle(request.sampling.seed, index) for index in range(request.max_output)]


@dataclass
class FakeNode:
    """One node; `step_s` is the time between tokens, or `pause` says when each may come. Set the faults before or while it runs."""

    name: str
    keys: FleetKeys
    lanes: int = 4
    step_s: float = 0.005
    pause: Callable[[], Awaitable[object]] | None = None
    window: int = 4_096
    weights: str = "w1"
    refuse: ErrorCode | None = None
    refusals: int = 0
    skip_at: int | None = None
    crash_at: int | None = None
    is_mute: bool = False
    is_draining: bool = False
    models: tuple[str, ...] = (MODEL,)
    features: tuple[str, ...] = ()
    orders: list[int | None] = field(default_factory=list)
    boots: int = 0
    opens: list[Open] = field(default_factory=list)
    cancels: list[CancelSession] = field(default_factory=list)
    renews: int = 0
    port: int = 0
    running: dict[int, int] = field(default_factory=dict)
    queue: list[tuple[Link, Open]] = field(default_factory=list)
    peak: int = 0
    steps: int = 0
    _listener: Listener | None = None
    _group: asyncio.TaskGroup | None = None
    _serving: asyncio.Task[None] | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def address(self, label: str = "") -> NodeAddress:
        return NodeAddress("127.0.0.1", self.port, label)

    async def start(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self.boots += 1
        self.orders = []
        clock, limits = SystemClock(), LinkLimits()
        self._listener = Listener(
            self._handle, self._welcome, self.keys, self.name, limits, clock, self.status
        )
        bound = await self._listener.start("127.0.0.1", self.port)
        self.port = bound[0][1]
        self._serving = group.create_task(self._listener.serve())

    async def die(self) -> None:
        """The process is killed: every link breaks, nothing listens."""
        assert self._listener is not None
        for link in self._listener.links:
            link.abort("killed")
        for task in list(self._tasks):
            task.cancel()
        self.running.clear()
        self.queue.clear()
        await self._listener.close("killed")
        if self._serving is not None:
            await asyncio.wait({self._serving})
            self._serving = None

    async def cut(self) -> None:
        """Every link breaks; the process lives on."""
        assert self._listener is not None
        for link in self._listener.links:
            link.abort("cut")

    def status(self) -> Status:
        queued = len(self.queue)
        is_ordered = bool(self.orders) and self.orders[-1] is not None
        return Status(
            SystemClock().boot_ns(), self.steps, len(self.running), self.lanes, (0, 0, queued, 0),
            0, 0, 0, 1_000, 1_000.0, ((1, 100.0), (4, 300.0)), 10, self.is_draining or is_ordered,
        )  # fmt: skip

    def _welcome(self, _hello: Hello) -> Welcome:
        offers = tuple(
            ModelOffer(
                name, self.weights, "t1", "f32", "fake", VOCABULARY, (EOS,),
                self.window, self.lanes, 16, 1_000,
            )
            for name in self.models
        )  # fmt: skip
        stamp = SystemClock().boot_ns()
        return Welcome(
            0, self.features, self.name, f"{self.name}-{self.boots}", offers, stamp,
            Determinism.EXACT, 4 * self.lanes, 30_000, 120_000,
        )  # fmt: skip

    async def _handle(self, link: Link) -> None:
        teller = self._spawn(self._tell(link))
        try:
            async for message in link:
                if isinstance(message, Open):
                    self.opens.append(message)
                    self._open(link, message)
                elif isinstance(message, CancelSession):
                    self.cancels.append(message)
                    if self.running.get(message.session) == message.epoch:
                        del self.running[message.session]
                    self.queue = [q for q in self.queue if q[1].session != message.session]
                elif isinstance(message, DrainOrder):
                    self.orders.append(message.grace_ms)
                elif isinstance(message, Renew):
                    self.renews += 1
        finally:
            teller.cancel()

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        assert self._group is not None
        task = self._group.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _tell(self, link: Link) -> None:
        while link.is_open:
            if not self.is_mute:
                link.send(self.status())
            await asyncio.sleep(0.1)

    def _open(self, link: Link, message: Open) -> None:
        if self.refuse is not None and self.refusals > 0:
            self.refusals -= 1
            link.send(Refuse(self.refuse, "no", 50, message.session, message.epoch))
            return
        link.send(Opened(message.session, message.epoch, 0, len(self.queue)))
        self.queue.append((link, message))
        self._fill()

    def _fill(self) -> None:
        while self.queue and len(self.running) < self.lanes:
            link, message = self.queue.pop(0)
            self.running[message.session] = message.epoch
            self.peak = max(self.peak, len(self.running))
            self._spawn(self._generate(link, message))

    async def _generate(self, link: Link, message: Open) -> None:
        try:
            await self._speak(link, message)
        except LinkClosedError:
            self.running.pop(message.session, None)
        self._fill()

    async def _speak(self, link: Link, message: Open) -> None:
        total = len(message.prompt) + len(message.delivered)
        link.send(ProgressReport(message.session, message.epoch, total, total, 0))
        for index in range(len(message.delivered), message.max_output):
            await (asyncio.sleep(self.step_s) if self.pause is None else self.pause())
            self.steps += 1
            if self.is_mute or self.running.get(message.session) != message.epoch:
                continue
            if self.is_draining:
                link.send(Closed(message.session, message.epoch, CloseReason.DRAIN))
                break
            if index == self.crash_at:
                await self._crash()
                return
            first = index + 1 if index == self.skip_at else index
            is_last = index + 1 == message.max_output
            finish = FinishReason.LENGTH if is_last else None
            ids = (oracle(message.sampling.seed, index),)
            link.send(Tokens((TokenRow(message.session, message.epoch, first, ids, finish),)))
        if self.running.get(message.session) == message.epoch:
            del self.running[message.session]

    async def _crash(self) -> None:
        """Die of this token, from a task of the group's own, and come back a moment later."""
        assert self._group is not None

        async def rise(group: asyncio.TaskGroup) -> None:
            await self.die()
            await asyncio.sleep(0.1)
            await self.start(group)

        self._group.create_task(rise(self._group))


@dataclass
class Kit:
    """What fleet tests are made of."""

    keys: FleetKeys
    tokens_of = staticmethod(tokens_of)

    def node(self, name: str, **settings: Any) -> FakeNode:
        return FakeNode(name, self.keys, **settings)

    def request(self, number: int = 1, length: int = 30, **settings: Any) -> GenerationRequest:
        return GenerationRequest(
            f"req-{number}", MODEL, (1, 5, number % 900), SamplingParams(seed=number), length, **settings
        )  # fmt: skip

    @asynccontextmanager
    async def fleet(
        self,
        *nodes: FakeNode,
        link_limits: LinkLimits | None = None,
        fleet_limits: FleetLimits | None = None,
        clock: Clock | None = None,
        **options: Any,
    ) -> AsyncIterator[Fleet]:
        """Start the nodes and a fleet over them; everything ends with the context."""
        async with asyncio.TaskGroup() as group:
            for node in nodes:
                await node.start(group)
            fleet = Fleet(
                FleetOptions(
                    tuple(node.address(node.name) for node in nodes),
                    "head-1",
                    self.keys,
                    link_limits=link_limits or LinkLimits(),
                    fleet_limits=fleet_limits or FleetLimits(),
                    **options,
                ),
                clock or SystemClock(),
                random.Random(5),
            )
            running = group.create_task(fleet.run())
            try:
                assert await fleet.wait_ready(10.0)
                yield fleet
            finally:
                running.cancel()
                await asyncio.wait({running})
                for node in nodes:
                    await node.die()


@dataclass
class Told:
    """What a reader got."""

    ids: list[int] = field(default_factory=list)
    end: EndEvent | None = None
    others: list[object] = field(default_factory=list)


async def read(
    fleet: Fleet, request: GenerationRequest, on_tokens: Callable[[int], object] | None = None
) -> Told:
    """Read a generation to its end, checking that indices fit."""
    told = Told()
    async with fleet.generate(request) as generation:
        async for event in generation:
            assert told.end is None
            if isinstance(event, TokensEvent):
                assert event.first == len(told.ids)
                told.ids.extend(event.ids)
                if on_tokens is not None:
                    result = on_tokens(len(told.ids))
                    if asyncio.iscoroutine(result):
                        await result
            elif isinstance(event, EndEvent):
                told.end = event
            else:
                told.others.append(event)
    return told


@pytest.fixture(scope="session")
def keys(tmp_path_factory: Any) -> FleetKeys:
    return write_key_file(Path(tmp_path_factory.mktemp("keys")) / "fleet.key")


@pytest.fixture
def kit(keys: Any) -> Kit:
    return Kit(keys)


@pytest.fixture
def reader() -> Any:
    return read
