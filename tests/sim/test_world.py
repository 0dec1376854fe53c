"""The harness itself: its network keeps order, its time is virtual, a seed is a run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.network import Network, Port, SimSocket
from tests.sim.scenario import run_seed
from tests.sim.world import MS, SECOND, Process, ViolationError, World

ROOT = Path(__file__).parents[2]


class Sink(asyncio.Protocol):
    """Keeps what comes, and when."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.data = b""
        self.times: list[int] = []
        self.end: object = ""

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.times.append(self.world.now_ns)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end = exc


class Pair:
    """Two processes with a connection between them."""

    def __init__(self) -> None:
        self.world = World()
        self.network = Network(self.world, lambda _a, _b: MS)
        self.far = Process(self.world, "far", net=Port(self.network, "b"))
        self.near = Process(self.world, "near", net=Port(self.network, "a"))
        self.heard, self.said = Sink(self.world), Sink(self.world)
        self.transport: asyncio.Transport | None = None
        self.far.start(self._listen())
        self.near.start(self._dial())
        self.run(0.1)

    def is_reset(self) -> bool:
        return isinstance(self.said.end, ConnectionResetError)

    def run(self, seconds: float) -> None:
        self.world.run_until(self.world.now_ns + int(seconds * SECOND))

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        listening = SimSocket()
        listening.bind(("b", 1))
        listening.listen(1)
        connected, _ = await loop.sock_accept(listening)  # type: ignore[arg-type]
        await loop.connect_accepted_socket(lambda: self.heard, connected)

    async def _dial(self) -> None:
        loop = asyncio.get_running_loop()
        connected = SimSocket()
        await loop.sock_connect(connected, ("b", 1))  # type: ignore[arg-type]
        transport, _ = await loop.create_connection(lambda: self.said, sock=connected)  # type: ignore[call-overload]
        self.transport = transport

    def write(self, data: bytes) -> None:
        assert self.transport is not None
        self.near.call(self.transport.write, data)


def test_a_stream_keeps_its_order_through_delay_block_and_freeze() -> None:
    pair = Pair()
    route = pair.network.route("a", "b")
    sent = b""
    for number in range(60):
        route.extra_ns = (60 - number) * 10 * MS
        pair.network.block("a", "b", is_blocked=number % 7 == 3)
        if number == 20:
            pair.far.freeze(2 * SECOND)
        piece = bytes((number,)) * 10
        sent += piece
        pair.write(piece)
        pair.run(0.03)
    pair.network.block("a", "b", is_blocked=False)
    pair.run(5)
    assert pair.heard.data == sent


def test_a_frozen_process_hears_nothing_and_everything_afterwards() -> None:
    pair = Pair()
    pair.far.freeze(3 * SECOND)
    pair.write(b"x")
    pair.run(2.9)
    assert pair.heard.data == b""
    pair.run(0.2)
    assert pair.heard.data == b"x"


def test_a_killed_process_ends_its_streams_and_its_coroutines() -> None:
    pair = Pair()
    pair.network.kill(pair.near)
    pair.run(1)
    assert pair.heard.end is None
    assert not pair.near.tasks


def test_without_power_nobody_hears_of_the_death_until_the_host_is_back() -> None:
    pair = Pair()
    pair.network.dark["b"] = None
    pair.network.kill(pair.far, power=True)
    pair.write(b"x")
    pair.run(60)
    assert not pair.is_reset()
    del pair.network.dark["b"]
    pair.write(b"x")
    pair.run(1)
    assert pair.is_reset()


def test_a_slow_reader_holds_the_writer_back() -> None:
    pair = Pair()
    pair.network.window_bytes = 1_000
    pair.far.freeze(SECOND)
    for _ in range(200):
        pair.write(b"y" * 1_000)
    assert pair.transport is not None
    assert pair.transport.get_write_buffer_size() > 100_000
    pair.run(5)
    assert len(pair.heard.data) == 200_000


def test_clocks_drift_and_jump_apart() -> None:
    world = World()
    fast = Process(world, "fast", drift_ppm=500)
    began_ns, boot_ns = fast.now_ns(), fast.boot_ns()
    fast.boot_offset_ns += SECOND
    world.run_until(1_000 * SECOND)
    assert fast.now_ns() - began_ns == 1_000_500 * MS
    assert fast.boot_ns() - boot_ns == 1_001_500 * MS


def test_a_process_that_never_rests_is_found_out() -> None:
    world = World()
    process = Process(world, "busy")

    def again() -> None:
        process.loop.call_soon(again)

    process.loop.call_soon(again)
    with pytest.raises(ViolationError, match="never rests"):
        world.run_until(SECOND)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_same_seed_is_the_same_run_whatever_strings_hash_to() -> None:
    seeds = (3, 11)
    here = [run_seed(seed).trace for seed in seeds]
    assert len(set(here)) == len(seeds)
    assert [run_seed(seed).trace for seed in seeds] == here
    code = (
        "from tests.sim.scenario import run_seed\n"
        f"print(*(run_seed(seed).trace for seed in {seeds!r}))"
    )
    for hashing in ("1", "77"):
        there = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True, text=True, check=True, cwd=ROOT,
            env={"PYTHONHASHSEED": hashing, "PYTHONPATH": str(ROOT)},
        ).stdout.split()  # fmt: skip
        assert there == here
