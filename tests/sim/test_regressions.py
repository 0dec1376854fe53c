"""What the simulation found, each as small as it can be told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from superfluid_core.limits import LinkLimits
from superfluid_core.link.link import Link, LinkClosedError
from superfluid_core.link.setup import LinkSetup
from superfluid_core.wire.messages import Hello
from superfluid_core.wire.schema import Role
from tests.sim.world import SECOND, Process, World


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


@pytest.mark.parametrize("rest", [b"", b"\x00\x00"])
def test_a_peer_that_has_closed_is_not_waited_for(rest: bytes) -> None:
    # what could not be sent to it kept the link, and its place among the node's links, until the kernel gave up
    world = World()
    _, _, transport = a_link_at_its_end(world, rest)
    world.run_until(5 * SECOND)
    assert transport.is_forced
