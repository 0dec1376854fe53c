"""Which generations are being served, and how they end when the head does (decisions: drain).

Owns one flag and one set. `drain` refuses new ones at once; `cut` ends what still runs with a typed error. Everything
held is released by leaving the context, once, however it is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from superfluid_core.errors import CapacityError, ErrorCode, GenerationError
from superfluid_head.metrics import HeadMetrics

REQUEST_S_MAX = 3_600.0
DRAINING_RETRY_MS = 5_000


@dataclass(slots=True, eq=False)
class Hold:
    """One request's place among the generations in flight."""

    scope: asyncio.Timeout
    is_cancelled: bool = False

    def cancel(self) -> None:
        """End it now, because somebody asked for that."""
        self.is_cancelled = True
        self.scope.reschedule(asyncio.get_running_loop().time())


class Inflight:
    """The generations in flight. Event-loop only."""

    def __init__(self, metrics: HeadMetrics) -> None:
        self._metrics = metrics
        self._scopes: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False
        self._is_cut = False

    @property
    def count(self) -> int:
        return len(self._scopes)

    def drain(self) -> None:
        """Refuse new generations from now on."""
        self.is_draining = True

    def cut(self) -> None:
        """End what runs, now."""
        self.is_draining = self._is_cut = True
        now = asyncio.get_running_loop().time()
        for scope in list(self._scopes):
            scope.reschedule(now)

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def judge(self) -> None:
        """Raise CapacityError(DRAINING) once the head drains."""
        if self.is_draining:
            raise CapacityError(
                "this head is shutting down",
                code=ErrorCode.DRAINING,
                retry_after_ms=DRAINING_RETRY_MS,
            )

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[Hold]:
        """Count one request's generations.

        Raises CapacityError (draining) or GenerationError (cut, cancelled, too long).
        """
        self.judge()
        scope = asyncio.timeout(REQUEST_S_MAX)
        held = Hold(scope)
        try:
            async with scope:
                self._scopes.add(scope)
                self._idle.clear()
                self._metrics.in_flight.set(len(self._scopes))
                try:
                    yield held
                finally:
                    self._scopes.discard(scope)
                    self._metrics.in_flight.set(len(self._scopes))
                    if not self._scopes:
                        self._idle.set()
        except TimeoutError:
            raise self._why(held) from None

    def _why(self, held: Hold) -> GenerationError:
        if held.is_cancelled:
            words = "the session was cancelled"
            return GenerationError(words, code=ErrorCode.CANCELLED, retryable=False)
        if self._is_cut:
            return GenerationError("this head is shutting down", code=ErrorCode.DRAINING)
        return GenerationError("the request took too long", code=ErrorCode.TIMEOUT)
