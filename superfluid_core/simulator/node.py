"""One scheduler, and an engine that only computes what its plans would cost. Time is the caller's.

    receive(inputs, now)    the scheduler takes them; an Interrupt stops the tick at the next step
    proceed(now)            the next step of the plan in flight, or the next plan: `ends_ns` says when it is done
    complete()              at `ends_ns`: the step is reported, what it sampled leaves

Steps are cut from plans by the same composer that real engines use. The caller hands in what arrived up to the end of a
step before it asks for the next one, so that a newcomer is part of the next step and not of the one after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from superfluid_core.engine.compose import Step, StepComposer
from superfluid_core.errors import ConfigError
from superfluid_core.scheduler.plan import (
    Effect,
    Input,
    Interrupt,
    StepDone,
    TickDone,
    TickOutcome,
    TickPlan,
)
from superfluid_core.scheduler.scheduler import Scheduler
from superfluid_core.simulator.costs import CostModel, StepLoad, parse_cost
from superfluid_core.simulator.flags import Flags
from superfluid_core.simulator.hardware import transfer_ns

TOKEN = 7


class Observer(Protocol):
    """Sees everything, changes nothing."""

    def on_plan(self, plan: TickPlan, scheduler: Scheduler) -> None: ...

    def on_step(self, step: Step, start_ns: int, end_ns: int) -> None: ...

    def on_effects(self, effects: Sequence[Effect], now_ns: int) -> None: ...


def load_of(step: Step) -> StepLoad:
    """Weigh one forward pass."""
    return StepLoad(len(step.ids), step.prompt_tokens, step.context)


class VirtualNode:
    """Drives one `Scheduler`. At most one step is in flight; `ends_ns` is None while there is none.

    Raises ConfigError where KV is parked for free.
    """

    def __init__(self, flags: Flags, observer: Observer, cost: CostModel | None = None) -> None:
        if flags.rules.park and not flags.pool.host_copy_bytes_per_s:
            raise ConfigError("park: copies would cost nothing; give host-copy-bytes-per-s too")
        self.scheduler = Scheduler(
            flags.limits, flags.pool, cuts_are_free=flags.cuts_are_free, rules=flags.rules
        )
        self.ends_ns: int | None = None
        self._cost = cost or parse_cost(flags.cost, flags.unit_ns)
        self._observer = observer
        self._pool = flags.pool
        self._plan: TickPlan | None = None
        self._composer: StepComposer | None = None
        self._step: Step | None = None
        self._began_ns = 0
        self._tick_began_ns = 0
        self._steps = 0
        self._moves_ns: int | None = None
        self._is_interrupted = False

    def receive(self, inputs: Sequence[Input], now_ns: int) -> None:
        self._tell(self.scheduler.receive(inputs, now_ns), now_ns)

    def proceed(self, now_ns: int) -> bool:
        """Begin the next step; False when nobody has work."""
        assert self.ends_ns is None, "a step is in flight"
        if self._plan is not None and not self._next_step(now_ns):
            self._end_tick(now_ns)
        if self._plan is None:
            self._plan = self.scheduler.plan(now_ns)
            if self._plan is None:
                return False
            self._composer = StepComposer(self._plan)
            self._steps = 0
            self._moves_ns = self._cost_of_moves(self._plan)
            self._is_interrupted = False
            self._tick_began_ns = now_ns
            self._observer.on_plan(self._plan, self.scheduler)
            began = self._next_step(now_ns)
            assert began, "a plan has a step, or moves that take one's place"
        return True

    def complete(self) -> int:
        """Report the step in flight; returns the time at which it ended."""
        now_ns, plan, composer = self.ends_ns, self._plan, self._composer
        assert now_ns is not None, "no step is in flight"
        assert plan is not None, "a step belongs to a plan"
        assert composer is not None, "a plan has a composer"
        self.ends_ns = None
        step = self._step
        if step is None:
            return now_ns
        lanes = step.sampling
        ids = [TOKEN] * len(lanes)
        composer.commit(lanes, ids)
        done = StepDone(
            plan.tick,
            self._steps,
            lanes,
            ids,
            [(row.lane, len(row.inputs)) for row in step.prompts] if step.prompts else (),
            len(step.ids) + step.prompt_tokens,
            now_ns - self._began_ns,
        )
        self._steps += 1
        self._observer.on_step(step, self._began_ns, now_ns)
        self._tell(self.scheduler.receive((done,), now_ns), now_ns)
        return now_ns

    def _next_step(self, now_ns: int) -> bool:
        """Begin a step; a plan that only moves KV has one without rows."""
        if self._is_interrupted and self._steps:
            return False
        assert self._composer is not None, "a plan has a composer"
        step = self._composer.next_step()
        moves_ns, self._moves_ns = self._moves_ns, None
        if step is None and moves_ns is None:
            return False
        self._step = step
        self._began_ns = now_ns
        self.ends_ns = now_ns + (moves_ns or 0)
        if step is not None:
            self.ends_ns += self._cost.step_ns(load_of(step))
        return True

    def _cost_of_moves(self, plan: TickPlan) -> int:
        """KV goes to the host and comes back before the first step, at the measured rate and overhead."""
        copies = (*plan.park_out, *plan.park_in)
        rate = int(self._pool.host_copy_bytes_per_s)
        if not copies or not rate:
            return 0
        blocks = sum(len(each.blocks) for each in copies)
        overhead_ns = len(copies) * self._pool.host_copy_overhead_ns
        return overhead_ns + transfer_ns(blocks * self._pool.block_bytes, rate)

    def _end_tick(self, now_ns: int) -> None:
        assert self._plan is not None, "only a plan in flight can end"
        outcome = TickOutcome.INTERRUPTED if self._is_interrupted else TickOutcome.COMPLETE
        done = TickDone(self._plan.tick, outcome, self._steps, now_ns - self._tick_began_ns)
        self._plan = None
        self._composer = None
        self._tell(self.scheduler.receive((done,), now_ns), now_ns)

    def _tell(self, effects: list[Effect], now_ns: int) -> None:
        if not effects:
            return
        for effect in effects:
            if type(effect) is Interrupt:
                self._is_interrupted = True
        self._observer.on_effects(effects, now_ns)
