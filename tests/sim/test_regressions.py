"""What the simulation found, each as small as it can be told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from superfluid_core.limits import LinkLimits
from superfluid_core.link.link import Link, LinkClosedError
from superfluid_core.link.setup import LinkSetup
from superfluid_core.wire.messages import Hello, TokenRow, Tokens
from superfluid_core.wire.schema import Role
from tests.sim import scenario
from tests.sim.scenario import run_seed, staged
from tests.sim.world import MS, SECOND, Process, World


class Stuck(asyncio.Transport):
    """A transport that cannot get rid of what was written: it closes only by force."""

    def __init__(self) -> None:
        super().__init__()
        self.is_forced = False
        self._is_closing = False

    def write(self, data: Any) -> None:
        return

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        return

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self.is_forced = True


def a_link_at_its_end(world: World, rest: bytes) -> tuple[Process, Link, Stuck]:
    """A head's link that has received `rest` and then the end of the stream; the transport has not let go yet."""
    process = Process(world, "head")
    links: list[Link] = []
    transport = Stuck()

    def connect() -> None:
        links.append(Link(Role.HEAD, LinkSetup(LinkLimits(), process)))
        links[0].protocol.connection_made(transport)
        links[0].protocol.data_received(rest)
        links[0].protocol.eof_received()

    process.call(connect)
    return process, links[0], transport


def test_between_the_end_of_the_stream_and_the_end_of_the_transport_a_link_is_closed() -> None:
    # a CANCEL in that gap was a protocol error, which took the whole head down
    process, link, _ = a_link_at_its_end(World(), b"")
    with pytest.raises(LinkClosedError):
        process.call(link.send, Hello(0, (), "h"))


def test_what_waited_for_a_slow_reader_is_looked_at_once_more_before_it_leaves() -> None:
    # a head slept, its pipe was full; when it woke, tokens left whose lease had run out since they were queued (seed 492)
    process = Process(World(), "node")
    written: list[Any] = []

    def play() -> None:
        link = Link(Role.NODE, LinkSetup(LinkLimits(), process))
        transport = Stuck()
        link.protocol.connection_made(transport)
        link._connection.send = written.append  # type: ignore[assignment, method-assign]
        link._write = lambda _data: None  # type: ignore[method-assign, assignment]
        link.protocol.pause_writing()
        row = TokenRow(7, 1, 0, (5,))
        link.send(Tokens((row,)))

        def withdraw() -> None:
            link.purge(7, 1)

        link.on_backlog = withdraw
        link.protocol.resume_writing()

    process.call(play)
    assert written == []


def test_nodes_that_join_come_back_to_a_head_that_lost_power(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # each kept its link to the machine that was gone until the idle timeout, two minutes later (seed 92)
    monkeypatch.setattr(scenario, "draw_joining", lambda _drawn: True)
    with staged(0, ("crash",)) as run:
        run.begin()
        head = run.scene.heads[0]
        books = [head.book(node) for node in run.scene.nodes]
        assert all(book is not None and book.is_linked for book in books)
        head.crash(power=True)
        run.advance(1.0)
        head.start()
        run.advance(14.0)
        books = [head.book(node) for node in run.scene.nodes]
        assert all(book is not None and book.is_linked for book in books)


def test_a_node_whose_engine_never_returns_is_not_taken_for_an_idle_one() -> None:
    # its sessions had moved away, so its lanes looked free: new ones went there and queued for ever (chaos C14)
    with staged(3, ("crash",), is_dense=True) as run:
        run.begin()
        head, node = run.scene.heads[0], run.scene.nodes[0]
        assert len(run.scene.nodes) > 1
        assert node.process is not None
        for _ in range(2 * len(run.scene.nodes)):
            head.ask(run.scene.load)
        run.advance(0.3)
        node.ills.hung_until_ns = node.process.now_ns() + 10_000 * SECOND
        run.advance(15.0)
        for _ in range(2 * len(run.scene.nodes)):
            head.ask(run.scene.load)
        run.advance(100.0)
        assert not head.open


@pytest.mark.parametrize("seed", [92, 93, 189, 492, 548, 929, 1_061, 1_488])
def test_seeds_that_once_broke_a_promise_keep_it(seed: int) -> None:
    outcome = run_seed(seed)
    assert not outcome.violation


@pytest.mark.parametrize("rest", [b"", b"\x00\x00"])
def test_a_peer_that_has_closed_is_not_waited_for(rest: bytes) -> None:
    # what could not be sent to it kept the link, and its place among the node's links, until the kernel gave up
    world = World()
    _, _, transport = a_link_at_its_end(world, rest)
    world.run_until(5 * SECOND)
    assert transport.is_forced


def test_a_drain_that_is_ordered_while_the_node_is_away_ends_with_its_process() -> None:
    # without a link the head took no note of whose process it meant, and kept the next one drained for ever
    with staged(0, ("crash",)) as run:
        run.begin()
        head, node = run.scene.heads[0], run.scene.nodes[0]
        assert head.fleet is not None
        assert head.process is not None
        node.crash()
        run.advance(2.0)
        assert not head.fleet._nodes[node.identity].is_linked
        head.process.call(head.fleet.drain, node.identity, 0)
        assert head.fleet._nodes[node.identity].is_drained
        node.start()
        run.advance(15.0)
        assert head.fleet._nodes[node.identity].is_linked
        assert not head.fleet._nodes[node.identity].is_drained


@pytest.mark.parametrize("ways", [("to node",), ("to head",), ("to node", "to head")])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_link_that_carries_nothing_one_way_is_left_within_five_seconds(
    ways: tuple[str, ...], is_loaded: bool
) -> None:
    # a node that could be heard and heard nothing kept its sessions until their lease ran out
    with staged(0, ("crash",)) as run:
        run.begin()
        head, node = run.scene.heads[0], run.scene.nodes[0]
        assert head.fleet is not None
        if is_loaded:
            for _ in range(2 * len(run.scene.nodes)):
                head.ask(run.scene.load)
        run.advance(1.0)
        assert head.fleet._nodes[node.identity].is_linked
        pair = (head.host, node.host)
        for way in ways:
            run.network.block(*(pair if way == "to node" else pair[::-1]), is_blocked=True)
        run.advance(5.0)
        assert not head.fleet._nodes[node.identity].is_linked


def test_a_head_that_is_short_of_time_finds_a_frozen_node_out_by_the_time_it_had() -> None:
    # every pause of its own began the three seconds anew, and its clients waited until the node woke
    with staged(0, ("crash",)) as run:
        run.begin()
        head, node = run.scene.heads[0], run.scene.nodes[0]
        assert head.fleet is not None
        assert head.process is not None
        assert node.process is not None
        for _ in range(4 * len(run.scene.nodes)):
            head.ask(run.scene.load)
        run.advance(0.5)
        node.process.freeze(60 * SECOND)
        for _ in range(6):
            head.process.freeze(1_200 * MS)
            run.advance(2.2)
        assert not head.fleet._nodes[node.identity].is_linked
