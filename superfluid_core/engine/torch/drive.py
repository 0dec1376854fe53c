"""Runs prompts through an engine without a scheduler: for benches, self-tests and proofs of correctness.

Owns a plain account of lanes and blocks: every session gets what it asks for, in the order of opening, or the driver
raises. It uses an engine by its contract alone, so it can drive any. No queue, no sharing, no policy: that is what the
scheduler is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from superfluid_core.engine.base import Engine
from superfluid_core.errors import CapacityError
from superfluid_core.scheduler.plan import (
    LaneFault,
    LanePlan,
    LaneStart,
    StepDone,
    TickDone,
    TickOutcome,
    TickPlan,
)
from superfluid_core.session import SamplingParams, SessionKey, SessionSpec, TokenLogprobs

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Driven:
    """A session that is being driven; `computed` positions have their KV in `blocks`."""

    lane: int
    spec: SessionSpec
    outputs: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    fault: LaneFault | None = None
    is_started: bool = False

    @property
    def context(self) -> list[int]:
        return [*self.spec.prompt, *self.outputs]

    @property
    def is_done(self) -> bool:
        ended = bool(self.outputs) and self.outputs[-1] in self.spec.stop_ids
        return self.fault is not None or ended or len(self.outputs) >= self.spec.max_output


class Driver:
    """Opens sessions on an engine and ticks until they are done. `blocks` is the order in which blocks are given out.

    While `batch_invariant` is set, ticks are planned as such.
    """

    def __init__(self, engine: Engine, blocks: Iterable[int] | None = None) -> None:
        self.engine = engine
        self.info = engine.describe()
        self.sessions: list[Driven] = []
        self.steps: list[StepDone] = []
        self._free = list(range(self.info.blocks) if blocks is None else blocks)[::-1]
        self._lanes = list(range(self.info.lanes))[::-1]
        self._frees: list[int] = []
        self._ticks = 0
        self._opened = 0
        self.batch_invariant = False

    def open(
        self,
        prompt: Sequence[int],
        max_output: int,
        sampling: SamplingParams = GREEDY,
        *,
        delivered: Sequence[int] = (),
        min_output: int = 0,
        stop_ids: Iterable[int] = (),
    ) -> Driven:
        """Take a lane for a session; it runs from the next tick on. Raises CapacityError when no lane is left."""
        spec = SessionSpec(
            key=SessionKey("drive", self._opened + 1),
            model="drive",
            prompt=tuple(prompt),
            delivered=tuple(delivered),
            max_output=max_output,
            min_output=min_output,
            stop_ids=frozenset(stop_ids),
            sampling=sampling,
        )
        return self.open_spec(spec)

    def open_spec(self, spec: SessionSpec) -> Driven:
        """Do the same for a session that is described already."""
        if not self._lanes:
            raise CapacityError("no lane is free")
        self._opened += 1
        session = Driven(self._lanes.pop(), spec, list(spec.delivered))
        self.sessions.append(session)
        return session

    def close(self, session: Driven) -> None:
        """Give the session's lane and blocks back."""
        self.sessions.remove(session)
        self._frees.append(session.lane)
        self._lanes.append(session.lane)
        self._free += session.blocks[::-1]
        session.blocks = []

    def plan(
        self, steps: int, prompt_tokens: int | None = None, step_tokens: int | None = None
    ) -> TickPlan:
        """Plan one tick: at most `steps` ids and `prompt_tokens` prompt inputs a lane."""
        live = [session for session in self.sessions if not session.is_done]
        lanes = [self._lane(session, steps, prompt_tokens) for session in live]
        starts = tuple(
            LaneStart(session.lane, session.spec, tuple(session.outputs))
            for session in live
            if not session.is_started
        )
        for session in live:
            session.is_started = True
        frees, self._frees = tuple(self._frees), []
        self._ticks += 1
        return TickPlan(
            tick=self._ticks,
            lanes=tuple(sorted(lanes, key=lambda lane: not lane.decoding)),
            step_tokens=step_tokens or self.info.step_tokens,
            starts=starts,
            frees=frees,
            batch_invariant=self.batch_invariant,
        )

    def tick(
        self, steps: int = 16, prompt_tokens: int | None = None, step_tokens: int | None = None
    ) -> TickDone:
        """Run one tick and take its ids over. Raises CapacityError when the engine refuses the plan."""
        done = self.engine.run(
            self.plan(steps, prompt_tokens, step_tokens), self._take, lambda: False
        )
        if done.outcome is TickOutcome.REFUSED:
            raise CapacityError("the engine refused the plan")
        return done

    def finish(
        self, steps: int = 16, prompt_tokens: int | None = None, step_tokens: int | None = None
    ) -> None:
        """Tick until every open session is done."""
        while any(not session.is_done for session in self.sessions):
            self.tick(steps, prompt_tokens, step_tokens)

    def _lane(self, session: Driven, steps: int, prompt_tokens: int | None) -> LanePlan:
        inputs = session.context[session.computed :]
        decoding = len(inputs) == 1 and session.computed > 0
        taken = inputs if decoding or prompt_tokens is None else inputs[:prompt_tokens]
        left = session.spec.max_output - len(session.outputs)
        grant = min(steps, left) if len(taken) == len(inputs) else 0
        end = session.computed + len(taken) + max(0, grant - 1)
        needed = -(-end // self.info.block_tokens) - len(session.blocks)
        if needed > len(self._free):
            raise CapacityError("no KV block is free")
        session.blocks += [self._free.pop() for _ in range(needed)]
        return LanePlan(
            lane=session.lane,
            decoding=decoding,
            computed=session.computed,
            inputs=tuple(taken),
            grant=grant,
            output_index=len(session.outputs),
            blocks=tuple(session.blocks),
        )

    def _take(self, step: StepDone) -> None:
        self.steps.append(step)
        by_lane = {session.lane: session for session in self.sessions}
        prefilled = dict(step.prefilled)
        for lane, count in prefilled.items():
            by_lane[lane].computed += count
        logprobs = step.logprobs or [None] * len(step.ids)
        for lane, token, logprob in zip(step.lanes, step.ids, logprobs, strict=True):
            session = by_lane[lane]
            session.outputs.append(token)
            session.logprobs.append(logprob)
            if lane not in prefilled:
                session.computed += 1
        for fault in step.faults:
            by_lane[fault.lane].fault = fault
