"""A whole node in this process, on loopback, with a real key and real links from real heads."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from superfluid_core.clock import SystemClock
from superfluid_core.engine.base import Engine
from superfluid_core.engine.script import load_script
from superfluid_core.engine.sim import NumberedTexts, SimEngine, SimOptions, ThreadPause
from superfluid_core.limits import LinkLimits
from superfluid_core.link.dial import dial
from superfluid_core.link.keys import keys_from_secrets
from superfluid_core.link.link import Link, LinkClosedError
from superfluid_core.link.tls import Credentials
from superfluid_core.session import QosClass, SamplingParams
from superfluid_core.wire.messages import (
    MINOR,
    Closed,
    Hello,
    Message,
    Open,
    Refuse,
    Status,
    TokenRow,
    Tokens,
    Welcome,
)
from superfluid_noded.build import Built
from superfluid_noded.config import Surroundings, build_config, read_settings
from superfluid_noded.node import Node
from superfluid_noded.recording import Recordings

KEYS = keys_from_secrets((b"k" * 32,))
TEXTS = NumberedTexts(1024)
NUMBERS = itertools.count(1)
"""No two nodes have one identity: a head would take the second for the first one, come back."""
M = TypeVar("M", bound=Message)


class JumpClock(SystemClock):
    """The machine's clock, whose suspend-proof part can be made to jump ahead."""

    def __init__(self) -> None:
        self.jumped_ns = 0

    def boot_ns(self) -> int:
        return super().boot_ns() + self.jumped_ns


class HeadEnd:
    """A head's end of one link: opens sessions and sorts what comes back."""

    def __init__(self, link: Link, clock: JumpClock) -> None:
        self.link = link
        self.clock = clock
        self.messages: list[Message] = []
        self.changed = asyncio.Event()

    async def read(self) -> None:
        try:
            while True:
                self.messages.append(await self.link.receive())
                self.changed.set()
        except LinkClosedError:
            self.changed.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def open(
        self,
        session: int = 1,
        epoch: int = 1,
        prompt: str | tuple[int, ...] = "hello",
        **fields: Any,
    ) -> None:
        values: dict[str, Any] = {
            "model": "m", "prompt": tuple(prompt.encode()) if isinstance(prompt, str) else prompt, "delivered": (), "max_output": 16,
            "min_output": 0, "sampling": SamplingParams(seed=3), "choice": 0, "stop_ids": (),
            "ignore_eos": False, "grammar": None, "qos": QosClass.AGENT, "tenant": "t",
            "batch_invariant": False, "cache_salt": b"", "lease_stamp_ns": self.clock.boot_ns() - 1,
            "lease_ttl_ms": 10_000,
        }  # fmt: skip
        self.link.send(Open(session=session, epoch=epoch, **(values | fields)))

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.messages if isinstance(message, kind)]

    def rows(self, session: int = 1) -> list[TokenRow]:
        frames = self.of(Tokens)
        return [row for frame in frames for row in frame.rows if row.session == session]

    def ids(self, session: int = 1) -> list[int]:
        ids: list[int] = []
        for row in self.rows(session):
            assert row.first == len(ids)
            ids += row.ids
        return ids

    def closed(self, session: int = 1) -> Closed | None:
        found = [message for message in self.of(Closed) if message.session == session]
        assert len(found) <= 1
        return found[0] if found else None

    def refused(self, session: int = 1) -> Refuse | None:
        found = [message for message in self.of(Refuse) if message.session == session]
        return found[-1] if found else None

    def is_finished(self, session: int = 1) -> bool:
        rows = self.rows(session)
        return bool(rows) and rows[-1].finish is not None

    def status(self) -> Status | None:
        found = self.of(Status)
        return found[-1] if found else None


class NodeRig:
    """A node that serves `m`; `link` makes another head's link to it."""

    def __init__(self, node: Node, clock: JumpClock, group: asyncio.TaskGroup, port: int) -> None:
        self.node = node
        self.clock = clock
        self._group = group
        self.port = port
        self.readers: list[asyncio.Task[None]] = []

    async def link(self, head: str = "head-1", features: tuple[str, ...] = ("files",)) -> HeadEnd:
        hello = Hello(MINOR, features, head)
        link = await dial(
            "127.0.0.1", self.port, keys=KEYS, hello=hello, limits=LinkLimits(), clock=self.clock
        )
        assert isinstance(link.peer, Welcome)
        end = HeadEnd(link, self.clock)
        self.readers.append(self._group.create_task(end.read()))
        return end

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - looks into the node, which sets no event for tests
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(
    script: str = "",
    *,
    files: dict[str, bytes] | None = None,
    flags: dict[str, Any] | None = None,
    fim: dict[str, Any] | None = None,
    keys: Credentials = KEYS,
    host: str = "127.0.0.1",
    engine: Engine | None = None,
    **options: Any,
) -> AsyncIterator[NodeRig]:
    """Serve a simulated engine of these options, or the given one."""
    clock = JumpClock()
    if engine is None:
        sim = SimOptions(**({"lanes": 4, "blocks": 512, "eos_probability": 0.0} | options))
        said = load_script(script, TEXTS)
        engine = SimEngine(TEXTS, sim, clock, pause=ThreadPause(), script=said)
    identity = f"node-{next(NUMBERS)}"
    given = {"model": "m", "engine": "mock", "identity": identity} | (flags or {})
    config = build_config(read_settings(given, None), Surroundings(None, None, None, None))
    built = Built(engine, engine.describe(), files or {})
    models: list[tuple[tuple[str, ...], Built]] = [(("m", "alias"), built)]
    if fim is not None:
        second = SimEngine(TEXTS, SimOptions(**fim), clock, pause=ThreadPause())
        models.append((("fim",), Built(second, second.describe(), {})))
    record = (
        None
        if config.record is None
        else Recordings(config.record, len(models), has_content=config.record_content)
    )
    node = Node(config, models, keys, clock, record)
    ((_, port),) = await node.listener.start(host, 0)
    async with asyncio.TaskGroup() as group:
        tasks = [
            *(group.create_task(loop.run()) for loop in node.loops),
            group.create_task(node.service.tell_status()),
            group.create_task(node.service.keep_time()),
        ]
        listener = group.create_task(node.listener.serve())
        rig = NodeRig(node, clock, group, port)
        try:
            yield rig
        finally:
            await node.listener.close()
            await asyncio.wait({listener, *rig.readers})
            for task in tasks:
                task.cancel()
    if record is not None:
        record.close()


def check(body: Callable[[NodeRig], Awaitable[None]], script: str = "", **options: Any) -> None:
    """Run `body` against a fresh node; afterwards nothing may be held."""

    async def main() -> None:
        async with serving(script, **options) as rig:
            await body(rig)
            node = rig.node
        assert not node.agent.roster.live
        assert not node.agent.roster.heads
        for model in node.servings:
            assert model.scheduler.sessions() == []
            assert model.scheduler.stats().blocks_used == 0

    asyncio.run(main())
