"""The node's tasks: one per link, one for STATUS, one for leases, one for the supervisor. No policy.

It joins the agent (what heads say), the teller (what heads are told) and the engine loops. Long answers leave a piece at a time, never so
many that tokens would wait behind them. Whoever runs `handle` owns the link; the other coroutines are the server's tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from superfluid_core.clock import Clock
from superfluid_core.errors import RemoteProtocolError
from superfluid_core.limits import KIB, LinkLimits, WireLimits
from superfluid_core.link.link import Link, LinkClosedError
from superfluid_core.logs import log
from superfluid_core.wire.messages import (
    FileAsk,
    Goaway,
    LinkError,
    Message,
    SessionRow,
    SessionsAsk,
    StatsAsk,
    Status,
)
from superfluid_noded.agent import Agent
from superfluid_noded.answers import file_pieces, session_pieces, stats_pieces
from superfluid_noded.heads import Head
from superfluid_noded.serving import Serving, sessions, status_of
from superfluid_noded.teller import Teller

logger = logging.getLogger(__name__)

SWEEP_S = 0.1
PIECE_PAUSE_S = 0.002
MOMENT_S = 0.0009
"""Less than a millisecond, but long enough for a waiting thread to take the interpreter."""
CONGESTED_BYTES = 16 * KIB
WAITING_STATES = frozenset({"queued", "prefilling"})

Figures = Callable[[], dict[str, Any]]


class Service:
    """Runs an agent on the event loop."""

    def __init__(
        self,
        agent: Agent,
        teller: Teller,
        servings: Sequence[Serving],
        clock: Clock,
        figures: Figures,
    ) -> None:
        self._agent = agent
        self._teller = teller
        self._servings = servings
        self._clock = clock
        self._figures = figures
        self._limits: LinkLimits = agent.limits
        self._wire = WireLimits()
        self._changed = asyncio.Event()
        self.on_farewell: Callable[[Link], None] = lambda _link: None
        agent.on_change = self._changed.set

    # --- links ------------------------------------------------------------------------------------

    async def handle(self, link: Link) -> None:
        """Serve one link until it ends; the Listener's handler."""
        head = self._agent.attach(link)
        reason = "the node stops"
        try:
            async with asyncio.TaskGroup() as group:
                answering = group.create_task(self._answer(head))
                reason = await self._read(head)
                answering.cancel()
        finally:
            self._agent.detach(head, reason)

    async def _read(self, head: Head) -> str:
        """Pass on messages until the link ends; returns why it did."""
        head.link.offer(partial(self._is_taken, head))
        while True:
            try:
                message = await head.link.receive()
                self._take(head, message)
            except LinkClosedError as closed:
                return closed.reason
            except RemoteProtocolError as breach:
                log(logger, "warning", "protocol breach", head=head.name, cause=breach.message)
                self._agent.roster.send(head, (LinkError(breach.code, breach.message),))
                await head.link.close(breach.message)
                return breach.message

    def _is_taken(self, head: Head, message: Message) -> bool:
        """Take what comes at once: an OPEN waits for no turn of the loop."""
        self._take(head, message)
        return True

    def _take(self, head: Head, message: Message) -> None:
        match message:
            case FileAsk():
                head.ask(file_pieces(message, self._agent.card, self._wire))
            case StatsAsk(request=request):
                head.ask(stats_pieces(request, self._figures(), self._wire))
            case SessionsAsk(request=request):
                head.ask(session_pieces(request, self._session_rows()))
            case Goaway():
                self.on_farewell(head.link)
            case _:
                self._agent.receive(head, message)

    async def _answer(self, head: Head) -> None:
        """Send long answers, a piece when there is room for one."""
        while True:
            await head.has_asks.wait()
            for piece in head.asks.popleft():
                while _is_congested(head.link):  # noqa: ASYNC110 - a link has no such event
                    await asyncio.sleep(PIECE_PAUSE_S)
                self._agent.roster.send(head, (piece,))
                await asyncio.sleep(0)
            if not head.asks:
                head.has_asks.clear()

    def _session_rows(self) -> list[SessionRow]:
        live = self._agent.roster.live
        rows: list[SessionRow] = []
        for view in sessions(self._servings):
            known = live.get(view.key.session)
            if known is not None:
                rows.append(
                    SessionRow(
                        known.head.name,
                        known.number,
                        view.state,
                        view.qos,
                        view.tenant,
                        view.prompt,
                        view.output,
                    )
                )
        return rows

    # --- time -------------------------------------------------------------------------------------

    def status(self) -> Status:
        """Describe load and liveness of this moment."""
        stamp_ns = self._clock.boot_ns()
        return status_of(self._servings, stamp_ns, draining=self._agent.is_draining)

    async def tell_status(self) -> None:
        """STATUS whenever the load changed and `status_ms` apart while sessions live, never more often than `status_ms_min`.

        A change is told a moment later: made at once, STATUS would keep the engine's thread from the step that the change brought.
        """
        while True:
            if self._agent.roster.live:
                try:
                    async with asyncio.timeout(self._limits.status_ms / 1e3):
                        await self._changed.wait()
                except TimeoutError:
                    pass
            else:
                await self._changed.wait()
            if self._changed.is_set():
                await asyncio.sleep(MOMENT_S)
            self._changed.clear()
            status = self.status()
            for head in list(self._agent.roster.heads.values()):
                self._agent.roster.send(head, (status,))
            await asyncio.sleep(self._limits.status_ms_min / 1e3)

    async def keep_time(self) -> None:
        """Fence lapsed leases, end drains that took too long, reassure heads about sessions that wait."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._agent.end_lapsed()
            self._agent.end_drained()
            self._agent.end_pins()
            silent = self._teller.silent()
            if silent:
                waiting = {
                    view.key.session
                    for view in sessions(self._servings)
                    if view.state in WAITING_STATES
                }
                self._teller.reassure(live for live in silent if live.placement.serial in waiting)


def _is_congested(link: Link) -> bool:
    """Whether what was written before still waits for the peer to read it."""
    transport = link.transport
    if transport is None or not link.is_open:
        return False
    return transport.get_write_buffer_size() > CONGESTED_BYTES
