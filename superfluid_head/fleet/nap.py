"""A wait that others can cut short. An idle link is looked at seldom; when something is placed on its node, it is looked at soon.

Owns one timer at a time and nothing else; times are the caller's.
"""

from __future__ import annotations

import asyncio


class Nap:
    """The waits of one task."""

    def __init__(self) -> None:
        self._end: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    @property
    def left_s(self) -> float | None:
        """How long the wait still lasts; None without one."""
        return None if self._timer is None else self._due_s - asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Wait so long, or as long as `shorten` says meanwhile."""
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        self._set(loop, seconds)
        try:
            await self._end
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._end = self._timer = None

    def shorten(self, seconds: float) -> bool:
        """Have the wait, if there is one, end in so long at the latest. Returns whether it would have been longer."""
        loop = asyncio.get_running_loop()
        if self._timer is None or loop.time() + seconds >= self._due_s:
            return False
        self._timer.cancel()
        self._set(loop, seconds)
        return True

    def _set(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._due_s = loop.time() + seconds
        self._timer = loop.call_later(seconds, self._over)

    def _over(self) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(None)
