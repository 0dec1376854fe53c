"""Cuts a tick into steps: the same composition for every engine, real or simulated.

A step is one forward pass over a ragged, token-major batch: first the one token of every decoding lane, then prompt
inputs, lane after lane in plan order, until the step's token budget is full. A lane whose prompt completes samples in
that very step and decodes from the next one on. When no prompt is left, steps are pure decode until all grants are used.

Decoding lanes are columns. From one step to the next all of them move on by one position, so only the fed ids change:
the columns are made anew when a lane joins or leaves, not in every step.

    rows of a step      lane | position of first input | inputs | samples?
    decoding lane i     lanes[i] | bases[i] + shift | (ids[i],) | yes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from superfluid_core.scheduler.plan import LanePlan, LanePlans, TickPlan


@dataclass(slots=True)
class StepRow:
    """One lane's part of a step. `inputs` go to positions `position ..`; `samples` says whether its last row is drawn from.

    Not frozen, for an engine makes one per lane and step, and a frozen one costs four times as much to make. Nobody changes it.
    """

    lane: int
    position: int
    inputs: tuple[int, ...]
    samples: bool
    output_index: int
    decoding: bool


@dataclass(slots=True)
class _Columns:
    """The lanes that decode, in parallel. Bases are counted from the tick's first step; `ends` are steps of the tick.

    Made anew on every change: steps that were handed out share them. `places` is the sum of all bases.
    """

    lanes: Sequence[int]
    bases: Sequence[int]
    indices: Sequence[int]
    ends: Sequence[int]
    places: int

    def kept(self, is_kept: Sequence[bool]) -> _Columns:
        bases = list(compress(self.bases, is_kept))
        return _Columns(
            list(compress(self.lanes, is_kept)),
            bases,
            list(compress(self.indices, is_kept)),
            list(compress(self.ends, is_kept)),
            sum(bases),
        )


@dataclass(slots=True)
class Step:
    """One forward pass: decoding lanes as columns, then rows of prompts. Nobody changes it.

    `sampling` names the lanes that draw, in row order; `ids` are the inputs of the decoding lanes.
    """

    decoding: _Columns
    ids: Sequence[int]
    shift: int
    prompts: Sequence[StepRow]
    prompt_tokens: int
    sampling: Sequence[int]

    def __len__(self) -> int:
        return len(self.ids) + len(self.prompts)

    @property
    def context(self) -> int:
        """KV positions that the step reads, over all lanes."""
        read = self.decoding.places + len(self.ids) * (self.shift + 1)
        if self.prompts:
            read += self.prompt_tokens + sum(row.position for row in self.prompts)
        return read

    def rows(self) -> list[StepRow]:
        """Every lane's part, one by one."""
        columns, shift = self.decoding, self.shift
        parts = zip(columns.lanes, columns.bases, columns.indices, self.ids, strict=True)
        rows = [
            StepRow(lane, base + shift, (token,), True, index + shift, True)
            for lane, base, index, token in parts
        ]
        rows += self.prompts
        return rows


class StepComposer:
    """Yields the steps of one plan; `commit` feeds the sampled ids back, `drop` ends a lane early."""

    def __init__(self, plan: TickPlan) -> None:
        self._step_tokens = max(1, plan.step_tokens)
        self._steps = 0
        self._step: Step | None = None
        lanes = plan.lanes if isinstance(plan.lanes, LanePlans) else LanePlans.of(plan.lanes)
        self._columns = _Columns(
            lanes.lanes, lanes.computed, lanes.indices, lanes.grants, sum(lanes.computed)
        )
        self._ids: Sequence[int] = lanes.tokens
        self._next_end = min(lanes.grants, default=0)
        self._prompts = {each.lane: each for each in lanes.prompts if each.inputs}
        # inputs of prompts that were fed already
        self._fed: dict[int, int] = {}

    def next_step(self) -> Step | None:
        """Compose the next forward pass; None when the plan is used up. Nothing moves on until `commit`."""
        columns = self._columns
        sampling = columns.lanes
        prompts: Sequence[StepRow] = ()
        tokens = 0
        if self._prompts:
            prompts = self._cut(self._step_tokens - len(sampling))
            sampling = [*sampling]
            for row in prompts:
                tokens += len(row.inputs)
                if row.samples:
                    sampling.append(row.lane)
        elif not sampling:
            return None
        self._step = Step(columns, self._ids, self._steps, prompts, tokens, sampling)
        return self._step

    def steady(self) -> int:
        """Count the steps, from the one composed now on, that hold the same decoding lanes if none ends early."""
        if self._prompts or not self._columns.lanes:
            return 0
        return self._next_end - self._steps

    def commit(self, lanes: Sequence[int], ids: Sequence[int]) -> None:
        """Advance past the step composed last; `ids[i]` was drawn for `lanes[i]`. Who should have drawn and did not ends."""
        step, self._step = self._step, None
        assert step is not None, "no step was composed"
        self._steps += 1
        if step.decoding is self._columns and lanes == step.sampling:
            count = len(step.ids)
            self._ids = ids[:count] if step.prompts else ids
            # whose prompts are complete come behind those that decode
            drawn = zip(lanes[count:], ids[count:], strict=True)
        else:
            drawn = zip(lanes, ids, strict=True)
            self._keep_drawn(dict(zip(lanes, ids, strict=True)))
        if step.prompts:
            self._feed(step.prompts, dict(drawn))
        if self._steps >= self._next_end:
            self._keep(list(map(self._steps.__lt__, self._columns.ends)))

    def drop(self, lane: int) -> None:
        """No further step of this tick holds `lane` (it ended or failed)."""
        self._prompts.pop(lane, None)
        if lane in self._columns.lanes:
            self._keep([each != lane for each in self._columns.lanes])

    # --- within -----------------------------------------------------------------------------------

    def _cut(self, room: int) -> list[StepRow]:
        """Take prompt inputs until the step is full; a step without any other row takes at least one."""
        rows: list[StepRow] = []
        for lane, plan in self._prompts.items():
            if room <= 0 and (rows or self._columns.lanes):
                break
            fed = self._fed.get(lane, 0)
            take = plan.inputs[fed : fed + max(1, room)]
            is_last = fed + len(take) == len(plan.inputs)
            samples = is_last and plan.grant > 0
            rows.append(StepRow(lane, plan.computed + fed, take, samples, plan.output_index, False))
            room -= len(take)
        return rows

    def _keep_drawn(self, drawn: dict[int, int]) -> None:
        lanes = self._columns.lanes
        self._ids = [drawn.get(lane, 0) for lane in lanes]
        self._keep([lane in drawn for lane in lanes])

    def _feed(self, rows: Sequence[StepRow], drawn: dict[int, int]) -> None:
        """Move prompts on; the completed ones that drew decode from now on."""
        joining: list[LanePlan] = []
        for row in rows:
            plan = self._prompts.get(row.lane)
            if plan is None:
                continue
            fed = self._fed[row.lane] = self._fed.get(row.lane, 0) + len(row.inputs)
            if fed == len(plan.inputs):
                del self._prompts[row.lane]
                if plan.grant > 1 and row.lane in drawn:
                    joining.append(plan)
        if joining:
            self._join(joining, drawn)

    def _join(self, plans: Sequence[LanePlan], drawn: dict[int, int]) -> None:
        """Append lanes that have drawn their first id in this tick."""
        columns, steps = self._columns, self._steps
        bases = [plan.computed + len(plan.inputs) - steps for plan in plans]
        ends = [*columns.ends, *[plan.grant - 1 + steps for plan in plans]]
        self._ids = [*self._ids, *[drawn[plan.lane] for plan in plans]]
        self._columns = _Columns(
            [*columns.lanes, *[plan.lane for plan in plans]],
            [*columns.bases, *bases],
            [*columns.indices, *[plan.output_index + 1 - steps for plan in plans]],
            ends,
            columns.places + sum(bases),
        )
        self._next_end = min(ends)

    def _keep(self, is_kept: Sequence[bool]) -> None:
        if all(is_kept):
            return
        self._ids = list(compress(self._ids, is_kept))
        self._columns = self._columns.kept(is_kept)
        self._next_end = min(self._columns.ends, default=0)
