"""Rows with log-probabilities, a few in every turn of the event loop.

Making one into text takes ten times as long as a plain row, and no reader of plain ones, of whichever node, is to wait for a step of
them.

What is said of one session stays in order: its plain rows wait behind its heavy ones, and before anything else is heard of it
those that wait are (`flush`). Bounded: beyond ROWS_WAITING_MAX they are heard at once, so that links are read no faster than that.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from superfluid_core.wire.messages import TokenRow

ROWS_A_TURN = 4
ROWS_WAITING_MAX = 1_024

Hear = Callable[[int, TokenRow], None]


class HeavyRows:
    """Rows that wait for their turn, each with the number of the link that brought it; `hear` takes them."""

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self._rows: deque[tuple[int, TokenRow]] = deque()
        self._sessions: Counter[int] = Counter()
        self._is_due = False

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, session: object) -> bool:
        return session in self._sessions

    def plain(self, link: int, rows: Sequence[TokenRow]) -> Iterator[TokenRow]:
        """Give the rows that need not wait, and keep the others."""
        for row in rows:
            if row.logprobs or row.session in self._sessions:
                self.add(link, row)
            else:
                yield row

    def add(self, link: int, row: TokenRow) -> None:
        """Have `row` heard in a turn of its own; called in a running loop."""
        self._rows.append((link, row))
        self._sessions[row.session] += 1
        while len(self._rows) > ROWS_WAITING_MAX:
            self._hear_first()
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def flush(self, session: int | None = None) -> None:
        """Hear now what waits of `session`, or everything."""
        if session is None:
            while self._rows:
                self._hear_first()
        elif session in self._sessions:
            found = [each for each in self._rows if each[1].session == session]
            self._rows = deque(each for each in self._rows if each[1].session != session)
            del self._sessions[session]
            for link, row in found:
                self._hear(link, row)

    def _turn(self) -> None:
        self._is_due = False
        for _ in range(ROWS_A_TURN):
            if self._rows:
                self._hear_first()
        if self._rows and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _hear_first(self) -> None:
        link, row = self._rows.popleft()
        self._sessions[row.session] -= 1
        if not self._sessions[row.session]:
            del self._sessions[row.session]
        self._hear(link, row)
