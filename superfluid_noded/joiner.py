"""Links that this node dials itself: `--join HOST:PORT`, for nodes that no head could reach.

One task per address keeps as many links there as the head asks for (`conns-N` among its features, else one). A head that says
GOAWAY wants a fresh link before the old one ends: that one is dialled at once, and the old one lives on until the head closes it.
A head that says nothing for as long as a lease lasts is gone without a word: its link is closed and another dialled, since nobody
else would. Full-jitter backoff as on the other side; a link that ended soon counts as a failure, so a head that refuses this node by
name is not hammered. What heads then say is none of its business: links go to the same handler as those that were accepted.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from superfluid_core.clock import MS
from superfluid_core.link.addresses import format_address
from superfluid_core.link.dial import DialError, join
from superfluid_core.link.link import Link, LinkClosedError
from superfluid_core.link.setup import LinkSetup
from superfluid_core.link.shake import Shake
from superfluid_core.logs import log
from superfluid_core.wire.messages import Hello

logger = logging.getLogger(__name__)

CONNS_FEATURE = "conns-"
SHORT_MS = 5_000
COMPLAINT_MS = 60_000
DRAINING_POLL_S = 0.5
SILENCE_POLL_S = 1.0
SILENT = "the head has not been heard for as long as a lease lasts"


@dataclass(slots=True, eq=False)
class _Head:
    """One address and what stands there. `wanted` is how many links its head asked for."""

    host: str
    port: int
    links: list[Link] = field(default_factory=list)
    wanted: int = 1
    failures: int = 0
    complaint: str = ""
    told_ns: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def lacks(self) -> bool:
        fresh = [link for link in self.links if link.is_open and not link.is_going_away]
        return len(fresh) < self.wanted


class Joiner:
    """Keeps the links. `handler` owns an established one until it returns; `is_leaving` ends the dialling."""

    def __init__(
        self,
        addresses: tuple[tuple[str, int], ...],
        shake: Shake,
        setup: LinkSetup,
        handler: Callable[[Link], Awaitable[None]],
        is_leaving: Callable[[], bool],
    ) -> None:
        self.joins = 0
        self.refusals = 0
        self._heads = [_Head(host, port) for host, port in addresses]
        self._shake = shake
        self._setup = setup
        self._handler = handler
        self._is_leaving = is_leaving
        self._random = random.SystemRandom()

    async def run(self) -> None:
        """Keep joined until cancelled; then every link is closed."""
        async with asyncio.TaskGroup() as group:
            for head in self._heads:
                group.create_task(self._keep(head))

    def farewell(self, link: Link) -> None:
        """Note that a head said GOAWAY: it wants another link, if this one is ours."""
        for head in self._heads:
            if link in head.links:
                head.changed.set()

    async def close(self, reason: str) -> None:
        """Close every link with the reason."""
        links = [link for head in self._heads for link in head.links]
        await asyncio.gather(*(link.close(reason) for link in links))

    # --- one head -----------------------------------------------------------------------------------

    async def _keep(self, head: _Head) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                link = await self._dial(head)
                if link is not None:
                    head.links.append(link)
                    head.wanted = _wanted(link)
                    group.create_task(self._serve(head, link))
                await self._lacking(head)
                await self._rest(head)

    async def _lacking(self, head: _Head) -> None:
        while not head.lacks or self._is_leaving():
            head.changed.clear()
            try:
                async with asyncio.timeout(DRAINING_POLL_S if head.lacks else SILENCE_POLL_S):
                    await head.changed.wait()
            except TimeoutError:
                self._drop_silent(head)

    def _drop_silent(self, head: _Head) -> None:
        """Close what nothing comes over: a head that lives pings several times in a lease, and no session outlives one."""
        now_ns, limits = self._setup.clock.now_ns(), self._setup.limits
        for link in list(head.links):
            if link.is_open and now_ns - link.last_received_ns >= limits.lease_ttl_ms * MS:
                link.abort(SILENT)

    async def _dial(self, head: _Head) -> Link | None:
        try:
            return await join(head.host, head.port, self._shake, self._setup)
        except DialError as error:
            self._failed(head, error.cause)
            return None

    async def _serve(self, head: _Head, link: Link) -> None:
        clock = self._setup.clock
        self.joins += 1
        where = format_address(head.host, head.port)
        log(logger, "info", "joined a head", head=where, remote=link.remote)
        try:
            await self._handler(link)
        except LinkClosedError:
            pass
        except asyncio.CancelledError:
            link.abort("the node stops")
            raise
        except Exception as error:  # noqa: BLE001 - one link must not take the others along
            log(logger, "error", "a link's handler failed", peer=where, cause=repr(error))
        finally:
            link.abort("the handler has ended")
            head.links.remove(link)
            if clock.now_ns() - link.opened_ns >= SHORT_MS * MS:
                head.failures = 0
            elif not any(other.is_open for other in head.links):
                self._failed(head, f"the link ended at once: {link.close_reason}")
            head.changed.set()

    async def _rest(self, head: _Head) -> None:
        """Wait before the next dial: full jitter, doubling, until a link has lasted."""
        limits = self._setup.limits
        longest_ms = min(
            limits.dial_backoff_ms_max, limits.dial_backoff_ms_min << min(head.failures, 16)
        )
        await asyncio.sleep(self._random.uniform(0.0, longest_ms / 1_000))

    def _failed(self, head: _Head, text: str) -> None:
        """Count a failure; log a reason once, then again only when it changes or after a minute."""
        self.refusals += 1
        head.failures += 1
        now_ns = self._setup.clock.now_ns()
        if text == head.complaint and now_ns - head.told_ns < COMPLAINT_MS * MS:
            return
        head.complaint, head.told_ns = text, now_ns
        where = format_address(head.host, head.port)
        log(logger, "warning", f"cannot join {where}: {text}; retrying")


def _wanted(link: Link) -> int:
    """How many links the head wants."""
    assert isinstance(link.peer, Hello), "a node's peer says HELLO"
    for feature in link.peer.features:
        count = feature.removeprefix(CONNS_FEATURE)
        if feature != count and count.isascii() and count.isdigit() and len(count) <= 2:
            return max(1, int(count))
    return 1
