"""A head as a virtual process: the real `Fleet`, and clients that read from it, each in its own way.

A client judges what it is told as it comes: indexes without gaps, ids as the oracle says, one end and nothing after it, a reason
that exists. Clients live in the head's process, as HTTP handlers do: they freeze and die with it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NoReturn

from superfluid_core.errors import ErrorCode, SuperfluidError
from superfluid_core.session import FinishReason, QosClass, SamplingParams
from superfluid_head.fleet.events import (
    EndEvent,
    GenerationRequest,
    MovedEvent,
    TokensEvent,
)
from superfluid_head.fleet.fleet import Fleet, FleetOptions, NodeAddress
from superfluid_head.fleet.node import FleetNode
from superfluid_head.fleet.stream import Generation
from superfluid_noded.config import JOIN_PORT
from tests.sim.engine import POISON
from tests.sim.network import Network, Port
from tests.sim.node import MODEL, PORT, SimNode
from tests.sim.oracle import EOS, Expected, expect
from tests.sim.world import MS, Process, World

REASONS = frozenset(
    {
        ErrorCode.QUEUE_FULL, ErrorCode.OVERLOADED, ErrorCode.NO_WORKER, ErrorCode.MOVES_EXHAUSTED,
        ErrorCode.REQUEST_QUARANTINED, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.TIMEOUT,
        ErrorCode.SLO_UNATTAINABLE, ErrorCode.DRAINING,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client reads. `stop_at` plays a stop string, `leaves_at` a client that goes away."""

    is_slow: bool = False
    stop_at: int | None = None
    leaves_at: int | None = None


@dataclass(slots=True, eq=False)
class Client:
    """One request and what came of it. `end` is a finish reason, an error code, "left" or "lost with its head"."""

    number: int
    request: GenerationRequest
    manner: Manner
    begun_ns: int
    broken: Callable[[str], NoReturn]
    ids: list[int] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    expected: list[Expected] = field(default_factory=list)
    end: str = ""
    told: ErrorCode | None = None
    moves: int = 0
    drains: int = 0
    last_ns: int = 0
    gap_ns: int = 0

    def fail(self, text: str) -> NoReturn:
        self.broken(f"client {self.number}: {text}")

    def take(self, event: TokensEvent, now_ns: int) -> None:
        if self.end:
            self.fail("tokens after the end")
        if event.first != len(self.ids):
            self.fail(f"tokens from {event.first}, {len(self.ids)} were delivered")
        if self.request.sampling.logprobs is not None:
            if len(event.logprobs) != len(event.ids):
                self.fail("tokens without their log-probabilities")
            if any(p.top[0][0] != i for p, i in zip(event.logprobs, event.ids, strict=True)):
                self.fail("log-probabilities of other tokens")
        if self.ids:
            self.gap_ns = max(self.gap_ns, now_ns - self.last_ns)
        self.last_ns = now_ns
        self.ids.extend(event.ids)
        self.judge_ids(event.first)

    def judge_ids(self, first: int) -> None:
        """Hold what is new, from `first` on, against what engines of each possible seed would have said."""
        if not self.expected:
            self.expected = [expect(self.request, seed) for seed in self.seeds]
        new = tuple(self.ids[first:])
        fitting = [each for each in self.expected if each.ids[first : len(self.ids)] == new]
        if not fitting:
            self.fail(f"ids from {first} are not what an unbroken run has: {self.ids[-8:]}")
        self.expected = fitting

    def finish(self, event: EndEvent, counted: int, cached: int) -> None:
        if self.end:
            self.fail("a second end")
        self.end = event.reason.value
        if event.cached != cached or event.cached > len(self.request.prompt):
            self.fail(f"usage says {event.cached} cached tokens, the first node {cached}")
        stop_at = self.manner.stop_at
        if stop_at is not None and event.reason is FinishReason.STOP and stop_at == len(self.ids):
            return
        if counted != len(self.ids):
            self.fail(f"the journal has {counted} tokens, {len(self.ids)} were delivered")
        wanted = self.expected[0] if self.expected else expect(self.request, self.seeds[0])
        found = (tuple(self.ids), event.reason, event.stop_id)
        if found != (wanted.ids, wanted.reason, wanted.stop_id):
            self.fail(
                f"ended with {event.reason} ({event.stop_id}) after {len(self.ids)} of "
                f"{len(wanted.ids)} tokens ({wanted.reason}, {wanted.stop_id})"
            )


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients of a head ask for."""

    gap_s: float
    prompt_max: int
    output_max: int
    poison_pct: int
    slow_pct: int
    leave_pct: int


def draw_ids(drawn: random.Random, count: int) -> list[int]:
    """Draw ids below 600: what `randrange` gives, without its five calls for each."""
    ids: list[int] = []
    while len(ids) < count:
        number = drawn.getrandbits(10)
        if number < 600:
            ids.append(number)
    return ids


def draw_client(
    number: int, load: Load, drawn: random.Random, world: World, process: Process
) -> Client:
    """Make up one request and the manner of its client."""
    length = drawn.randrange(2, load.prompt_max) if drawn.random() < 0.9 else load.prompt_max
    prompt = draw_ids(drawn, length)
    shared = drawn.random() < 0.3
    if shared:
        prompt = [7] * (length // 2) + prompt[length // 2 :]
    if drawn.randrange(100) < load.poison_pct:
        prompt[0] = POISON
    output = max(1, int(load.output_max * drawn.random() ** 2))
    minimum = drawn.choice((0, 0, 0, output // 2))
    stops = tuple(drawn.sample(range(EOS), 8)) if drawn.random() < 0.2 else ()
    request = GenerationRequest(
        f"r{number}",
        MODEL,
        tuple(prompt),
        SamplingParams(
            temperature=1.0,
            seed=drawn.getrandbits(64),
            logprobs=2 if drawn.random() < 0.1 else None,
        ),
        output,
        minimum,
        stops,
        drawn.random() < 0.3,
        drawn.choice((0, 0, 0, 1, 2)),
        drawn.choice(list(QosClass)),
        f"t{drawn.randrange(4)}",
    )
    if drawn.random() < 0.03:
        request = replace(request, deadline_ns=process.now_ns() + drawn.randrange(1, 60_000) * MS)
    manner = Manner(
        is_slow=drawn.randrange(100) < load.slow_pct,
        stop_at=drawn.randrange(1, output + 1) if drawn.random() < 0.1 else None,
        leaves_at=drawn.randrange(0, output + 1) if drawn.randrange(100) < load.leave_pct else None,
    )
    return Client(number, request, manner, world.now_ns, world.broken)


class SimHead:
    """One head of the fleet. Its process can die and come back; `clients` are all that it ever had."""

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        host: str,
        nodes: list[SimNode],
        drawn: random.Random,
    ) -> None:
        self.world = world
        self.network = network
        self.name = name
        self.host = host
        self.nodes = nodes
        self.drawn = drawn
        self.drift_ppm = 0
        self.process: Process | None = None
        self.fleet: Fleet | None = None
        self.clients: list[Client] = []
        self.open: dict[int, Client] = {}
        self.options: dict[str, object] = {}
        self.load: Load | None = None
        self.engine_seeds: list[int] = [0]
        self.counts: dict[str, int] = {}
        self.cached_of: Callable[[Generation], int] = lambda _generation: 0
        self.is_asked_to_rest = False
        self._spawned: list[Client] = []
        self._knock: asyncio.Event | None = None

    @property
    def is_up(self) -> bool:
        return self.process is not None and not self.process.is_dead

    @property
    def conns(self) -> int:
        """How many links it keeps to each node."""
        conns = self.options.get("conns", 1)
        assert isinstance(conns, int)
        return conns

    def book(self, node: SimNode) -> FleetNode | None:
        """What it knows of a node; nothing before one that dials has joined."""
        return None if self.fleet is None else self.fleet._nodes.get(node.key)

    def start(self) -> None:
        self.network.dark.pop(self.host, None)
        process = Process(
            self.world, self.name, drift_ppm=self.drift_ppm, net=Port(self.network, self.host)
        )
        self.process = process
        process.start(self._main(process))

    def crash(self, *, power: bool = False) -> None:
        if self.process is not None and not self.process.is_dead:
            if power:
                self.network.dark[self.host] = None
            self.network.kill(self.process, power=power)
            for client in self.open.values():
                client.end = "lost with its head"
            self.open.clear()
            self._spawned.clear()
            self.fleet = None

    async def _main(self, process: Process) -> None:
        addresses = tuple(
            NodeAddress(node.host, PORT, node.identity)
            for node in self.nodes
            if not node.is_joining
        )
        listen = () if addresses else ((self.host, JOIN_PORT),)
        options = FleetOptions(addresses, self.name, None, listen=listen, **self.options)  # type: ignore[arg-type]
        seeded = random.Random(self.drawn.getrandbits(64))
        fleet = self.fleet = Fleet(options, process, seeded)
        self._knock = asyncio.Event()
        await fleet.listen()
        async with asyncio.TaskGroup() as group:
            group.create_task(fleet.run())
            group.create_task(self._spawn(fleet, group))
            await fleet.wait_ready(60.0)
            while True:
                load = self.load
                if load is None or self.is_asked_to_rest:
                    await asyncio.sleep(1.0)
                    continue
                await asyncio.sleep(min(30.0, self.drawn.expovariate(1 / load.gap_s)))
                burst = self.drawn.choice((1, 1, 1, 1, 1, 1, 1, 2, 6))
                for _ in range(burst):
                    if self._has_room():
                        self.ask(load)

    def _has_room(self) -> bool:
        lanes = sum(node.options.lanes for node in self.nodes)
        return not self.is_asked_to_rest and len(self.open) < 3 * lanes

    def ask(self, load: Load) -> Client:
        """Let one client come."""
        process = self.process
        assert process is not None
        number = len(self.clients)
        client = draw_client(number, load, self.drawn, self.world, process)
        return self.send(client)

    def send(self, client: Client) -> Client:
        client.seeds = list(self.engine_seeds)
        self.clients.append(client)
        self.open[client.number] = client
        self._spawned.append(client)
        if self._knock is not None and self.process is not None:
            self.process.call(self._knock.set)
        return client

    async def _spawn(self, fleet: Fleet, group: asyncio.TaskGroup) -> None:
        assert self._knock is not None
        while True:
            await self._knock.wait()
            self._knock.clear()
            spawned, self._spawned = self._spawned, []
            for client in spawned:
                group.create_task(self._serve(fleet, client))

    async def _serve(self, fleet: Fleet, client: Client) -> None:
        try:
            async with fleet.generate(client.request) as generation:
                await self._read(generation, client)
        except SuperfluidError as error:
            if client.end:
                client.fail("an error after the end")
            if error.code not in REASONS:
                client.fail(f"failed with {error.code}: {error.message}")
            client.end = error.code.value
            client.told = error.code
        self.open.pop(client.number, None)
        self._count(f"end: {client.end}")
        if not client.end:
            client.fail("the stream ended without an end")
        if client.moves - client.drains > 3:
            client.fail(f"moved {client.moves - client.drains} times")

    async def _read(self, generation: Generation, client: Client) -> None:
        manner = client.manner
        async for event in generation:
            if isinstance(event, TokensEvent):
                client.take(event, self.world.now_ns)
                self._count("tokens", len(event.ids))
                if manner.leaves_at is not None and len(client.ids) > manner.leaves_at:
                    client.end = "left"
                    return
                if manner.stop_at is not None and len(client.ids) >= manner.stop_at:
                    del client.ids[manner.stop_at :]
                    generation.stop(manner.stop_at)
            elif isinstance(event, MovedEvent):
                client.moves += 1
                client.drains += "draining" in event.reason
                self._count("moves")
            elif isinstance(event, EndEvent):
                counted = len(generation.machine.journal.ids)
                client.finish(event, counted, self.cached_of(generation))
            if manner.is_slow:
                await asyncio.sleep(self.drawn.choice((0.01, 0.2, 2.0)))
                self._count("slow: waiting", generation_backlog(generation) > 1)

    def _count(self, name: str, by: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + by


def generation_backlog(generation: Generation) -> int:
    return len(generation._pending)
