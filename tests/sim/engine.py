"""The simulated engine under virtual time: the real `SimEngine` and the real `EngineLoop`, without the thread between them.

A tick is computed the moment it is planned, by the engine's public `run`, with a pause that only adds up; its steps are then reported at
the times at which the engine would have made them. The engine's tokens depend on nothing but session and index, so a tick that
is interrupted is the same tick, cut. What an engine can suffer is here too: it hangs, it is slow, it fails a lane, a prompt kills its process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from superfluid_core.engine.loop import EngineLoop
from superfluid_core.engine.sim import SimEngine, SimOptions
from superfluid_core.engine.stand_ins import NumberedTexts
from superfluid_core.errors import EngineError, ErrorCode
from superfluid_core.scheduler.plan import LaneFault, StepDone, TickDone, TickOutcome, TickPlan
from tests.sim.world import Process

POISON = 666
TEXTS = NumberedTexts(1024)
HUNG_NS = 1 << 62


@dataclass
class Ills:
    """What ails the engine of one process, set by faults."""

    slow: int = 1
    lane_faults: int = 0
    hung_until_ns: int = 0
    dies_of_poison: bool = True
    poisoned: list[tuple[int, ...]] = field(default_factory=list)
    on_death: Callable[[tuple[int, ...]], None] = lambda _prompt: None


class _AddingPause:
    """Takes no time; remembers how much it should have taken."""

    def __init__(self) -> None:
        self.total_ns = 0

    def wait(self, seconds: float) -> bool:
        self.total_ns += int(seconds * 1e9)
        return True

    def close(self) -> None:
        return


class _AddingClock:
    """The process's clock, ahead by what the engine has spent since the tick began."""

    def __init__(self, process: Process, pause: _AddingPause) -> None:
        self._process = process
        self._pause = pause

    def now_ns(self) -> int:
        return self._process.now_ns() + self._pause.total_ns

    def boot_ns(self) -> int:
        return self._process.boot_ns() + self._pause.total_ns

    def wall_s(self) -> int:
        return self._process.wall_s()


class VirtualEngine(SimEngine):
    """A SimEngine that can be ill."""

    def __init__(self, process: Process, options: SimOptions, ills: Ills) -> None:
        self.adding = _AddingPause()
        self.ills = ills
        super().__init__(TEXTS, options, _AddingClock(process, self.adding), pause=self.adding)

    def _fault(self, row: Any, lane: Any) -> LaneFault | None:
        if self.ills.lane_faults:
            self.ills.lane_faults -= 1
            return LaneFault(row.lane, ErrorCode.LANE_FAULT, "simulated fault of the lane")
        return super()._fault(row, lane)


class _Plans:
    """Stands where the loop puts its plans for the engine's thread."""

    def __init__(self, begin: Any) -> None:
        self.put = begin


class VirtualEngineLoop(EngineLoop):
    """The real loop; only the thread's side is played by timers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps_to_come: list[tuple[int, StepDone]] = []
        self._tick_done: TickDone | None = None
        self._position = 0
        self._timer: Any = None
        self._plans = _Plans(self._begin)  # type: ignore[assignment]

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                self._check()
                self._plan()
                await self._changed()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _begin(self, plan: TickPlan | None) -> None:
        engine = self._engine
        if plan is None or not isinstance(engine, VirtualEngine):
            return
        self.step_started_ns = self._clock.now_ns()
        engine.ills.poisoned = [
            start.spec.prompt for start in plan.starts if start.spec.prompt[0] == POISON
        ]
        engine.adding.total_ns = 0
        steps: list[tuple[int, StepDone]] = []
        self._tick_done = engine.run(
            plan, lambda done: steps.append((engine.adding.total_ns, done)), lambda: False
        )
        engine.adding.total_ns = 0
        self._steps_to_come, self._position = steps, 0
        self._wait_for_step(0)

    def _wait_for_step(self, after_ns: int) -> None:
        engine = self._engine
        assert isinstance(engine, VirtualEngine)
        assert self._loop is not None
        at_ns = self._steps_to_come[self._position][0] if self._steps_to_come else after_ns
        delay_ns = (at_ns - after_ns) * engine.ills.slow
        self._timer = self._loop.call_later(delay_ns / 1e9, self._arrive)

    def _arrive(self) -> None:
        engine = self._engine
        assert isinstance(engine, VirtualEngine)
        assert self._loop is not None
        left_ns = engine.ills.hung_until_ns - self._clock.now_ns()
        if left_ns > 0:
            self._timer = self._loop.call_later(left_ns / 1e9, self._arrive)
            return
        if engine.ills.poisoned and engine.ills.dies_of_poison:
            for prompt in engine.ills.poisoned:
                engine.ills.on_death(prompt)
            self._post(EngineError("a poisoned prompt"))
            return
        tick_done = self._tick_done
        assert tick_done is not None
        if self._steps_to_come:
            at_ns, done = self._steps_to_come[self._position]
            self._position += 1
            self._on_step(done)
            if self._position < len(self._steps_to_come):
                if self._interrupt.is_set():
                    cut = TickOutcome.INTERRUPTED
                    self._post(TickDone(tick_done.tick, cut, self._position, at_ns))
                else:
                    self._wait_for_step(at_ns)
                return
        self._post(tick_done)
