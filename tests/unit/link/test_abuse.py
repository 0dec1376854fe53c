"""Load abuse in small (reliability.md 3.7): crowds, drips, churn, bombs. The storm of heads that come back is in head_fleet."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

import pytest

from superfluid_core.clock import SystemClock
from superfluid_core.limits import LinkLimits, WireLimits
from superfluid_core.link import tls
from superfluid_core.link.keys import FleetKeys
from superfluid_core.link.link import Link
from superfluid_core.link.setup import LinkSetup
from superfluid_core.session import QosClass, SamplingParams
from superfluid_core.wire import codec
from superfluid_core.wire import messages as m
from superfluid_core.wire.frames import HEADER
from superfluid_core.wire.schema import Role
from tests.unit.link.knocks import HELLO, Refusals, knock

OPEN = m.Open(
    session=1, epoch=1, model="m", prompt=tuple(range(2_000)), delivered=(), max_output=10, min_output=0,
    sampling=SamplingParams(), choice=0, stop_ids=(), ignore_eos=False, grammar=None, qos=QosClass.AGENT,
    tenant="t", batch_invariant=False, cache_salt=b"", lease_stamp_ns=1, lease_ttl_ms=10_000,
)  # fmt: skip


def test_sockets_that_connect_and_then_drip_give_way_and_hold_nobody_up(
    keys: FleetKeys, make_fleet: Any, refusals: Refusals
) -> None:
    """T-D 2: each sends a byte of a TLS record now and then."""

    async def drip(port: int) -> None:
        with socket.socket() as made, contextlib.suppress(OSError):
            made.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(made, ("127.0.0.1", port))
            for byte in b"\x16\x03\x01\x02\x00\x01" * 3:
                await loop.sock_sendall(made, bytes([byte]))
                await asyncio.sleep(0.05)

    async def main() -> None:
        limits = LinkLimits(handshake_ms=800, new_burst_per_address=60)
        async with make_fleet(keys, limits).serving() as fleet:
            crowd = [asyncio.create_task(drip(fleet.port)) for _ in range(30)]
            await asyncio.sleep(0.6)
            began = time.monotonic()
            link = await fleet.dial()
            assert time.monotonic() - began < 1.0
            await link.close("done")
            await asyncio.gather(*crowd)
            await asyncio.sleep(0.05)
            assert fleet.listener._pending == {}
            assert fleet.listener.refusals == 30
            assert refusals()

    asyncio.run(main())


def test_churn_of_handshakes_leaves_a_standing_link_alone_and_nothing_behind(
    keys: FleetKeys, make_fleet: Any
) -> None:
    """T-D 3: handshakes that are given up halfway, as fast as they come; a link goes on beside them."""

    async def main() -> None:
        limits = LinkLimits(new_burst_per_address=200)
        async with make_fleet(keys, limits).serving() as fleet:
            link = await fleet.dial()
            context = tls.client_context(keys, "head-2")
            sent = 0
            for number in range(50):
                data = (b"", codec.encode(HELLO)[:7], b"\x00" * 40)[number % 3]
                churn = asyncio.create_task(
                    knock(fleet.port, context if number % 2 else None, data, 0.01)
                )
                fleet.links[0].send(m.Opened(1 + number, 1, 0, 0))
                assert await link.receive() == m.Opened(1 + number, 1, 0, 0)
                sent += 1
                with contextlib.suppress(TimeoutError):
                    await churn
            assert link.is_open
            assert sent == 50
            async with asyncio.timeout(5):
                while fleet.listener._pending or len(fleet.listener.links) > 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await link.close("done")
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


async def raw_end(make_fleet: Any, wire: WireLimits) -> tuple[Link, socket.socket]:
    """A node's end with these limits, and the plain socket of a head that said HELLO."""
    theirs, ours = socket.socketpair()
    for each in (theirs, ours):
        each.setblocking(False)
    link = Link(Role.NODE, LinkSetup(LinkLimits(), SystemClock(), wire))
    await asyncio.get_running_loop().connect_accepted_socket(lambda: link.protocol, ours)
    theirs.sendall(codec.encode(m.Hello(0, (), "raw")))
    hello = await link.receive()
    assert isinstance(hello, m.Hello)
    link.send(make_fleet(None).answer)
    link.establish(hello)
    return link, theirs


@pytest.mark.slow
def test_an_open_that_drips_has_its_own_longer_deadline_and_is_cut_at_it(make_fleet: Any) -> None:
    """T-D 4: an OPEN may take longer than another frame, and not a moment more."""

    async def main() -> None:
        wire = WireLimits(frame_seconds=1, open_seconds=2)
        link, theirs = await raw_end(make_fleet, wire)
        began = time.monotonic()
        for byte in codec.encode(OPEN):
            if link.close_reason is not None:
                break
            with contextlib.suppress(OSError):
                theirs.send(bytes([byte]))
            await asyncio.sleep(0.02)
        reason = await link.wait_closed()
        assert reason.endswith("a frame did not arrive whole in time")
        assert 1.9 < time.monotonic() - began < 3.0
        await link.close("over")
        theirs.close()

    asyncio.run(main())


def test_bombs_are_refused_by_their_header_before_anything_is_kept(make_fleet: Any) -> None:
    """T-D 5: sizes and nestings that would cost memory or time: none of it is waited for, or kept."""
    bombs = [
        HEADER.pack(2**32 - 1, 0x10, 0, 100, 1),
        HEADER.pack(8 * 1024 * 1024 + 1, 0x10, 0, 100, 1),
        HEADER.pack(64 * 1024 + 1, 0x06, 0, 10, 0),
        *(
            HEADER.pack(len(head), 0x06, 0, len(head), 0) + head
            for head in (
                b"\xdf\xff\xff\xff\xff",
                b"\xdd\x7f\xff\xff\xff",
                b"\x91" * 50_000,
                b"\x81" * 50_000,
            )
        ),
    ]

    async def main() -> None:
        for bomb in bombs:
            link, theirs = await raw_end(make_fleet, WireLimits())
            theirs.send(bomb)
            async with asyncio.timeout(5):
                reason = await link.wait_closed()
            assert reason.startswith("protocol breach by the peer")
            assert len(link._connection._frames) <= len(bomb)
            await link.close("over")
            theirs.close()

    asyncio.run(main())
