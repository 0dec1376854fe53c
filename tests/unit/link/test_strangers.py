"""Strangers, peers that take their time, crowds, and refusals in words (reliability.md 3.2)."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from dataclasses import replace
from typing import Any

import pytest

from superfluid_core.clock import SystemClock
from superfluid_core.errors import ErrorCode
from superfluid_core.limits import LinkLimits
from superfluid_core.link import tls
from superfluid_core.link.dial import DialError, dial
from superfluid_core.link.keys import FleetKeys
from superfluid_core.wire import codec
from superfluid_core.wire.messages import Ping, Refuse
from tests.unit.link.knocks import (
    HELLO,
    Refusals,
    cause_of,
    knock,
    stand_in,
)

# --- strangers, and peers that take their time ------------------------------------------------------


@pytest.mark.parametrize("has_key", [True, False])
@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"SSH-2.0-x\r\n" + bytes(20), os.urandom(65536)]
)
def test_strangers_are_sent_away(
    has_key: bool, data: bytes, keys: FleetKeys, make_fleet: Any, refusals: Refusals
) -> None:
    async def main() -> None:
        async with make_fleet(keys if has_key else None).serving() as fleet:
            await knock(fleet.port, None, data)
            assert len(refusals()) == 1
            link = await fleet.dial()
            assert link.is_open
            await link.close("done")

    asyncio.run(main())


@pytest.mark.parametrize(
    "data",
    [
        codec.encode(Ping(1)),
        codec.encode(HELLO) + codec.encode(HELLO),
        codec.encode(HELLO) + codec.encode(Ping(1)),
        b"\x00\x00\x10\x01\x01\x00\x00\x10" + bytes(8),
        codec.encode(HELLO)[:-1] + b"\xc1",
    ],
)
def test_a_member_that_breaks_the_handshake_is_sent_away(
    data: bytes, keys: FleetKeys, make_fleet: Any
) -> None:
    async def main() -> None:
        async with make_fleet(keys).serving() as fleet:
            context = tls.client_context(keys, "head-1")
            answer = await knock(fleet.port, context, data)
            assert b"protocol_error" in answer
            await asyncio.sleep(0.02)
            assert not any(link.is_open for link in fleet.links)

    asyncio.run(main())


def test_one_deadline_covers_everything_until_welcome(
    keys: FleetKeys, make_fleet: Any, refusals: Refusals
) -> None:
    limits = LinkLimits(handshake_ms=300)
    hello = codec.encode(HELLO)

    async def drip(port: int) -> float:
        start = time.monotonic()
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=tls.client_context(keys, "head-1"), server_hostname="x"
        )
        for byte in hello:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)
            if reader.at_eof() or reader.exception() is not None:
                break
        writer.transport.abort()
        return time.monotonic() - start

    async def silent(port: int, context: ssl.SSLContext | None) -> float:
        start = time.monotonic()
        await knock(port, context, b"")
        return time.monotonic() - start

    async def main() -> None:
        async with make_fleet(keys, limits).serving() as fleet:
            times = await asyncio.gather(
                silent(fleet.port, None),
                silent(fleet.port, tls.client_context(keys, "head-1")),
                drip(fleet.port),
            )
            assert max(times) < 1.5
            assert fleet.links == []
        assert refusals()[0] == "no WELCOME came about within the handshake deadline"

    asyncio.run(main())


def test_a_dial_has_one_deadline_too(keys: FleetKeys) -> None:
    async def main() -> None:
        server, port = await stand_in(None, patience=10**6)
        for own in (keys, None):
            start = time.monotonic()
            with pytest.raises(DialError, match="timed out") as caught:
                await dial(
                    "127.0.0.1",
                    port,
                    keys=own,
                    hello=HELLO,
                    limits=LinkLimits(handshake_ms=200),
                    clock=SystemClock(),
                )
            assert time.monotonic() - start < 1
            assert caught.value.code is ErrorCode.TIMEOUT
        server.close()
        await asyncio.sleep(0.05)

    asyncio.run(main())


def test_nothing_there_and_no_such_name_are_told_apart(keys: FleetKeys) -> None:
    async def main() -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            port = closed.getsockname()[1]
            for host, words in (("127.0.0.1", "connection refused"), ("a..b", "cannot resolve")):
                with pytest.raises(DialError, match=words):
                    await dial(
                        host, port, keys=keys, hello=HELLO, limits=LinkLimits(), clock=SystemClock()
                    )

    asyncio.run(main())


# --- refusals in words ----------------------------------------------------------------------------


def test_a_refusal_reaches_the_head_with_its_code(
    keys: FleetKeys, make_fleet: Any, refusals: Refusals
) -> None:
    refuse = Refuse(ErrorCode.DRAINING, "this node is draining", 5000)

    async def main() -> DialError:
        async with make_fleet(keys, answer=refuse).serving() as fleet:
            return await cause_of(fleet)

    error = asyncio.run(main())
    assert error.cause == "refused: this node is draining (draining)"
    assert (error.code, error.retry_after_ms) == (ErrorCode.DRAINING, 5000)
    assert refusals() == ["answered HELLO with REFUSE: this node is draining (draining)"]


def test_a_head_may_not_take_another_ones_name(keys: FleetKeys, make_fleet: Any) -> None:
    async def main() -> None:
        async with make_fleet(keys).serving() as fleet:
            answer = await knock(
                fleet.port, tls.client_context(keys, "head-2"), codec.encode(HELLO)
            )
            assert b"unauthorized" in answer
            assert fleet.links == []

    asyncio.run(main())


def test_a_node_may_not_take_another_ones_name(keys: FleetKeys, make_fleet: Any) -> None:
    async def main() -> None:
        fleet = make_fleet(keys)
        fleet.answer = replace(fleet.answer, node="node-2")
        async with fleet.serving():
            error = await cause_of(fleet)
            assert "calls itself node-2" in error.cause

    asyncio.run(main())


def test_heads_are_bounded(keys: FleetKeys, make_fleet: Any) -> None:
    async def main() -> None:
        async with make_fleet(keys, LinkLimits(heads_max=2)).serving() as fleet:
            first = await fleet.dial(head="head-1")
            second = await fleet.dial(head="head-2")
            error = await cause_of(fleet, head="head-3")
            assert error.code is ErrorCode.OVERLOADED
            assert error.cause == "refused: too many heads (overloaded)"
            await first.close("done")
            await asyncio.sleep(0.05)
            third = await fleet.dial(head="head-3")
            assert second.is_open
            assert third.is_open
            await second.close("done")
            await third.close("done")

    asyncio.run(main())


def test_the_links_of_one_head_are_bounded(keys: FleetKeys, make_fleet: Any) -> None:
    async def main() -> None:
        async with make_fleet(
            keys, LinkLimits(heads_max=1, links_per_head_max=2)
        ).serving() as fleet:
            links = [await fleet.dial(), await fleet.dial()]
            error = await cause_of(fleet)
            assert error.cause == "refused: too many links of this head (overloaded)"
            for link in links:
                await link.close("done")

    asyncio.run(main())


def test_silent_sockets_cannot_keep_a_head_out(keys: FleetKeys, make_fleet: Any) -> None:
    async def main() -> None:
        async with make_fleet(keys).serving() as fleet:
            crowd = []
            for _ in range(200):
                connection = socket.socket()
                connection.setblocking(False)
                await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", fleet.port))
                crowd.append(connection)
            start = time.monotonic()
            link = None
            while link is None:
                try:
                    link = await fleet.dial()
                except DialError:
                    await asyncio.sleep(0.1)
            assert time.monotonic() - start < 1.5
            assert len(fleet.listener._pending) <= 8
            await link.close("done")
            for connection in crowd:
                connection.close()

    asyncio.run(main())


def test_running_out_of_descriptors_backs_off_and_recovers(
    keys: FleetKeys, make_fleet: Any, monkeypatch: pytest.MonkeyPatch, refusals: Refusals
) -> None:
    calls = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        accept = loop.sock_accept

        async def exhausted(listening: socket.socket) -> Any:
            calls.append(loop.time())
            if len(calls) <= 3:
                raise OSError(24, "Too many open files")
            return await accept(listening)

        monkeypatch.setattr(loop, "sock_accept", exhausted)
        async with make_fleet(keys).serving() as fleet:
            link = await fleet.dial()
            assert link.is_open
            await link.close("done")

    asyncio.run(main())
    assert calls[3] - calls[0] > 0.3
    assert len(calls) <= 5
    assert refusals() == ["cannot accept: Too many open files"]


def test_no_secret_is_logged(
    keys: FleetKeys, other_keys: FleetKeys, make_fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)

    async def main() -> None:
        async with make_fleet(keys).serving() as fleet:
            await cause_of(fleet, other_keys)
            await knock(fleet.port, None, b"GET / HTTP/1.0\r\n\r\n")

    asyncio.run(main())
    logged = caplog.text + "".join(str(record.__dict__) for record in caplog.records)
    for known in (keys, other_keys):
        for secret in (known.prefix_salt, known.log_key):
            assert secret.hex() not in logged
            assert repr(secret) not in logged
