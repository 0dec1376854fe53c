"""Virtual time for several processes in one: each has its own event loop and clocks, the world decides who runs when.

Nothing here knows of heads, nodes or links. One heap holds every timer and every network event; ties break by the order in which they
were made, so a run is a function of its seed. A process can be frozen (its timers and its input pile up, its clocks go on) or killed
(it vanishes between two callbacks; what its coroutines do while they are disposed of reaches nobody).
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from hashlib import blake2b
from typing import Any, NoReturn

from tests.sim.loop import END_OF_SLEEP, Handle, ProcessLoop, ViolationError

__all__ = ["MS", "SECOND", "Process", "ViolationError", "World"]

MS = 1_000_000
SECOND = 1_000_000_000
BASE_NS = 1_000 * SECOND
TURNS_MAX = 20_000
DISPOSE_TURNS_MAX = 2_000


class Process:
    """One virtual process: a loop, clocks, tasks. `main` is its program; what it raises is kept in `failure`."""

    def __init__(self, world: World, name: str, *, drift_ppm: int = 0, net: Any = None) -> None:
        self.world = world
        self.name = name
        self.net = net
        self.drift_ppm = drift_ppm
        self.boot_offset_ns = 0
        self.is_dead = False
        self.frozen_until_ns = 0
        self.is_queued = False
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.signals: dict[int, Callable[[], object]] = {}
        self.deferred: list[Handle] = []
        self.failure: BaseException | None = None
        self.is_over = False
        self._origin_ns = world.now_ns
        self._ahead_ns = BASE_NS - world.now_ns
        self.loop = ProcessLoop(self)  # type: ignore[abstract]

    # --- its clocks (superfluid_core.clock.Clock) -------------------------------------------------

    def now_ns(self) -> int:
        if not self.drift_ppm:
            return self.world.now_ns + self._ahead_ns
        elapsed_ns = self.world.now_ns - self._origin_ns
        return BASE_NS + elapsed_ns + elapsed_ns * self.drift_ppm // 1_000_000

    def boot_ns(self) -> int:
        return self.now_ns() + self.boot_offset_ns

    def wall_s(self) -> int:
        return 1_800_000_000 + self.world.now_ns // SECOND

    def due_ns(self, delay_ns: int) -> int:
        """The world's time at which that much will have passed on this process's clock; never too early."""
        if self.drift_ppm:
            delay_ns = delay_ns * 1_000_000 // (1_000_000 + self.drift_ppm)
        return self.world.now_ns + delay_ns + 2_000

    # --- life -------------------------------------------------------------------------------------

    @property
    def is_frozen(self) -> bool:
        return self.frozen_until_ns > self.world.now_ns

    def start(self, main: Coroutine[Any, Any, None]) -> None:
        with self.world.running(self):
            task = self.loop.create_task(main, name="main")
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not self.is_dead:
            self.is_over = True
            self.failure = None if task.cancelled() else task.exception()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function` as if in a callback of this process."""
        with self.world.running(self):
            return function(*args)

    def freeze(self, duration_ns: int) -> None:
        self.frozen_until_ns = max(self.frozen_until_ns, self.world.now_ns + duration_ns)
        self.world.at(self.frozen_until_ns, self._thaw, None)

    def _thaw(self) -> None:
        if self.is_dead or self.is_frozen:
            return
        if self.net is not None:  # a selector hands out what can be read before timers that are due
            self.net.thawed(self)
        self.loop.ready.extend(self.deferred)
        self.deferred.clear()
        self.world.wake(self)

    def kill(self) -> None:
        """End at once, between two callbacks. Its coroutines are unwound where nobody sees it."""
        if self.is_dead:
            return
        with self.world.running(self):
            self._dispose()

    def _dispose(self) -> None:
        self.is_dead = False  # its loop works once more, with nobody and nothing around it
        self.world.ghost = self
        try:
            for task in list(self.tasks):
                task.cancel()
            for _ in range(DISPOSE_TURNS_MAX):
                if not self.tasks:
                    break
                while self.loop.ready:
                    handle = self.loop.ready.popleft()
                    if not handle.is_cancelled:
                        handle.run(self.loop)
                timers, self.deferred = self.deferred, []
                self.loop.ready.extend(timers)
            if self.tasks:
                names = ", ".join(task.get_name() for task in self.tasks)
                self.world.complaints.append(f"{self.name}: cannot be disposed of: {names}")
        finally:
            self.is_dead = True
            self.world.ghost = None
            self.loop.ready.clear()
            self.deferred.clear()


class _Running:
    """Makes a process the current one for a while."""

    __slots__ = ("_before", "_process", "_world")

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._before: Process | None = None

    def __enter__(self) -> None:
        self._before = self._world.current
        self._world.current = self._process
        asyncio._set_running_loop(self._process.loop)

    def __exit__(self, *_: object) -> None:
        before = self._world.current = self._before
        asyncio._set_running_loop(None if before is None else before.loop)


Event = Handle | Callable[[], object]


class World:
    """The heap, the time, and the trace of what happened."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.current: Process | None = None
        self.ghost: Process | None = None
        self.events = 0
        self.complaints: list[str] = []
        self._sequence = 0
        self._heap: list[tuple[int, int, Event, Process | None]] = []
        self._runnable: deque[Process] = deque()
        self._trace = blake2b(digest_size=16)

    # --- what can be asked of it ------------------------------------------------------------------

    def at(self, when_ns: int, event: Event, process: Process | None) -> None:
        if self.ghost is not None:
            if process is not None and isinstance(event, Handle):
                self.ghost.deferred.append(event)
            return
        self._sequence += 1
        if when_ns < self.now_ns:
            when_ns = self.now_ns
        heapq.heappush(self._heap, (when_ns, self._sequence, event, process))

    def after(self, delay_ns: int, event: Callable[[], object]) -> None:
        self.at(self.now_ns + delay_ns, event, None)

    def running(self, process: Process) -> _Running:
        return _Running(self, process)

    def wake(self, process: Process) -> None:
        if not process.is_queued and self.ghost is None:
            process.is_queued = True
            self._runnable.append(process)

    def complain(self, text: str) -> None:
        if self.ghost is None:
            self.complaints.append(text)

    def broken(self, text: str) -> NoReturn:
        """Note a broken promise and leave whatever was going on: product code may catch the exception, not the note."""
        self.complain(text)
        raise ViolationError(text)

    def note(self, data: bytes) -> None:
        """Add to the trace."""
        self._trace.update(self.now_ns.to_bytes(8, "little") + data)

    @property
    def trace(self) -> str:
        return self._trace.hexdigest()

    # --- running ----------------------------------------------------------------------------------

    def run_until(self, until_ns: int, is_done: Callable[[], bool] | None = None) -> None:
        """Let time pass until then, or until `is_done` (looked at whenever time moves)."""
        try:
            self._run_until(until_ns, is_done)
        finally:
            self.current = None
            asyncio._set_running_loop(None)

    def _run_until(self, until_ns: int, is_done: Callable[[], bool] | None) -> None:
        heap, pop = self._heap, heapq.heappop
        while True:
            if self._runnable:
                self._run_ready()
            if is_done is not None and is_done():
                return
            if not heap or heap[0][0] > until_ns:
                self.now_ns = max(self.now_ns, until_ns)
                return
            now_ns = self.now_ns = heap[0][0]
            while heap and heap[0][0] == now_ns:
                _, _, event, process = pop(heap)
                if process is None:
                    self.events += 1
                    event()  # type: ignore[operator]
                elif not event.is_cancelled and not process.is_dead:  # type: ignore[union-attr]
                    self._ring(event, process)  # type: ignore[arg-type]

    def _ring(self, timer: Handle, process: Process) -> None:
        """A process's timer is due."""
        if process.frozen_until_ns > self.now_ns:
            process.deferred.append(timer)
        elif timer.callback is END_OF_SLEEP:
            self.events += 1
            future, value = timer.args
            if not future.cancelled():
                future.set_result(value)
        else:
            process.loop.ready.append(timer)
            self.wake(process)

    def _run_ready(self) -> None:
        turns = 0
        while self._runnable:
            process = self._runnable.popleft()
            process.is_queued = False
            if process.is_dead or process.frozen_until_ns > self.now_ns:
                continue
            turns += 1
            if turns > TURNS_MAX:
                raise ViolationError(f"{process.name} never rests at {self.now_ns / 1e9:.3f} s")
            self._turn(process)
            if self.complaints:
                raise ViolationError(self.complaints[0])

    def _turn(self, process: Process) -> None:
        """One iteration of a process's loop: what was ready when it began."""
        loop = process.loop
        ready = loop.ready
        self.current = process
        asyncio._set_running_loop(loop)
        for _ in range(len(ready)):
            if not ready:  # it may be killed by one of its own callbacks, or frozen
                break
            handle = ready.popleft()
            if not handle.is_cancelled:
                self.events += 1
                try:
                    handle.callback(*handle.args)
                except (SystemExit, KeyboardInterrupt, ViolationError):
                    raise
                except BaseException as error:  # noqa: BLE001 - what asyncio does with a failed callback
                    loop.failed(error)
                if process.frozen_until_ns > self.now_ns or process.is_dead:
                    break
        self.current = None
        if ready:
            self.wake(process)
