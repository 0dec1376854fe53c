"""Engines in step: rank 0 tells the others each plan and every interruption, and all of them run it.

Owns that agreement and nothing of a step. Whatever else decides a step (ids drawn, stops, faults) follows on every rank from the same logits and
the same counter-based noise. Not offered over several ranks: grammars and vectors, whose work only rank 0 would know of.
"""

from __future__ import annotations

from collections.abc import Callable

from superfluid_core.engine.base import EngineInfo, Interrupted, OnStep
from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.engine.torch.parallel.codec import plan_bytes, plan_of
from superfluid_core.engine.torch.parallel.group import Ranks
from superfluid_core.errors import EngineError
from superfluid_core.scheduler.plan import StepDone, TickDone, TickPlan


class LeadingEngine:
    """Implements `Engine` on rank 0. `end` ends the other ranks' processes, and is called once."""

    def __init__(self, inner: TorchEngine, ranks: Ranks, end: Callable[[], None]) -> None:
        self._inner = inner
        self._ranks = ranks
        self._end = end
        self._is_closed = False

    def describe(self) -> EngineInfo:
        return self._inner.describe()

    def run(self, plan: TickPlan, on_step: OnStep, interrupted: Interrupted) -> TickDone:
        """Run a plan on all ranks; see `Engine.run`. A rank that does not answer is an EngineError."""
        if self._is_closed:
            raise EngineError("the engine is closed")
        try:
            self._ranks.say(plan_bytes(plan))
            return self._inner.run(plan, on_step, lambda: self._ranks.agree(flag=interrupted()))
        except RuntimeError as error:
            raise EngineError(f"ranks: {str(error).splitlines()[0][:200]}") from error

    def close(self) -> None:
        """No plan runs after this; the other ranks end."""
        if not self._is_closed:
            self._is_closed = True
            self._inner.close()
            self._end()


def follow(inner: TorchEngine, ranks: Ranks, is_wanted: Callable[[], bool]) -> None:
    """Run what rank 0 says until nobody wants this rank."""

    def ignore(_step: StepDone) -> None:
        """Rank 0 reports."""

    while (word := ranks.hear(is_wanted)) is not None:
        inner.run(plan_of(word), ignore, lambda: ranks.agree(flag=False))
