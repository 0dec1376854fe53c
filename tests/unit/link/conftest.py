"""A listening node and heads on loopback, with real sockets and a real clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from superfluid_core.clock import SystemClock
from superfluid_core.limits import LinkLimits
from superfluid_core.link.dial import dial
from superfluid_core.link.link import Link
from superfluid_core.link.listen import Listener
from superfluid_core.link.tls import Credentials, FleetKeys, write_key_file
from superfluid_core.session import Determinism
from superfluid_core.wire.messages import Hello, Refuse, Welcome

WELCOME = Welcome(
    minor=0,
    features=("embed",),
    node="node-1",
    boot="boot-1",
    models=(),
    stamp_ns=1,
    determinism=Determinism.EXACT,
    sessions_max=16,
    lease_ttl_max_ms=30_000,
    idle_timeout_ms=120_000,
)


@dataclass
class Fleet:
    """One node on loopback; `links` are what its handler was given."""

    keys: Credentials | None
    limits: LinkLimits = field(default_factory=LinkLimits)
    answer: Welcome | Refuse = WELCOME
    handler: Callable[[Link], Any] | None = None
    status_source: Callable[[], Any] | None = None
    links: list[Link] = field(default_factory=list)
    port: int = 0
    listener: Listener | None = None

    async def hold(self, link: Link) -> None:
        """Keep the link and read nothing until it closes."""
        self.links.append(link)
        await link.wait_closed()

    @asynccontextmanager
    async def serving(self, host: str = "127.0.0.1") -> AsyncIterator[Fleet]:
        self.listener = Listener(
            self.handler or self.hold,
            lambda hello: self.answer,
            self.keys,
            "node-1",
            self.limits,
            SystemClock(),
            self.status_source,
        )
        bound = await self.listener.start(host, 0)
        self.port = bound[0][1]
        async with asyncio.TaskGroup() as group:
            group.create_task(self.listener.serve())
            try:
                yield self
            finally:
                await self.listener.close()

    async def dial(
        self, keys: Credentials | None = None, head: str = "head-1", **changes: Any
    ) -> Link:
        """Dial with the node's own keys unless told otherwise."""
        limits = replace(LinkLimits(), **changes)
        return await dial(
            "127.0.0.1",
            self.port,
            keys=keys or self.keys,
            hello=Hello(0, ("embed", "prefix"), head),
            limits=limits,
            clock=SystemClock(),
        )


@pytest.fixture
def keys(tmp_path: Path) -> FleetKeys:
    return write_key_file(tmp_path / "fleet.key")


@pytest.fixture
def other_keys(tmp_path: Path) -> FleetKeys:
    return write_key_file(tmp_path / "other.key")


@pytest.fixture
def make_fleet() -> type[Fleet]:
    return Fleet


@pytest.fixture
def refusals(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The causes of the refusals that were logged so far."""
    caplog.set_level(logging.WARNING, "superfluid.link")
    return lambda: [
        str(getattr(record, "superfluid_fields", {}).get("cause"))
        for record in caplog.records
        if record.getMessage() == "refused a link"
    ]
