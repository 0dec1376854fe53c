"""The event loop of a virtual process: as much of asyncio's as asyncio and the product ask for.

It owns what is ready to run and nothing else: time is the process's, timers are the world's, sockets are the network's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sim.world import Process


class ViolationError(AssertionError):
    """Raised when a run breaks a promise."""


class Handle:
    """A callback that waits for its turn; as much of asyncio's as asyncio itself asks for."""

    __slots__ = ("_args", "_callback", "_context", "_when", "is_cancelled")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> None:
        self._callback = callback
        self._args = args
        self._context = copy_context() if context is None else context
        self._when = 0.0
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self._when

    def run(self, loop: ProcessLoop) -> None:
        try:
            self._context.run(self._callback, *self._args)
        except (SystemExit, KeyboardInterrupt, ViolationError):
            raise
        except BaseException as error:  # noqa: BLE001 - what asyncio does with a failed callback
            loop.call_exception_handler({"message": "a callback failed", "exception": error})


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of one virtual process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.world = process.world
        self.ready: deque[Handle] = deque()

    # --- time -------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.process.now_ns() / 1e9

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        handle = Handle(callback, args, context)
        if not self.process.is_dead:
            self.ready.append(handle)
            self.world.wake(self.process)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Any:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Any:
        handle = Handle(callback, args, context)
        handle._when = when
        if not self.process.is_dead:
            self.world.at(self.process.world_ns(int(when * 1e9)), handle, self.process)
        return handle

    # --- futures and tasks ------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> Any:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        if not self.process.is_dead:
            self.process.tasks[task] = None
            task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self.process.tasks.pop(task, None)

    def get_debug(self) -> bool:
        return False

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
