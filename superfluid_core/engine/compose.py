"""Cuts a tick into steps: the same composition for every engine, real or simulated.

A step is one forward pass over a ragged, token-major batch: first the one token of every decoding lane, then prompt
inputs, lane after lane in plan order, until the step's token budget is full. A lane whose prompt completes samples in
that very step and decodes from the next one on. When no prompt is left, steps are pure decode until all grants are used.

    columns of a step   lane | position of first input | inputs | samples?
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from superfluid_core.scheduler.plan import LanePlan, TickPlan


@dataclass(slots=True)
class StepRow:
    """One lane's part of a step. `inputs` go to positions `position ..`; `samples` says whether its last row is drawn from.

    Not frozen, for every lane makes one in every step, and a frozen one costs four times as much to make. Nobody changes it.
    """

    lane: int
    position: int
    inputs: tuple[int, ...]
    samples: bool
    output_index: int
    decoding: bool


@dataclass(slots=True)
class _Lane:
    plan: LanePlan
    position: int
    inputs: tuple[int, ...]
    left: int
    output_index: int
    decoding: bool


class StepComposer:
    """Yields the steps of one plan; `commit` feeds the sampled ids back, `drop` ends a lane early."""

    def __init__(self, plan: TickPlan) -> None:
        self._step_tokens = max(1, plan.step_tokens)
        self._lanes = {
            lane.lane: _Lane(
                lane, lane.computed, lane.inputs, lane.grant, lane.output_index, lane.decoding
            )
            for lane in plan.lanes
        }

    def next_step(self) -> list[StepRow]:
        """Rows of the next forward pass; empty when the plan is used up."""
        rows = [
            StepRow(n, lane.position, lane.inputs, True, lane.output_index, True)
            for n, lane in self._lanes.items()
            if lane.decoding and lane.left > 0
        ]
        room = self._step_tokens - len(rows)
        for n, lane in self._lanes.items():
            if lane.decoding or not lane.inputs:
                continue
            if room <= 0 and rows:
                break
            take = lane.inputs[: max(1, room)]
            done = len(take) == len(lane.inputs)
            rows.append(
                StepRow(n, lane.position, take, done and lane.left > 0, lane.output_index, False)
            )
            room -= len(take)
        return rows

    def commit(self, rows: Iterable[StepRow], sampled: dict[int, int]) -> None:
        """Advance past `rows`; `sampled` maps lane to the id drawn for it."""
        for row in rows:
            lane = self._lanes.get(row.lane)
            if lane is None:
                continue
            lane.position += len(row.inputs)
            lane.inputs = lane.inputs[len(row.inputs) :]
            if not row.samples:
                continue
            if row.lane not in sampled:
                del self._lanes[row.lane]
                continue
            lane.inputs = (sampled[row.lane],)
            lane.left -= 1
            lane.output_index += 1
            lane.decoding = True

    def drop(self, lane: int) -> None:
        """No further step of this tick holds `lane` (it ended or failed)."""
        self._lanes.pop(lane, None)
