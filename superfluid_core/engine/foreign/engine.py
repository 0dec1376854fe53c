"""An engine over somebody else's library: plans are ours, and so is sampling; the library only computes.

Owns the order of a tick, as the torch engine does, and the report of every step. `Library` is all that it knows of what computes. It must not
know how a library keeps its KV. Sampling is the torch engine's, on the CPU: the same rows, masks, penalties and counter-based
draws, so equal logits give equal ids whoever computed them.

What such an engine cannot do it says in its capabilities: nothing is parked, embedded, scored or run batch-invariant. A plan that
asks for it all the same is refused untouched.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from superfluid_core.clock import Clock
from superfluid_core.engine.base import EngineInfo, Interrupted, OnStep
from superfluid_core.engine.compose import StepComposer, StepRow
from superfluid_core.engine.torch.checks import EngineBounds, input_fault, plan_flaw, start_fault
from superfluid_core.engine.torch.sampler import NOT_FINITE, Sampled, Sampler
from superfluid_core.errors import EngineError, ErrorCode
from superfluid_core.grammar.compiler import Grammars
from superfluid_core.grammar.lanes import NOTHING_LEFT, GrammarFault, LaneMasks, Mask
from superfluid_core.scheduler.plan import LaneFault, StepDone, TickDone, TickOutcome, TickPlan


class Library(Protocol):
    """Computes, and holds the KV. All calls come from one thread at a time; each may raise EngineError, which ends the engine."""

    def open(self, plan: TickPlan) -> None:
        """Bring the KV to where a plan begins: `frees` are gone, lanes have what they share, and room for what they write."""
        ...

    def forward(self, rows: Sequence[StepRow]) -> Tensor:
        """Feed the inputs of all rows; gives float32 logits on the CPU, a row for each that samples, the caller's to change."""
        ...

    def close(self) -> None:
        """Give all memory back; nothing is called after it."""
        ...


@dataclass(slots=True)
class _Tick:
    """The plan in flight."""

    plan: TickPlan
    composer: StepComposer
    faults: tuple[LaneFault, ...]
    steps: int = 0


class LibraryEngine:
    """Implements `Engine`. `close` may be called from any thread; the library is closed when no tick runs."""

    def __init__(
        self, info: EngineInfo, library: Library, clock: Clock, grammars: Grammars | None = None
    ) -> None:
        self._info = info
        self._library = library
        self._clock = clock
        self._masks = LaneMasks(grammars)
        self._sampler = Sampler(info.lanes, info.vocabulary, torch.device("cpu"))
        self._bounds = EngineBounds(
            info.lanes, info.blocks, info.block_tokens, info.window, info.vocabulary
        )
        self._running = threading.Lock()
        self._is_closed = False
        self._is_freed = False
        self.last_refusal = ""

    def describe(self) -> EngineInfo:
        return self._info

    def close(self) -> None:
        """No plan runs after this."""
        self._is_closed = True
        self._masks.close()
        self._free()

    @torch.inference_mode()
    def run(self, plan: TickPlan, on_step: OnStep, interrupted: Interrupted) -> TickDone:
        """Execute a plan; see `Engine.run`. Why a plan was refused stays in `last_refusal`."""
        began_ns = self._clock.now_ns()
        try:
            with self._running:
                if self._is_closed:
                    raise EngineError("the engine is closed")
                flaw = _moves_kv(plan) or plan_flaw(plan, self._bounds, self._sampler.lanes(), {})
                if flaw is not None:
                    self.last_refusal = flaw
                    return self._done(plan, TickOutcome.REFUSED, 0, began_ns)
                tick = self._open(plan)
                outcome = self._run_steps(tick, on_step, interrupted)
                return self._done(plan, outcome, tick.steps, began_ns)
        finally:
            if self._is_closed:
                self._free()

    # --- a tick

    def _free(self) -> None:
        """Close the library, unless a tick runs: its end does it then."""
        if not self._running.acquire(blocking=False):
            return
        try:
            if not self._is_freed:
                self._is_freed = True
                self._library.close()
        finally:
            self._running.release()

    def _open(self, plan: TickPlan) -> _Tick:
        """Everything that precedes the first step."""
        for lane in plan.frees:
            self._sampler.free(lane)
            self._masks.free(lane)
        faults: dict[int, LaneFault] = {}
        for start in plan.starts:
            fault = start_fault(start, self._bounds) or self._masks.start(start)
            if fault is None:
                self._sampler.start(start)
            else:
                faults[start.lane] = fault
        for wanted in plan.lanes:
            fault = input_fault(wanted, self._bounds)
            if fault is not None:
                faults.setdefault(wanted.lane, fault)
        composer = StepComposer(plan)
        for number in faults:
            composer.drop(number)
        self._library.open(plan)
        return _Tick(plan, composer, tuple(faults.values()))

    def _run_steps(self, tick: _Tick, on_step: OnStep, interrupted: Interrupted) -> TickOutcome:
        while (step := tick.composer.next_step()) is not None:
            if tick.steps and interrupted():
                return TickOutcome.INTERRUPTED
            on_step(self._step(tick, step.rows()))
            tick.steps += 1
        if tick.faults and not tick.steps:
            on_step(StepDone(tick.plan.tick, 0, (), (), (), 0, 0, None, tick.faults))
        return TickOutcome.COMPLETE

    def _step(self, tick: _Tick, rows: list[StepRow]) -> StepDone:
        began_ns = self._clock.now_ns()
        logits = self._library.forward(rows)
        sampling = [row for row in rows if row.samples]
        masks = self._masks.take(row.lane for row in sampling) if self._masks else {}
        sampled = self._sample(sampling, logits, masks)
        faults = list(tick.faults) if tick.steps == 0 else []
        good: dict[int, int] = {}
        kept = []
        for number, (row, token) in enumerate(zip(sampling, sampled.ids, strict=True)):
            fault = _draw_fault(row.lane, token, masks.get(row.lane))
            if fault is None:
                good[row.lane] = token
                kept.append(number)
            else:
                faults.append(fault)
        tick.composer.commit(list(good), list(good.values()))
        self._drop_stopped(tick.composer, good)
        if masks:
            self._masks.advance(good)
        logprobs = sampled.logprobs
        return StepDone(
            tick=tick.plan.tick,
            step=tick.steps,
            lanes=tuple(good),
            ids=tuple(good.values()),
            prefilled=tuple((row.lane, len(row.inputs)) for row in rows if not row.decoding),
            tokens=sum(len(row.inputs) for row in rows),
            elapsed_ns=self._clock.now_ns() - began_ns,
            logprobs=None if logprobs is None else [logprobs[number] for number in kept],
            faults=tuple(faults),
        )

    def _sample(
        self,
        rows: list[StepRow],
        logits: Tensor,
        masks: Mapping[int, Mask | GrammarFault],
    ) -> Sampled:
        if not rows:
            return Sampled([], None)
        found = [masks.get(row.lane) for row in rows]
        return self._sampler.sample(
            logits,
            [row.lane for row in rows],
            [row.output_index for row in rows],
            [mask if isinstance(mask, Mask) else None for mask in found] if masks else None,
        )

    def _drop_stopped(self, composer: StepComposer, good: Mapping[int, int]) -> None:
        """Lanes that drew a stop id decode no further."""
        for lane, token in good.items():
            row = self._sampler.row(lane)
            if row is not None and token in row.stop_ids:
                composer.drop(lane)

    def _done(self, plan: TickPlan, outcome: TickOutcome, steps: int, began_ns: int) -> TickDone:
        return TickDone(plan.tick, outcome, steps, self._clock.now_ns() - began_ns)


def _moves_kv(plan: TickPlan) -> str | None:
    """Why a plan cannot run here at all: it moves KV between places that a library does not have."""
    if plan.park_out or plan.park_in or plan.park_drop or plan.copies:
        return "this engine cannot move or copy blocks of KV"
    return None


def _draw_fault(lane: int, token: int, mask: Mask | GrammarFault | None) -> LaneFault | None:
    """Why a lane cannot go on after its draw: its constraint, or nothing that could be drawn."""
    if isinstance(mask, GrammarFault):
        return LaneFault(lane, mask.code, mask.text)
    if token >= 0:
        return None
    if token == NOT_FINITE:
        return LaneFault(lane, ErrorCode.NAN_LOGITS, "the model's logits are not finite")
    if mask is not None:
        return LaneFault(lane, ErrorCode.INVALID_REQUEST, NOTHING_LEFT)
    return LaneFault(lane, ErrorCode.LANE_FAULT, "no token id is left to choose from")
