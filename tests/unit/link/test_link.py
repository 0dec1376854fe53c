"""What an established link does with traffic, silence, slowness and breaches."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from superfluid_core.clock import SystemClock
from superfluid_core.errors import LocalProtocolError
from superfluid_core.limits import LinkLimits, WireLimits
from superfluid_core.link import listen
from superfluid_core.link.keys import FleetKeys
from superfluid_core.link.link import Link, LinkClosedError
from superfluid_core.link.setup import LinkSetup
from superfluid_core.session import QosClass, SamplingParams
from superfluid_core.wire import codec
from superfluid_core.wire import messages as m
from superfluid_core.wire.schema import Role

STATUS = m.Status(1, 2, 3, 8, (0, 0, 0, 0), 0, 0, 0, 64, 1.0, (), 40, False)


def open_of(prompt: tuple[int, ...], session: int = 1) -> m.Open:
    return m.Open(
        session=session,
        epoch=1,
        model="m",
        prompt=prompt,
        delivered=(),
        max_output=10,
        min_output=0,
        sampling=SamplingParams(),
        choice=0,
        stop_ids=(),
        ignore_eos=False,
        grammar=None,
        qos=QosClass.AGENT,
        tenant="t",
        batch_invariant=False,
        cache_salt=b"",
        lease_stamp_ns=1,
        lease_ttl_ms=10_000,
    )


def row(session: int, *ids: int) -> m.Tokens:
    return m.Tokens((m.TokenRow(session, 1, 0, ids),))


async def until(claim: Callable[[], bool], seconds: float = 3.0) -> None:
    async with asyncio.timeout(seconds):
        while not claim():  # noqa: ASYNC110 # polls what has no event
            await asyncio.sleep(0.005)


@asynccontextmanager
async def pair(fleet: Any, **changes: Any) -> AsyncIterator[tuple[Link, Link]]:
    """A head's end and a node's end of one link; the node reads nothing by itself."""
    async with fleet.serving():
        head = await fleet.dial(**changes)
        await until(lambda: len(fleet.links) == 1)
        yield head, fleet.links[0]
        await head.close("done")


@pytest.fixture(params=["tls", "plain"])
def any_keys(request: pytest.FixtureRequest, keys: FleetKeys) -> FleetKeys | None:
    return keys if request.param == "tls" else None


# --- traffic ----------------------------------------------------------------------------------------


def test_messages_arrive_in_order_in_both_directions(any_keys: Any, make_fleet: Any) -> None:
    async def main() -> None:
        async with pair(make_fleet(any_keys)) as (head, node):
            prompts = [tuple(range(count)) for count in (1, 1000, 200_000, 5)]
            for number, prompt in enumerate(prompts, 1):
                head.send(open_of(prompt, number))
            for number, prompt in enumerate(prompts, 1):
                assert await node.receive() == open_of(prompt, number)
            for number in range(1, 500):
                node.send(row(number, number, 2 * number))
            for number in range(1, 500):
                assert await head.receive() == row(number, number, 2 * number)
            assert head.bytes_out == node.bytes_in > 800_000

    asyncio.run(main())


def secret(number: int) -> tuple[int, ...]:
    return tuple(number * 7919 + index for index in range(20))


def needles() -> list[bytes]:
    """What an eavesdropper would look for: ids of prompts and outputs, tenants."""
    blobs = [codec.encode(row(1, *secret(n)))[-80:] for n in (*range(1, 101), *range(1001, 1101))]
    return [*blobs, *(f"tenant-{number}".encode() for number in range(1, 101))]


async def recorded(fleet: Any) -> bytes:
    """Everything that passes a proxy while a hundred sessions run."""
    seen = bytearray()
    real = 0

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                seen.extend(data)
                writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", real)
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    async with fleet.serving():
        proxy = await asyncio.start_server(relay, "127.0.0.1", 0)
        real, fleet.port = fleet.port, proxy.sockets[0].getsockname()[1]
        head = await fleet.dial()
        await until(lambda: len(fleet.links) == 1)
        node = fleet.links[0]
        for number in range(1, 101):
            head.send(replace(open_of(secret(number), number), tenant=f"tenant-{number}"))
            node.send(row(number, *secret(1000 + number)))
        for _ in range(100):
            await node.receive()
            await head.receive()
        await head.close("done")
        await asyncio.sleep(0.05)
        proxy.close()
    return bytes(seen)


def test_nothing_can_be_read_on_the_way(keys: FleetKeys, make_fleet: Any) -> None:
    """A hundred sessions through a recording proxy; without a key the same bytes are all there."""
    hidden = asyncio.run(recorded(make_fleet(keys)))
    shown = asyncio.run(recorded(make_fleet(None)))
    assert all(needle in shown for needle in needles())
    assert not any(needle in hidden for needle in needles())
    assert len(hidden) > len(shown)
    for word in (b"head-1", b"node-1", b"superfluid://", keys.prefix_salt):
        assert word not in hidden


def test_pings_are_answered_inside_with_the_nodes_status(keys: FleetKeys, make_fleet: Any) -> None:
    async def main() -> None:
        fleet = make_fleet(keys, status_source=lambda: STATUS)
        async with pair(fleet) as (head, node):
            head.send(m.Ping(99))
            assert await head.receive() == m.Pong(99, STATUS)
            node.send(m.Ping(5))
            node.send(row(1, 2))
            assert await head.receive() == row(1, 2)
            head.send(m.Renew(7))
            assert await node.receive() == m.Renew(7)  # the head's bare PONG was kept inside

    asyncio.run(main())


def test_an_idle_link_is_kept_alive_by_pings(keys: FleetKeys, make_fleet: Any) -> None:
    async def main() -> None:
        fleet = make_fleet(keys, LinkLimits(idle_timeout_ms=300))
        fleet.answer = replace(fleet.answer, idle_timeout_ms=300)
        async with pair(fleet) as (head, node):
            await asyncio.sleep(0.8)
            assert head.is_open
            assert node.is_open
            assert head.round_trip_ns is not None
            assert head.round_trip_ns < 10**9
            assert time.monotonic_ns() - node.last_received_ns < 300 * 10**6

    asyncio.run(main())


def test_a_head_that_falls_silent_is_dropped(keys: FleetKeys, make_fleet: Any) -> None:
    async def main() -> None:
        fleet = make_fleet(keys, LinkLimits(idle_timeout_ms=200))
        async with pair(fleet) as (head, node):
            assert await node.wait_closed() == "idle for too long"
            with pytest.raises(LinkClosedError, match="the peer closed"):
                await head.receive()

    asyncio.run(main())


# --- slowness ---------------------------------------------------------------------------------------


def test_a_peer_that_does_not_read_is_cut_off_at_the_bound(any_keys: Any, make_fleet: Any) -> None:
    async def main() -> None:
        limits = LinkLimits(outgoing_bytes_max=2 * 1024 * 1024)
        async with pair(make_fleet(any_keys, limits)) as (head, node):
            sent = 0
            while node.is_open:
                with contextlib.suppress(LinkClosedError):
                    node.send(m.Stats(1, 0, 1, bytes(48 * 1024)))
                sent += 48 * 1024
                if sent % (48 * 1024 * 20) == 0:
                    await asyncio.sleep(0)  # the head's end never calls receive
            assert sent < 24 * 1024 * 1024
            with pytest.raises(LinkClosedError, match="slow peer"):
                node.send(m.Goaway("x"))
            assert (
                len([message async for message in head]) < 1000
            )  # what was under way, then the end
            assert head.close_reason is not None

    asyncio.run(main())


def test_a_slow_consumer_pauses_reading_and_then_gets_everything(
    any_keys: Any, make_fleet: Any
) -> None:
    async def main() -> None:
        async with pair(make_fleet(any_keys)) as (head, node):
            for number in range(1, 5001):
                node.send(row(number, *range(300)))
            await asyncio.sleep(0.2)
            held = len(head._inbox)
            assert held < 2000  # bounded: the rest waits in the kernel and at the node
            for number in range(1, 5001):
                assert await head.receive() == row(number, *range(300))
            assert head.is_open

    asyncio.run(main())


def test_what_is_queued_can_be_purged_and_what_was_written_cannot(
    any_keys: Any, make_fleet: Any
) -> None:
    async def main() -> None:
        async with pair(make_fleet(any_keys)) as (head, node):
            total = 0
            while not node._outbox:
                node.send(m.Stats(1, 0, 1, bytes(48 * 1024)))
                total += 1
            node.send(row(5, 1))
            node.send(m.Tokens((m.TokenRow(5, 1, 1, (2,)), m.TokenRow(6, 1, 0, (3,)))))
            node.send(m.Closed(5, 1, m.CloseReason.FENCED))
            assert node.purge(5, 1) == 3
            node.send(m.Closed(5, 1, m.CloseReason.FENCED))
            for _ in range(total):
                assert isinstance(await head.receive(), m.Stats)
            assert await head.receive() == row(6, 3)
            assert await head.receive() == m.Closed(5, 1, m.CloseReason.FENCED)

    asyncio.run(main())


def test_small_messages_leave_in_one_write_and_large_ones_wait_as_ever(
    keys: FleetKeys, make_fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with pair(make_fleet(keys)) as (head, node):
            written: list[int] = []
            write = node._write

            def watched(data: bytes) -> None:
                written.append(len(data))
                write(data)

            monkeypatch.setattr(node, "_write", watched)
            small: list[m.Message] = [row(5, 1), row(6, 1)]
            small.append(m.Closed(5, 1, m.CloseReason.FENCED))
            node.send_all(small)
            assert len(written) == 1
            assert [await head.receive() for _ in small] == small
            with pytest.raises(LocalProtocolError):
                node.send_all((row(7, 1), m.Renew(-1), row(7, 2)))
            assert await head.receive() == row(7, 1)
            while not node._outbox:
                node.send_all(m.Stats(1, 0, 1, bytes(48 * 1024)) for _ in range(2))
            waiting = len(node._outbox)
            node.send_all((row(8, 1), row(8, 2)))
            assert len(node._outbox) == waiting + 2
            assert node.purge(8, 1) == 2
            node.abort("enough")
            with pytest.raises(LinkClosedError):
                node.send_all(small)

    asyncio.run(main())


class Raw:
    """The bytes of a link that a test writes by hand: a head's end over a plain socket."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.write(codec.encode(m.Hello(0, (), "raw")))

    def write(self, data: bytes) -> None:
        self.socket.sendall(data)

    async def rest(self) -> bytes:
        loop, seen = asyncio.get_running_loop(), b""
        with contextlib.suppress(ConnectionError):
            while data := await asyncio.wait_for(loop.sock_recv(self.socket, 65536), 3):
                seen += data
        self.socket.close()
        return seen


@pytest.mark.slow
def test_a_frame_that_drips_is_cut_off_at_its_deadline(make_fleet: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        setup = LinkSetup(LinkLimits(), SystemClock(), WireLimits(frame_seconds=1))
        link = Link(Role.NODE, setup)
        theirs, ours = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        await loop.connect_accepted_socket(lambda: link.protocol, ours)
        theirs.sendall(codec.encode(m.Hello(0, (), "raw")))
        hello = await link.receive()
        assert isinstance(hello, m.Hello)
        link.send(make_fleet(None).answer)
        link.establish(hello)
        data = codec.encode(m.Renew(1))
        start = time.monotonic()
        for byte in data:
            if link.close_reason is not None:
                break
            with contextlib.suppress(OSError):
                theirs.send(bytes([byte]))
            await asyncio.sleep(0.08)
        assert await link.wait_closed() == (
            "protocol breach by the peer: a frame did not arrive whole in time"
        )
        assert 0.9 < time.monotonic() - start < 1.8
        await link.close("over")
        theirs.close()

    asyncio.run(main())


# --- breaches and ends ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        codec.encode(m.Hello(0, (), "raw")),
        codec.encode(m.Opened(1, 1, 0, 0)),
        b"\xff" * 64,
        codec.encode(m.Renew(1))[:-1] + b"\xc1",
        b"\x7f\xff\xff\xff\x10\x00\x00\x10" + bytes(8),
    ],
)
def test_a_breach_is_told_to_the_peer_and_ends_the_link(data: bytes, make_fleet: Any) -> None:
    async def main() -> None:
        async with make_fleet(None).serving() as fleet:
            raw = Raw(fleet.port)
            await until(lambda: bool(fleet.links))
            raw.write(codec.encode(m.Renew(5)) + data)
            reason = await fleet.links[0].wait_closed()
            assert reason.startswith("protocol breach by the peer: ")
            assert b"protocol_error" in await raw.rest()
            assert await fleet.links[0].receive() == m.Renew(5)  # what came before still counts
            with pytest.raises(LinkClosedError, match="protocol breach"):
                await fleet.links[0].receive()

    asyncio.run(main())


def test_the_end_in_the_middle_of_a_frame_is_not_an_orderly_end(make_fleet: Any) -> None:
    async def main() -> None:
        for cut, words in ((5, "in the middle of a frame"), (0, "the peer closed the connection")):
            async with make_fleet(None).serving() as fleet:
                raw = Raw(fleet.port)
                await until(lambda: bool(fleet.links))
                raw.write(codec.encode(m.Renew(1))[:cut])
                raw.socket.shutdown(socket.SHUT_WR)
                assert words in await fleet.links[0].wait_closed()
                await raw.rest()

    asyncio.run(main())


def test_closing_flushes_says_why_and_is_harmless_twice(any_keys: Any, make_fleet: Any) -> None:
    async def main() -> None:
        async with pair(make_fleet(any_keys)) as (head, node):
            for number in range(1, 40):
                node.send(row(number, *range(2000)))
            closing = asyncio.gather(node.close("the node drains"), node.close("again"))
            seen = [message async for message in head]
            await closing
            assert seen[:-1] == [row(number, *range(2000)) for number in range(1, 40)]
            assert seen[-1] == m.Goaway("the node drains")
            assert head.close_reason == "the peer closed the connection (the node drains)"
            assert head.is_going_away
            assert not head.is_open
            with pytest.raises(LinkClosedError):
                head.send(m.Renew(1))
            assert node.close_reason == "the node drains"

    asyncio.run(main())


@pytest.mark.slow
def test_closing_towards_a_peer_that_does_not_read_takes_a_second(
    keys: FleetKeys, make_fleet: Any
) -> None:
    async def main() -> None:
        async with pair(make_fleet(keys)) as (head, node):
            while len(node._outbox) < 100:
                node.send(m.Stats(1, 0, 1, bytes(48 * 1024)))
                await asyncio.sleep(0)
            start = time.monotonic()
            await node.close("enough")
            assert time.monotonic() - start < 2.5
            await head.close("enough too")

    asyncio.run(main())


def test_our_own_mistake_leaves_the_link_as_it_was(keys: FleetKeys, make_fleet: Any) -> None:
    async def main() -> None:
        async with pair(make_fleet(keys)) as (head, node):
            for wrong in (m.Opened(1, 1, 1, 1), m.Renew(-1)):
                with pytest.raises(LocalProtocolError):
                    head.send(wrong)
            head.send(m.Renew(3))
            assert await node.receive() == m.Renew(3)

    asyncio.run(main())


def test_a_handler_that_fails_closes_its_own_link_only(
    keys: FleetKeys, make_fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async def handler(link: Link) -> None:
            async for message in link:
                if message == m.Renew(13):
                    raise ValueError("unlucky")
                link.send(m.Opened(1, 1, 0, 0))

        async with make_fleet(keys, handler=handler).serving() as fleet:
            first, second = await fleet.dial(), await fleet.dial()
            first.send(m.Renew(13))
            assert await first.receive() == m.Goaway("internal error")
            await first.wait_closed()
            second.send(m.Renew(1))
            assert await second.receive() == m.Opened(1, 1, 0, 0)
            await second.close("done")
            await until(lambda: fleet.listener.links == ())

    asyncio.run(main())
    assert "a link's handler failed" in caplog.text


def test_a_listener_that_stops_tells_every_head(keys: FleetKeys, make_fleet: Any) -> None:
    async def main() -> None:
        async with make_fleet(keys).serving() as fleet:
            heads = [await fleet.dial() for _ in range(3)]
            await until(lambda: len(fleet.links) == 3)
            await fleet.listener.close("maintenance")
            for head in heads:
                assert await head.receive() == m.Goaway("maintenance")
                await head.wait_closed()

    asyncio.run(main())


def test_a_cancelled_listener_leaves_nothing_behind(keys: FleetKeys, make_fleet: Any) -> None:
    async def main() -> None:
        fleet = make_fleet(keys)

        async def fail() -> None:
            async with fleet.serving():
                heads.append(await fleet.dial())
                raise RuntimeError("the owner fails")

        heads: list[Link] = []
        with pytest.raises(ExceptionGroup, match="unhandled"):
            await fail()
        assert [message async for message in heads[0]] == [m.Goaway("the node stops")]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


@pytest.mark.slow
def test_links_are_replaced_fifty_times_without_a_leak(keys: FleetKeys, make_fleet: Any) -> None:
    async def main() -> None:
        limits = LinkLimits(new_burst_per_address=100)
        async with make_fleet(keys, limits).serving() as fleet:
            old = await fleet.dial()
            for number in range(1, 51):
                new = await fleet.dial()
                await until(lambda: len(fleet.links) == number + 1)  # noqa: B023 # awaited at once
                new.send(m.Renew(number))
                assert await fleet.links[-1].receive() == m.Renew(number)
                await old.close("replaced")
                old = new
            await until(lambda: len(fleet.listener.links) == 1)
            assert old.wants_rekey(time.monotonic_ns() + 13 * 3600 * 10**9)
            assert not old.wants_rekey(time.monotonic_ns())
            await old.close("done")
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_a_bad_status_of_ours_ends_the_link_with_a_log_line(
    keys: FleetKeys, make_fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        fleet = make_fleet(keys, status_source=lambda: replace(STATUS, lanes=-1))
        async with pair(fleet) as (head, node):
            head.send(m.Ping(1))
            assert (await node.wait_closed()).startswith("internal error")
            await head.wait_closed()

    asyncio.run(main())
    assert "cannot be sent" in caplog.text


def test_a_queued_mistake_of_ours_ends_the_link_with_a_log_line(
    keys: FleetKeys, make_fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with pair(make_fleet(keys)) as (head, node):
            while not node._outbox:
                node.send(m.Stats(1, 0, 1, bytes(48 * 1024)))
            node.send(m.Renew(1))
            async for _ in head:
                pass
            assert (node.close_reason or "").startswith("internal error")

    asyncio.run(main())
    assert "cannot be sent" in caplog.text


def test_writing_to_a_broken_connection_raises_instead_of_filling_the_log(
    any_keys: Any, make_fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with pair(make_fleet(any_keys)) as (head, node):
            head.abort("gone")
            await asyncio.sleep(0.02)
            with contextlib.suppress(LinkClosedError):
                for number in range(1, 1000):
                    node.send(row(number, 1))  # without giving the loop a chance to notice
            assert not node.is_open

    asyncio.run(main())
    assert "socket.send() raised" not in caplog.text


@pytest.mark.slow
def test_a_handler_that_does_not_end_is_cancelled_when_the_listener_stops(
    keys: FleetKeys, make_fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "HANDLER_GRACE_S", 0.1)

    async def main() -> None:
        ended = []

        async def handler(link: Link) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(link)

        async with asyncio.timeout(5):
            async with make_fleet(keys, handler=handler).serving() as fleet:
                head = await fleet.dial()
                await until(lambda: bool(fleet.listener.links))
            await head.wait_closed()
        assert len(ended) == 1

    asyncio.run(main())


def test_small_frames_are_not_held_back_by_the_kernel(any_keys: Any, make_fleet: Any) -> None:
    async def main() -> None:
        async with pair(make_fleet(any_keys)) as ends:
            for end in ends:
                assert end.transport is not None
                sock = end.transport.get_extra_info("socket")
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0

    asyncio.run(main())
