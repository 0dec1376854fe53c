"""The event loop of a virtual process: as much of asyncio's as asyncio and the product ask for.

It owns what is ready to run and nothing else: time is the process's, timers are the world's, sockets are the network's.
"""

from __future__ import annotations

import asyncio
from asyncio.futures import _set_result_unless_cancelled  # type: ignore[attr-defined]
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sim.world import Process


class ViolationError(AssertionError):
    """Raised when a run breaks a promise."""


END_OF_SLEEP = _set_result_unless_cancelled
"""A callback that only ends a sleep: it runs no code but asyncio's, so it needs no turn of its own."""


SLEEP = asyncio.sleep


def sleep(delay: float, result: Any = None) -> Awaitable[Any]:
    """Stand in for `asyncio.sleep` where it is awaited at once: the future alone, without the coroutine around it.

    Most of what wakes in an idle hour is a sleep that is over. One that is cancelled leaves its timer to find the future so.
    """
    if delay <= 0:
        return SLEEP(delay, result)
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_later(delay, END_OF_SLEEP, future, result)
    return future


class Handle:
    """A callback that waits for its turn; as much of asyncio's as asyncio itself asks for.

    Contexts are not kept: nothing that runs here has context variables, and entering one costs as much as a small callback.
    """

    __slots__ = ("args", "callback", "is_cancelled", "when_s")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.callback = callback
        self.args = args
        self.when_s = 0.0
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.when_s

    def run(self, loop: ProcessLoop) -> None:
        try:
            self.callback(*self.args)
        except (SystemExit, KeyboardInterrupt, ViolationError):
            raise
        except BaseException as error:  # noqa: BLE001 - what asyncio does with a failed callback
            loop.failed(error)


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of one virtual process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.world = process.world
        self.ready: deque[Handle] = deque()
        self.create_future = partial(asyncio.Future, loop=self)  # type: ignore[method-assign]

    # --- time -------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.process.now_ns() / 1e9

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Any:
        handle = Handle(callback, args)
        process = self.process
        if not process.is_dead:
            self.ready.append(handle)
            if not process.is_queued:
                self.world.wake(process)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Any:
        handle = Handle(callback, args)
        process = self.process
        if not process.is_dead:
            self.world.at(process.due_ns(int(delay * 1e9)), handle, process)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Any:
        process = self.process
        handle = self.call_later(when - process.now_ns() / 1e9, callback, *args)
        handle.when_s = when
        return handle

    # --- futures and tasks ------------------------------------------------------------------------

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> Any:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        if not self.process.is_dead:
            self.process.tasks[task] = None
            task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self.process.tasks.pop(task, None)

    get_debug = bool  # called for every future; it answers False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.process.is_dead:
            error = context.get("exception")
            self.world.complain(f"{self.process.name}: {context.get('message')}: {error!r}")

    def failed(self, error: BaseException) -> None:
        """Take what a callback raised."""
        self.call_exception_handler({"message": "a callback failed", "exception": error})

    def add_signal_handler(  # type: ignore[override]
        self, sig: int, callback: Callable[..., object], *args: Any
    ) -> None:
        self.process.signals[sig] = lambda: callback(*args)

    def remove_signal_handler(self, sig: int) -> bool:
        return self.process.signals.pop(sig, None) is not None

    # --- the network: whoever owns one plugs it in ------------------------------------------------------

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        return self.process.net.resolve(host, port)

    async def sock_connect(self, sock: Any, address: Any) -> None:
        await self.process.net.connect(sock, address)

    async def sock_accept(self, sock: Any) -> Any:
        return await self.process.net.accept(sock)

    async def create_connection(self, protocol_factory: Any, *_: Any, **options: Any) -> Any:
        return await self.process.net.attach(options["sock"], protocol_factory())

    async def connect_accepted_socket(self, protocol_factory: Any, sock: Any, **_: Any) -> Any:
        return await self.process.net.attach(sock, protocol_factory())
