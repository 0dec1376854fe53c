"""One whole conversation of a head and a node over a real link, through a chaos proxy, small enough to be struck at every byte.

Both ends run here, over real sockets, with or without TLS; what each end read is compared with what the other one said. The
law: what was read is a prefix of what was said, whatever happened in between, and the end of a broken link is told.

python -m tests.chaos.exchange --wound bit --step 5     strike every fifth byte of both directions; counts as JSON
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from superfluid_core.clock import SystemClock
from superfluid_core.limits import LinkLimits
from superfluid_core.link.dial import DialError, dial
from superfluid_core.link.heartbeat import Liveness, Verdict
from superfluid_core.link.link import Link, LinkClosedError
from superfluid_core.link.listen import Listener
from superfluid_core.link.tls import FleetKeys, write_key_file
from superfluid_core.session import Determinism, FinishReason
from superfluid_core.wire.messages import (
    CancelSession,
    Closed,
    CloseReason,
    Goaway,
    Hello,
    Message,
    TokenRow,
    Tokens,
    Welcome,
)
from tests.chaos.proxy import ChaosProxy, End, Way

ROWS = 72
ORDERS = 24
SECONDS = 5.0
LOOK_S = 0.25
FAST = replace(LinkLimits(), new_per_second_per_address=100_000, new_burst_per_address=100_000)
WELCOME = Welcome(
    minor=0, features=(), node="node-0", boot="boot-0", models=(), stamp_ns=1,
    determinism=Determinism.EXACT, sessions_max=16, lease_ttl_max_ms=30_000,
    idle_timeout_ms=120_000,
)  # fmt: skip


def answers() -> list[Message]:
    """What the node says: two sessions' tokens, their last rows, a close."""
    rows: list[Message] = []
    for step in range(ROWS):
        ids = tuple(1_000 + 17 * step + n for n in range(3))
        is_last = step == ROWS - 1
        finish = FinishReason.LENGTH if is_last else None
        rows.append(
            Tokens((TokenRow(7, 1, 3 * step, ids, finish), TokenRow(8, 2, 3 * step, ids[::-1])))
        )
    return [*rows, Closed(8, 2, CloseReason.CANCELLED)]


def orders() -> list[Message]:
    """What the head says."""
    return [CancelSession(100 + n, 1, f"order {n}") for n in range(ORDERS)]


@dataclass(slots=True)
class Outcome:
    """What each end read, and how the link ended for the head ("" when everything was read first)."""

    by_head: list[Message]
    by_node: list[Message]
    reason: str

    @property
    def is_whole(self) -> bool:
        return self.by_head == answers() and self.by_node == orders()

    @property
    def is_true(self) -> bool:
        """Nothing was read that was not said, in that order."""
        return is_prefix(self.by_head, answers()) and is_prefix(self.by_node, orders())


def is_prefix(read: list[Message], said: list[Message]) -> bool:
    return read == said[: len(read)]


async def read_all(link: Link, into: list[Message], count: int) -> None:
    """Read so many messages. Raises LinkClosedError."""
    while len(into) < count:
        message = await link.receive()
        if not isinstance(message, Goaway):
            into.append(message)


async def watch(link: Link) -> None:
    """Judge the silence of a link with sessions by the product's own rule, and end it when the node counts as dead.

    A flipped bit in the length of a TLS record leaves a record that never ends: no error comes, nothing comes.
    """
    alive = Liveness(FAST, link.last_received_ns)
    while True:
        await asyncio.sleep(LOOK_S)
        alive.on_bytes(link.last_received_ns)
        if alive.verdict(SystemClock().now_ns(), sessions_live=2) is Verdict.DEAD:
            await link.close("silent")
            return


class Bench:
    """A listening node behind a proxy, and heads that dial it one after the other."""

    def __init__(self, keys: FleetKeys | None) -> None:
        self._keys = keys
        self._read: list[Message] = []
        self._serving: dict[int, asyncio.Event] = {}
        self.listener = Listener(
            self._serve, lambda _hello: WELCOME, keys, "node-0", FAST, SystemClock()
        )
        self._proxy: ChaosProxy | None = None
        self.passed: Counter[Way] = Counter()

    def tap(self, connection: int, way: Way, data: bytes) -> None:
        """Count the bytes of all conversations, in the proxy's thread."""
        self.passed[way] += len(data)

    @property
    def proxy(self) -> ChaosProxy:
        assert self._proxy is not None, "outside of `serving`"
        return self._proxy

    async def _serve(self, link: Link) -> None:
        into, over = self._read, asyncio.Event()
        self._serving[id(over)] = over
        try:
            for message in answers():
                link.send(message)
            await read_all(link, into, ORDERS)
            await link.wait_closed()
        finally:
            del self._serving[id(over)]
            over.set()

    async def once(self, way: Way | None = None, offset: int = 0, **wound: End | int) -> Outcome:
        """One conversation, struck at byte `offset` of `way`."""
        self._read = []
        by_head: list[Message] = []
        if way is not None:
            self.proxy.wound_next(way, offset, **wound)  # type: ignore[arg-type]  # passed on as given
        host, _, port = self.proxy.address.rpartition(":")
        hello = Hello(0, (), "head-0")
        reason = ""
        try:
            async with asyncio.timeout(SECONDS):
                link = await dial(
                    host, int(port), keys=self._keys, hello=hello, limits=FAST, clock=SystemClock()
                )
        except (DialError, TimeoutError) as error:
            return Outcome([], [], f"dial: {error!r}")
        watching = asyncio.create_task(watch(link))
        try:
            async with asyncio.timeout(SECONDS):
                for message in orders():
                    link.send(message)
                await read_all(link, by_head, len(answers()))
        except LinkClosedError as error:
            reason = error.reason
        except TimeoutError:
            reason = "LATE"
        finally:
            watching.cancel()
        await link.close("done")
        async with asyncio.timeout(SECONDS):
            for over in list(self._serving.values()):
                await over.wait()
        return Outcome(by_head, self._read, reason)


@asynccontextmanager
async def serving(keys: FleetKeys | None) -> AsyncIterator[Bench]:
    told = [logging.getLogger(name) for name in ("superfluid.link", "asyncio")]
    levels = [logger.level for logger in told]
    for logger in told:
        logger.setLevel(logging.CRITICAL)  # a line a strike
    try:
        async with _served(keys) as bench:
            yield bench
    finally:
        for logger, level in zip(told, levels, strict=True):
            logger.setLevel(level)


@asynccontextmanager
async def _served(keys: FleetKeys | None) -> AsyncIterator[Bench]:
    bench = Bench(keys)
    ((_, port),) = await bench.listener.start("127.0.0.1", 0)
    proxy = await asyncio.to_thread(ChaosProxy, f"127.0.0.1:{port}", bench.tap)
    bench._proxy = proxy
    async with asyncio.TaskGroup() as group:
        group.create_task(bench.listener.serve())
        try:
            yield bench
        finally:
            await bench.listener.close()
            await asyncio.to_thread(proxy.close)


async def exchange_struck(bench: Bench, offsets: range, way: Way, wound: str) -> Counter[str]:
    """Repeat one conversation, struck at every offset: `wound` is fin, rst or bit. Counts what came of it."""
    came: Counter[str] = Counter()
    for number, offset in enumerate(offsets):
        if wound == "bit":
            outcome = await bench.once(way, offset, bit=number % 8)
        else:
            outcome = await bench.once(way, offset, end=End(wound))
        came["struck"] += 1
        came["false"] += not outcome.is_true
        came["late"] += outcome.reason == "LATE"
        came["whole"] += outcome.is_whole
    return came


async def strike_every(wound: str, step: int, keys: FleetKeys | None) -> Counter[str]:
    """Strike every `step`-th byte of the unbroken conversation; cuts go downwards, flips both ways."""
    came: Counter[str] = Counter()
    async with serving(keys) as bench:
        assert (await bench.once()).is_whole, "the unbroken conversation"
        sizes = dict(bench.passed)
        for way in Way if wound == "bit" else (Way.DOWN,):
            came["bytes"] += sizes[way]
            came += await exchange_struck(bench, range(0, sizes[way], step), way, wound)
    return came


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.exchange")
    parser.add_argument("--wound", choices=["fin", "rst", "bit"], required=True)
    parser.add_argument("--step", type=int, default=1)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        # what only TLS can notice is struck under TLS; cuts are worst where a frame may end anywhere
        keys = write_key_file(Path(folder) / "fleet.key") if options.wound == "bit" else None
        came = asyncio.run(strike_every(options.wound, options.step, keys))
    print(json.dumps({"false": 0, "late": 0, "whole": 0, **came}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
