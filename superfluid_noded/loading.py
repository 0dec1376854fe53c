"""Threads beside the event loop: one that makes the engine, one that notices that the parent process is gone.

Loading is slow, and the loop keeps hearing signals and the supervisor meanwhile. Both threads are daemons: what nobody waits
for any more ends with the process.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")

STDIN = 0
READ_BYTES = 4096


class Loading(Generic[T]):
    """One call of `make` in a thread of its own. Needs a running event loop."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._made: list[T] = []
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, name="superfluid-load", daemon=True).start()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the end, no longer than that; says whether it has come."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        return self._ended.is_set()

    def result(self) -> T:
        """Return what was made. Raises what making it raised."""
        assert self._ended.is_set(), "asked before the end"
        if self._failure is not None:
            raise self._failure
        return self._made[0]

    def _run(self) -> None:
        try:
            self._made.append(self._make())
        except BaseException as error:  # noqa: BLE001 - carried to the event loop
            self._failure = error
        with suppress(RuntimeError):  # the loop is gone: the process ends
            self._loop.call_soon_threadsafe(self._ended.set)


def watch_stdin(on_closed: Callable[[], None]) -> None:
    """Call `on_closed` on the running event loop when stdin reaches its end; what is read is ignored."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        with suppress(OSError):
            while os.read(STDIN, READ_BYTES):
                pass
        with suppress(RuntimeError):  # the loop is gone: the process ends
            loop.call_soon_threadsafe(on_closed)

    threading.Thread(target=read, name="superfluid-parent", daemon=True).start()
