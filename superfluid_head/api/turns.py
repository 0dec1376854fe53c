"""A few beginnings of answers in every turn of the event loop.

Reading, checking, templating and tokenizing a request is a millisecond or two of the loop's own time. Fifty agents that ask at the same moment
were all begun in one turn, and every stream of the head stood still for a tenth of a second; now those turns carry tokens between them.
The requests themselves are answered no later for it: the last of a crowd waits for the work of those before it either way.

Who finds nobody waiting begins at once. Bounded: each that waits is a connection, and of these there is a greatest number.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

BEGINNINGS_A_TURN = 2


class Turns:
    """Wraps the application; whatever is posted takes a turn."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._take()
        await self._app(scope, receive, send)

    async def _take(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._turn)
        if self._begun < BEGINNINGS_A_TURN and not self._waiting:
            self._begun += 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _turn(self) -> None:
        """Let the next few begin; as long as somebody begins, there is another turn after this one."""
        self._begun = 0
        while self._waiting and self._begun < BEGINNINGS_A_TURN:
            turn = self._waiting.popleft()
            if not turn.done():  # done: whoever asked has gone
                turn.set_result(None)
                self._begun += 1
        self._is_due = self._begun > 0
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._turn)
