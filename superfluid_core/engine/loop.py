"""Joins one scheduler with one engine: decisions on the event loop, forward passes in one thread.

The scheduler is touched by the event loop alone and needs no lock. The engine thread takes a plan, posts `StepDone` and
`TickDone` back (many posts, one wake-up of the loop) and reads one flag between steps. A plan is made the moment none is in
flight and something changed; nothing polls while the node is idle. While the last step of a tick runs,
the plan behind it is left where the engine thread finds it (`_ahead`): if what came was foreseen, it goes on without waiting for
the event loop. Whoever takes that plan out owns it, and the loop does so whenever something but the time comes in. While sessions live, the scheduler also hears the time
every `TIME_MS`, so that deadlines pass although a step is long. If the engine or the scheduler breaks, `run` raises and the
process is to end: there is no state here that could be trusted afterwards.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from superfluid_core.clock import MS, Clock
from superfluid_core.engine.base import Engine
from superfluid_core.engine.embedding import Embedder, Embedding, EmbeddingLine
from superfluid_core.errors import EngineError
from superfluid_core.scheduler.foresight import Foreseen
from superfluid_core.scheduler.plan import (
    Accepted,
    Effect,
    Finish,
    Input,
    Interrupt,
    StepDone,
    TickDone,
    TickOutcome,
    TickPlan,
)
from superfluid_core.scheduler.scheduler import Scheduler

TIME_MS = 100
STOP_GRACE_MS = 250
STOP_MS = 5_000

OnEffects = Callable[[list[Effect]], None]


class Watch(Protocol):
    """Who looks on, for metrics: called on the event loop, must not raise."""

    def planned(self, plan: TickPlan, elapsed_ns: int) -> None: ...

    def stepped(self, done: StepDone) -> None: ...

    def ticked(self, done: TickDone) -> None: ...


class EngineLoop:
    """Owner of an engine and its thread. All methods belong to the event loop's thread.

    `on_effects` gets every effect but Interrupt, in order, synchronously; it may submit, which is then handled after it
    returns. `steps` counts forward passes since the start and `step_started_ns` says when the one that runs now began: together
    with `is_busy` they tell a hung engine from an idle one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        clock: Clock,
        on_effects: OnEffects,
        watch: Watch | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._clock = clock
        self._on_effects = on_effects
        self._watch = watch
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._pending: deque[Input] = deque()
        self._is_delivering = False
        self._is_stopping = False
        self._ended = asyncio.Event()
        self._tick_in_flight: int | None = None
        self._foreseen: tuple[TickPlan, int] | None = None
        self._live = 0
        self._failure: BaseException | None = None
        self._embeddings = EmbeddingLine()
        # shared with the engine thread
        self._plans: queue.SimpleQueue[TickPlan | Embedding | None] = queue.SimpleQueue()
        self._ahead: deque[Foreseen] = deque(maxlen=1)
        self._inbox: deque[StepDone | TickDone | Embedding | BaseException] = deque()
        self._is_posted = False
        self._interrupt = threading.Event()
        self._last_step: StepDone | None = None
        self.steps = 0
        self.step_started_ns = 0

    @property
    def is_busy(self) -> bool:
        """A plan or a pass of a text is in flight: the step counter is expected to move."""
        return self._tick_in_flight is not None or self._embeddings.is_running

    def predicted_step_ms(self) -> int:
        """Return the expected duration of the step that runs now, rounded up."""
        return -(-self._scheduler.load().step_predicted_ns // MS)

    def submit(self, *inputs: Input) -> None:
        """Give the scheduler its inputs (none: the time); their effects were delivered when this returns.

        A plan that was foreseen outlives a look at the time: whom a deadline ends then, ends as if the engine had just taken it.
        """
        self._pending.extend(inputs)
        if inputs:
            self._ahead.clear()
        if self._is_delivering:
            return
        try:
            self._hear()
        finally:
            self._wake.set()

    def embed(self, text: Embedding) -> bool:
        """Compute a text's vector between ticks; False when the line is full or this engine cannot embed."""
        if not isinstance(self._engine, Embedder) or not self._embeddings.add(text):
            return False
        self._ahead.clear()
        self._wake.set()
        return True

    async def run(self) -> None:
        """Plan and run until cancelled. Raises EngineError when the engine or the scheduler broke."""
        self._loop = asyncio.get_running_loop()
        thread = threading.Thread(target=self._work, name="superfluid-engine", daemon=True)
        thread.start()
        try:
            while True:
                self._check()
                self._plan()
                self._embed()
                await self._changed()
        finally:
            await self._stop(thread)

    # --- on the event loop --------------------------------------------------------------------

    def _hear(self) -> None:
        """Have the scheduler hear what is pending, and whatever is submitted on the way."""
        self._is_delivering = True
        try:
            while True:
                batch = tuple(self._pending)
                self._pending.clear()
                self._deliver(self._scheduler.receive(batch, self._clock.now_ns()))
                if not self._pending:
                    break
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._is_delivering = False

    def _deliver(self, effects: list[Effect]) -> None:
        kept: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Interrupt):
                if effect.tick == self._tick_in_flight:
                    self._interrupt.set()
                continue
            if isinstance(effect, Accepted):
                self._live += 1
            elif isinstance(effect, Finish):
                self._live -= 1
            kept.append(effect)
        if kept:
            self._on_effects(kept)

    def _plan(self) -> None:
        """Hand the engine its next plan if it has none."""
        if self._tick_in_flight is not None or self._is_stopping:
            return
        began_ns = self._clock.now_ns()
        plan = self._scheduler.plan(began_ns)
        if plan is None:
            return
        self._begin_step(began_ns)
        self._tick_in_flight = plan.tick
        self._interrupt.clear()
        self._plans.put(plan)
        if self._watch is not None:
            self._watch.planned(plan, self._clock.now_ns() - began_ns)

    def _foresee(self) -> None:
        """Leave the next plan ready for the engine thread, if it can be told by now."""
        if self._ahead or self._tick_in_flight is None or self._is_stopping:
            return
        if not self._embeddings.is_empty:
            return
        began_ns = self._clock.now_ns()
        foreseen = self._scheduler.foresee()
        if foreseen is not None:
            self._foreseen = foreseen.plan, self._clock.now_ns() - began_ns
            self._ahead.append(foreseen)

    def _embed(self) -> None:
        """Put the next turn of a text behind the plan that was just made, if the engine thread has none."""
        was_busy = self.is_busy
        text = None if self._is_stopping else self._embeddings.next()
        if text is not None:
            if not was_busy:
                self._begin_step(self._clock.now_ns())
            self._plans.put(text)

    def _begin_step(self, now_ns: int) -> None:
        """Count the time from here: the engine thread takes a moment to take its work, and idled before."""
        self.step_started_ns = now_ns

    async def _changed(self) -> None:
        """Sleep until something came in; while sessions live, no longer than `TIME_MS`."""
        if self._live > 0:
            try:
                async with asyncio.timeout(TIME_MS / 1e3):
                    await self._wake.wait()
            except TimeoutError:
                self.submit()
        else:
            await self._wake.wait()
        self._wake.clear()

    def _drain(self) -> None:
        """Take what the engine thread posted, and plan. A failure here is kept for `run`: callbacks have no caller.

        `run` is woken for nothing else: with every step it would look for work that was handed on here.
        """
        self._is_posted = False
        arrived: list[Input] = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, BaseException):
                self._failure = self._failure or item
            elif isinstance(item, Embedding):
                self._embeddings.settle(item)
            else:
                self._note(item)
                arrived.append(item)
        try:
            if arrived:
                self._pending.extend(arrived)
                self._ahead.clear()
                self._hear()
            if self._failure is None:
                self._plan()
                self._embed()
                self._foresee()
        except Exception as error:  # noqa: BLE001 - kept, and raised by `run`
            self._failure = error
        if self._failure is not None:
            self._wake.set()

    def _note(self, item: StepDone | TickDone) -> None:
        if isinstance(item, TickDone):
            if item.tick == self._tick_in_flight:
                self._tick_in_flight = item.tick + 1 if item.is_followed else None
            if self._watch is not None:
                self._watch.ticked(item)
                if item.is_followed:
                    assert self._foreseen is not None, "nobody foresaw it"
                    self._watch.planned(*self._foreseen)
        elif self._watch is not None:
            self._watch.stepped(item)

    def _check(self) -> None:
        if self._failure is None:
            return
        if isinstance(self._failure, EngineError):
            raise self._failure
        text = f"{type(self._failure).__name__}: {self._failure}"
        raise EngineError(f"the engine cannot go on: {text[:200]}") from self._failure

    async def _stop(self, thread: threading.Thread) -> None:
        """End the thread: at its next step if that comes soon, else by closing the engine under it."""
        self._is_stopping = True
        self._interrupt.set()
        self._plans.put(None)
        try:
            async with asyncio.timeout(STOP_GRACE_MS / 1e3):
                await self._ended.wait()
        except TimeoutError:
            pass
        finally:
            self._engine.close()
        try:
            async with asyncio.timeout(STOP_MS / 1e3):
                await self._ended.wait()
        except TimeoutError:
            return  # a daemon thread inside a stuck kernel: it ends with the process
        thread.join(STOP_MS / 1e3)

    # --- in the engine thread -----------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (work := self._plans.get()) is not None:
                self.step_started_ns = self._clock.now_ns()
                if isinstance(work, Embedding):
                    self._embed_some(work)
                    continue
                plan: TickPlan | None = work
                while plan is not None:
                    plan = self._run_plan(plan)
        except BaseException as error:  # noqa: BLE001 - the thread's outermost edge
            self._post(error)
        finally:
            self._call(self._ended.set)

    def _run_plan(self, plan: TickPlan) -> TickPlan | None:
        """Run one tick; returns the plan to go on with, of which the event loop is told with the tick's end."""
        self._last_step = None
        done = self._engine.run(plan, self._on_step, self._interrupt.is_set)
        following = self._take_ahead(done)
        if following is not None:
            done = replace(done, is_followed=True)
        self._post(done)
        return following

    def _take_ahead(self, done: TickDone) -> TickPlan | None:
        try:
            foreseen = self._ahead.pop()
        except IndexError:
            return None
        step = self._last_step
        if step is None or done.outcome is not TickOutcome.COMPLETE or self._interrupt.is_set():
            return None
        return foreseen.complete(step)

    def _embed_some(self, text: Embedding) -> None:
        assert isinstance(self._engine, Embedder)
        text.step(self._engine, self._clock)
        self.steps += 1
        self.step_started_ns = self._clock.now_ns()
        self._post(text)

    def _on_step(self, done: StepDone) -> None:
        self.steps += 1
        self.step_started_ns = self._clock.now_ns()
        self._last_step = done
        self._post(done)

    def _post(self, item: StepDone | TickDone | Embedding | BaseException) -> None:
        self._inbox.append(item)
        if self._is_posted:
            return
        self._is_posted = True
        self._call(self._drain)

    def _call(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            self._interrupt.set()  # the event loop is gone: nobody waits for this tick any more
