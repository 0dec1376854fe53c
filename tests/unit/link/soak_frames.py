"""Silent crowds, bad frames and flipped bits against real processes, in both directions: `python -m tests.unit.link.soak_frames`.

A node is fed by heads and a head (`--fleet-listen`) by nodes, one connection an item, after a proper handshake. Afterwards, and
now and then, a good session has to be served; the victim's resident memory may grow by 32 MiB at most. Connections come
from many addresses of 127.0.0.0/8, as the limits are counted by address. It ends by itself when the items do.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack

from superfluid_core.clock import SystemClock
from superfluid_core.limits import MIB, LinkLimits
from superfluid_core.link.dial import DialError, dial
from superfluid_core.wire import codec
from superfluid_core.wire import messages as m
from superfluid_core.wire.frames import HEADER
from superfluid_core.wire.schema import Role
from superfluid_head.bench.load import chat_body, closed_loop, http_client
from superfluid_head.bench.rig import Child, Rig
from superfluid_head.bench.small_fleet import wait_linked
from tests.unit.wire.conftest import EXAMPLES, OFFER
from tests.unit.wire.test_bad_frames import (
    _MISSING,
    ALWAYS_WRONG,
    NO_MAPS,
    SCHEMA,
    SOMETIMES_WRONG,
    changed,
    frame_with,
    head_of,
    paths,
)

GROWTH_MAX_BYTES = 32 * MIB
WARM_UP = 300
GOOD_EVERY = 1_000
VERDICT_S = 0.1
CROWD = 1_000
CROWD_LINK_S_MAX = 1.0
CROWD_GROWTH_MAX_BYTES = 20 * MIB
FLAGS = ("--engine", "mock", "--model", "demo", "--mock-rates", "prefill=20000,decode=2000")


@dataclass
class Result:
    """What feeding one process came to."""

    items: int
    growth_bytes: int
    good: int


def sendable(role: Role) -> Iterator[m.Message]:
    """The examples of what this role may send once the link is open; not DRAIN, since a good one drains the node."""
    for message in EXAMPLES.values():
        is_left_out = isinstance(message, m.Hello | m.Welcome | m.DrainOrder)
        if role in SCHEMA.by_shape[type(message)].senders and not is_left_out:
            yield message


def bad_frames(role: Role) -> Iterator[bytes]:
    """Each field with each bad value, missing and unknown keys, no maps, wrong lengths and headers."""
    for message in sendable(role):
        data = codec.encode(message)
        head = head_of(data)
        for path in paths(head):
            for value in (*ALWAYS_WRONG.values(), *SOMETIMES_WRONG.values()):
                yield frame_with(data, msgpack.packb(changed(head, path, value)))
            if isinstance(path[-1], str):
                yield frame_with(data, msgpack.packb(changed(head, path, _MISSING)))
        for extra in ("zzz", b"bytes", 5, None):
            yield frame_with(data, msgpack.packb(changed(head, (extra,), 1)))
        yield from (frame_with(data, bad) for bad in NO_MAPS)
        body, number, flags, head_bytes, session = HEADER.unpack_from(data)
        for sizes in ((body - 1, head_bytes), (body + 1, head_bytes), (0, 0), (body, body + 1)):
            yield (
                HEADER.pack(sizes[0] % 2**32, number, flags, sizes[1], session)
                + data[HEADER.size :]
            )
        yield HEADER.pack(2**32 - 1, number, flags, head_bytes, session)


def flipped(role: Role, count: int, drawn: random.Random) -> Iterator[bytes]:
    """Good frames with one bit turned over."""
    frames = [codec.encode(message) for message in sendable(role)]
    for _ in range(count):
        frame = bytearray(drawn.choice(frames))
        bit = drawn.randrange(8 * len(frame))
        frame[bit // 8] ^= 1 << bit % 8
        yield bytes(frame)


def items_of(role: Role, count: int | None, flips: int) -> list[bytes]:
    drawn = random.Random(7)
    corpus = list(bad_frames(role))
    some = corpus if count is None else drawn.sample(corpus, min(count, len(corpus)))
    return [*some, *flipped(role, flips, drawn)]


async def exchange(port: int, number: int, hello: bytes | None, reply: bytes) -> None:
    """One connection: a handshake (`hello` first, or theirs first), then `reply`, then what they say, and gone."""
    source = f"127.{1 + number % 200}.{number // 200 % 250}.{1 + number // 50_000}"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
    try:
        async with asyncio.timeout(10):
            if hello is not None:
                writer.write(hello)
            size, *_ = HEADER.unpack(await reader.readexactly(HEADER.size))
            await reader.readexactly(size)
            writer.write(reply)
            async with asyncio.timeout(VERDICT_S):  # what was no breach gets no answer
                await reader.read(65_536)
    except (OSError, asyncio.IncompleteReadError):
        return
    finally:
        writer.transport.abort()


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS")


async def feed(
    child: Child, port: int, role: Role, items: Sequence[bytes], good: Callable[[], Any]
) -> Result:
    """Feed one process; `good` is a session that has to be served."""
    hello = codec.encode(m.Hello(0, (), "soak")) if role is Role.HEAD else None
    offer = replace(OFFER, name="soak")
    welcome = codec.encode(replace(EXAMPLES["Welcome"], node="soak", boot="soak", models=(offer,)))
    before, served = 0, 0
    for number, item in enumerate(items):
        if number == min(WARM_UP, len(items) // 4):
            before = rss_bytes(child.pid)
        reply = item if role is Role.HEAD else welcome + item
        await exchange(port, number, hello, reply)
        if number % GOOD_EVERY == GOOD_EVERY - 1 or number == len(items) - 1:
            await good()
            served += 1
        if not child.is_running:
            raise RuntimeError(f"item {number} ended the process:\n{child.log_end()}")
    return Result(len(items), rss_bytes(child.pid) - before, served)


async def crowd(child: Child, port: int) -> tuple[float, int]:
    """T-D 1: a thousand sockets that say nothing. How long a real head needs to link beside them, and the growth."""
    before, silent = rss_bytes(child.pid), []
    loop = asyncio.get_running_loop()
    try:
        for number in range(CROWD):
            made = socket.socket()
            silent.append(made)
            made.setblocking(False)
            made.bind((f"127.9.{number % 250}.1", 0))
            await loop.sock_connect(made, ("127.0.0.1", port))
        began_s = loop.time()
        link = None
        while link is None:
            try:
                link = await dial(
                    "127.0.0.1", port, keys=None, hello=m.Hello(0, (), "late"), limits=LinkLimits(),
                    clock=SystemClock(),
                )  # fmt: skip
            except DialError:
                await asyncio.sleep(0.05)
        took_s = loop.time() - began_s
        await link.close("done")
        return took_s, rss_bytes(child.pid) - before
    finally:
        for made in silent:
            made.close()


async def _ask(url: str, model: str) -> None:
    async with http_client() as client:
        bodies = [chat_body(model, "Say something.", 8)]
        answers = await closed_loop(client, url, bodies, 1, SystemClock())
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise RuntimeError(f"a good session failed: {failed}")


def run(items: int | None, flips: int) -> tuple[dict[str, Result], tuple[float, int]]:
    """Crowd a node, then feed it and a head, each with the other beside it for the good sessions."""
    with Rig() as rig:
        node = rig.start_node("node-0", "--model-name", "served", *FLAGS, key=None)
        rig.wait_ready(node)
        head = rig.start_head(
            "demo", "--insecure-no-auth", "--fleet-listen", "127.0.0.1:0", nodes=[node.listen]
        )
        rig.wait_ready(head)
        wait_linked(rig, head, 1)
        ports = {"node": int(node.ready["listen"][0][1]), "head": int(head.ready["fleet"][0][1])}

        async def both() -> tuple[dict[str, Result], tuple[float, int]]:
            def good() -> Any:
                return _ask(head.url, "served")

            crowded = await crowd(node, ports["node"])
            to_node = items_of(Role.HEAD, items, flips)
            to_head = items_of(Role.NODE, items, flips)
            fed = {
                "node": await feed(node, ports["node"], Role.HEAD, to_node, good),
                "head": await feed(head, ports["head"], Role.NODE, to_head, good),
            }
            return fed, crowded

        return asyncio.run(both())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items", type=int, default=None, help="so many bad frames, not all")
    parser.add_argument("--flips", type=int, default=2_000, help="so many flipped bits")
    given = parser.parse_args()
    fed, (took_s, growth) = run(given.items, given.flips)
    print(f"{CROWD} silent sockets: linked after {took_s:.2f} s, {growth / MIB:+.1f} MiB")
    is_bad = took_s > CROWD_LINK_S_MAX or growth > CROWD_GROWTH_MAX_BYTES
    for name, result in fed.items():
        is_bad = is_bad or result.growth_bytes > GROWTH_MAX_BYTES
        mib = result.growth_bytes / MIB
        print(f"{name}: {result.items} items, {mib:+.1f} MiB, {result.good} good sessions served")
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
