"""What nobody waits for leaves with the next frames of its head, or soon without them; what was withdrawn never leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, cast

from superfluid_core.clock import SECOND
from superfluid_core.link.link import Link
from superfluid_core.session import QosClass, SessionKey
from superfluid_core.wire.messages import Goaway, Message, Opened
from superfluid_noded.heads import HELD_S, Head, Live, Roster
from superfluid_noded.sessions import LeaseLimits, SessionTable


class _Line:
    """A link that keeps what is sent, a list per write."""

    def __init__(self) -> None:
        self.writes: list[list[Message]] = []
        self.written = asyncio.Event()

    def send_all(self, messages: Iterable[Message]) -> None:
        self.writes.append(list(messages))
        self.written.set()

    def purge(self, _session: int, _epoch: int) -> int:
        return 0


def _check(body: Callable[[Roster, Head, _Line], Awaitable[None]]) -> None:
    async def main() -> None:
        line: Any = _Line()
        roster = Roster(SessionTable(LeaseLimits(8, 60_000)))
        await body(roster, roster.admit(cast("Link", line), "head"), line)

    asyncio.run(main())


def test_it_leaves_in_front_of_the_next_frames_and_once() -> None:
    async def body(roster: Roster, head: Head, line: _Line) -> None:
        roster.hold(head, [Opened(1, 1, 0, 0)])
        roster.hold(head, [Opened(2, 1, 0, 0)])
        assert line.writes == []
        roster.send(head, [Goaway("more")])
        expected = [Opened(1, 1, 0, 0), Opened(2, 1, 0, 0), Goaway("more")]
        assert line.writes == [expected]
        await asyncio.sleep(5 * HELD_S)
        assert line.writes == [expected]

    _check(body)


def test_it_leaves_alone_when_nothing_follows() -> None:
    async def body(roster: Roster, head: Head, line: _Line) -> None:
        for session in (1, 2):
            roster.hold(head, [Opened(session, 1, 0, 0)])
            async with asyncio.timeout(30):
                await line.written.wait()
            line.written.clear()
            assert line.writes[-1] == [Opened(session, 1, 0, 0)]

    _check(body)


def test_a_session_that_is_withdrawn_says_nothing() -> None:
    async def body(roster: Roster, head: Head, line: _Line) -> None:
        opening = roster.table.open(SessionKey("head", 1), 1, head.number, (0, 60_000), SECOND)
        assert opening.placement is not None
        live = Live(opening.placement, head, QosClass.AGENT, "tenant", 0, 0, 0)
        roster.live[live.placement.serial] = live
        roster.hold(head, [Opened(1, 1, 0, 0), Opened(2, 1, 0, 0)])
        assert roster.forget(live, "fenced", purge=True)
        roster.send(head, ())
        assert line.writes == [[Opened(2, 1, 0, 0)]]

    _check(body)
