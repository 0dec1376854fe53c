"""What a node remembers of its links and of the sessions on them. State and its upkeep, no policy.

`Rate` is a token bucket in integer nanoseconds; it bounds how fast one head may open sessions.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from superfluid_core.clock import SECOND
from superfluid_core.errors import LocalProtocolError, RemoteProtocolError
from superfluid_core.link.link import Link, LinkClosedError
from superfluid_core.logs import log
from superfluid_core.session import QosClass, SessionKey
from superfluid_core.tracing.context import TraceContext
from superfluid_core.wire.messages import Message, Opened
from superfluid_core.wire.notes import Trace
from superfluid_noded.sessions import Placement, SessionTable

logger = logging.getLogger(__name__)

OPENS_PER_SECOND = 200
OPENS_BURST = 400
ASKS_MAX = 16
HELD_S = 0.002
"""How long what nobody waits for may wait for company: a frame alone is a system call here and a turn of the loop there."""


@dataclass(slots=True)
class Rate:
    """At most `burst` at once and `per_second` in the long run."""

    per_second: int
    burst: int
    full_ns: int = 0

    def take(self, now_ns: int) -> bool:
        """Take one; False when there is none left. `full_ns` is when the bucket will be full again."""
        cost_ns = SECOND // self.per_second
        start_ns = max(self.full_ns, now_ns)
        if start_ns + cost_ns - now_ns > self.burst * cost_ns:
            return False
        self.full_ns = start_ns + cost_ns
        return True


@dataclass(slots=True, eq=False)
class Head:
    """One link to a head. `asks` are long answers that still have to leave, piece by piece. `wants_timing`: it knows TIMING.

    `trace` is the last TRACE, for the OPEN that follows it. `held` leaves with the next frames: at most one for each live session.
    """

    link: Link
    number: int
    name: str
    opens: Rate = field(default_factory=lambda: Rate(OPENS_PER_SECOND, OPENS_BURST))
    asks: deque[Iterable[Message]] = field(default_factory=deque)
    has_asks: asyncio.Event = field(default_factory=asyncio.Event)
    wants_timing: bool = False
    trace: Trace | None = None
    held: list[Opened] = field(default_factory=list)

    def ask(self, answer: Iterable[Message]) -> None:
        """Queue a long answer. Raises RemoteProtocolError when the head asks faster than it reads."""
        if len(self.asks) >= ASKS_MAX:
            raise RemoteProtocolError(f"more than {ASKS_MAX} asks without reading the answers")
        self.asks.append(answer)
        self.has_asks.set()


@dataclass(slots=True, eq=False)
class Live:
    """One live session. Times are monotonic nanoseconds, 0 while it has not happened; `outputs` counts delivered ids too.

    `delivered` is how many came with its OPEN; the steps are the engines' count when it got a lane and when its first token came.
    """

    placement: Placement
    head: Head
    qos: QosClass
    tenant: str
    submitted_ns: int
    reported_ns: int
    outputs: int
    started_ns: int = 0
    emitted_ns: int = 0
    done: int = 0
    total: int = 0
    cached: int = 0
    delivered: int = 0
    first_ns: int = 0
    started_step: int = 0
    first_step: int = 0
    trace: TraceContext | None = None

    @property
    def run_key(self) -> SessionKey:
        """Name the placement towards the scheduler: never the same twice, whatever heads send."""
        return SessionKey(self.head.name, self.placement.serial)

    @property
    def number(self) -> int:
        return self.placement.key.session

    @property
    def epoch(self) -> int:
        return self.placement.epoch


class Roster:
    """All links and sessions of the process, and the one way to end a session's part here."""

    def __init__(self, table: SessionTable) -> None:
        self.table = table
        self.heads: dict[int, Head] = {}
        self.live: dict[int, Live] = {}
        self._links_seen = 0
        self.on_over: Callable[[Live, str], None] = lambda _live, _outcome: None

    def admit(self, link: Link, name: str) -> Head:
        """Take in a new link under a number of its own."""
        self._links_seen += 1
        head = Head(link, self._links_seen, name)
        self.heads[head.number] = head
        return head

    def forget(self, live: Live, outcome: str, *, purge: bool) -> bool:
        """End a session here, once; with `purge` frames that still wait in its link are withdrawn. `outcome` is for traces."""
        if self.live.pop(live.placement.serial, None) is None:
            return False
        self.table.close(live.placement)
        self.on_over(live, outcome)
        if purge:
            head, own = live.head, (live.number, live.epoch)
            head.held = [each for each in head.held if (each.session, each.epoch) != own]
            head.link.purge(*own)
        return True

    def send(self, head: Head, messages: Iterable[Message]) -> None:
        """Queue frames. A link that cannot take them is closing, and its handler cleans up.

        A message that the protocol refuses is a bug of ours: it costs that link, never the other heads.
        """
        if head.held:
            messages, head.held = (*head.held, *messages), []
        try:
            head.link.send_all(messages)
        except LinkClosedError:
            return
        except LocalProtocolError as error:
            log(logger, "error", "a message cannot be sent", head=head.name, cause=error.message)
            head.link.abort("internal error")

    def hold(self, head: Head, messages: Iterable[Opened]) -> None:
        """Let frames wait for the next ones of their head, but not for long: a short step's tokens carry them along."""
        if not head.held:
            asyncio.get_running_loop().call_later(HELD_S, self._let_go, head)
        head.held += messages

    def _let_go(self, head: Head) -> None:
        if head.held:
            self.send(head, ())
