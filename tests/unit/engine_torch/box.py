"""A scheduler and a real engine in one thread: a node without its loop, for proofs about sessions in company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from superfluid_core.clock import SystemClock
from superfluid_core.engine.compose import StepRow
from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.plan import (
    Effect,
    Emits,
    Finish,
    Input,
    Interrupt,
    Reject,
    StepDone,
    Submit,
    TickPlan,
)
from superfluid_core.scheduler.rules import Rules
from superfluid_core.scheduler.scheduler import PoolShape, Scheduler
from superfluid_core.session import SamplingParams, SessionKey, SessionSpec

CLOCK = SystemClock()


def key(number: int) -> SessionKey:
    return SessionKey("box", number)


def spec(number: int, prompt: Sequence[int], max_output: int, **more: Any) -> SessionSpec:
    """A greedy session, unless told otherwise."""
    values: dict[str, Any] = {"sampling": SamplingParams(temperature=0.0)} | more
    return SessionSpec(
        key=key(number), model="m", prompt=tuple(prompt), max_output=max_output, **values
    )


class Box:
    """`outputs` by session number; `logits` of every draw when `keeps_logits`; `on_step` is called after each step."""

    def __init__(self, engine: TorchEngine, rules: Rules | None = None, **limits: Any) -> None:
        info = engine.describe()
        self.engine = engine
        self.scheduler = Scheduler(
            SchedulerLimits(lanes=info.lanes, **({"step_tokens": info.step_tokens} | limits)),
            PoolShape(
                info.block_tokens,
                info.blocks,
                info.window,
                info.kv_bytes_per_token,
                info.host_copy_bytes_per_s,
            ),
            rules=rules,
        )
        self.outputs: dict[int, list[int]] = {}
        self.ended: list[int] = []
        self.plans: list[TickPlan] = []
        self.steps: list[StepDone] = []
        self.times_ns: dict[int, list[int]] = {}
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        self.on_step: Callable[[], None] = lambda: None
        self._keys: dict[int, int] = {}
        self._is_interrupted = False

    def submit(self, *specs: SessionSpec) -> None:
        for each in specs:
            self.outputs[each.key.session] = list(each.delivered)
            self.times_ns[each.key.session] = []
            self._receive(Submit(each))

    def keep_logits(self) -> None:
        def keep(rows: Sequence[StepRow], logits: torch.Tensor) -> None:
            for row, line in zip(rows, logits, strict=True):
                self.logits[self._keys[row.lane], row.output_index] = line.clone()

        self.engine.on_logits = keep

    def turn(self) -> None:
        """Plan one tick and run it."""
        plan = self.scheduler.plan(CLOCK.now_ns())
        assert plan is not None, "nothing is planned although sessions are left"
        self.plans.append(plan)
        self._keys.update({start.lane: start.spec.key.session for start in plan.starts})
        self._is_interrupted = False
        self._receive(self.engine.run(plan, self._stepped, lambda: self._is_interrupted))

    def finish(self, *numbers: int) -> None:
        """Turn until these sessions have ended."""
        while not set(numbers) <= set(self.ended):
            self.turn()

    def _stepped(self, done: StepDone) -> None:
        self.steps.append(done)
        self._receive(done)
        self.on_step()

    def _receive(self, item: Input) -> None:
        for effect in self.scheduler.receive([item], CLOCK.now_ns()):
            self._take(effect)

    def _take(self, effect: Effect) -> None:
        if isinstance(effect, Emits):
            for row in effect:
                ids = self.outputs[row.key.session]
                assert row.index == len(ids), "a token came twice or is missing"
                ids.append(row.token)
                self.times_ns[row.key.session].append(CLOCK.now_ns())
        elif isinstance(effect, Finish):
            assert effect.code is None, effect.text
            self.ended.append(effect.key.session)
        elif isinstance(effect, Interrupt):
            self._is_interrupted = True
        else:
            assert not isinstance(effect, Reject), effect
