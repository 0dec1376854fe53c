"""Records what a step costs on the real engine, as a file that the simulator reads: `superfluid bench engine --record-costs`.

Owns which steps are tried and how they are boiled down; an engine is used by its contract alone. Sessions are not computed
up to the context that a step is to have: their blocks hold zeros, which cost as much to read as anything else.

    rows       every measured step: decoding lanes, prompt tokens, mean context of a lane, median ns of its repeats
    decode     [lanes, ns] without what reading the context costs
    prefill    [prompt tokens, ns] likewise
    context_ps what one position of KV adds, picoseconds, from rows that differ in nothing else
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from superfluid_core.engine.base import Engine, EngineInfo
from superfluid_core.errors import CapacityError, ConfigError
from superfluid_core.scheduler.plan import LanePlan, LaneStart, StepDone, TickOutcome, TickPlan
from superfluid_core.session import SamplingParams, SessionKey, SessionSpec
from superfluid_core.simulator.costs import COSTS_FORMAT

CONTEXTS = (32, 256, 1024, 4096)
WARM_STEPS = 1
Say = Callable[[str], None]


class Step(NamedTuple):
    """A step to try: lanes that decode at `context` positions each, and one prompt beside them that ends at `prompt_end`."""

    decode: int
    prompt: int
    context: int
    prompt_end: int

    @property
    def positions(self) -> int:
        """KV positions that are read over all lanes."""
        return self.decode * self.context + self.prompt_end


class Row(NamedTuple):
    """A measured step."""

    step: Step
    ns: int

    def shown(self) -> dict[str, int]:
        lanes = self.step.decode + bool(self.step.prompt)
        return {
            "decode": self.step.decode,
            "prompt": self.step.prompt,
            "context": round(self.step.positions / lanes),
            "ns": self.ns,
        }


def powers(low: int, high: int) -> list[int]:
    """Doublings from `low`, and `high` itself."""
    found = [low << shift for shift in range(32) if low << shift < high]
    return [*found, high] if high >= 1 else []


def steps_to_try(info: EngineInfo) -> list[Step]:
    """Every batch at a few contexts, every prompt size alone and deep in a context, and a full step of both kinds."""
    room = info.blocks // info.lanes * info.block_tokens
    longest = min(info.window, room)
    if longest < 1:
        raise CapacityError("the KV pool is too small to measure in")
    contexts = sorted({min(context, longest) for context in CONTEXTS})
    largest = min(info.step_tokens, longest)
    steps = [Step(n, 0, c, 0) for n in powers(1, info.lanes) for c in contexts]
    steps += [Step(0, prompt, 0, prompt) for prompt in powers(16, largest)]
    steps += [Step(0, p, 0, longest) for p in (largest // 4, largest // 2) if 0 < p < longest]
    if info.lanes > 1:
        mixed = min(info.step_tokens - info.lanes + 1, longest)
        steps += [Step(info.lanes - 1, p, contexts[0], p) for p in powers(16, mixed)]
    return steps


def measure(engine: Engine, steps: Sequence[Step], repeats: int, say: Say) -> list[Row]:
    """Run all steps in `repeats` rounds, so that a busy moment of the machine falls on few repeats of any one step."""
    probe = _Probe(engine)
    times: dict[Step, list[int]] = {step: [] for step in steps}
    for number in range(repeats):
        for step in steps:
            times[step].append(probe.run(step))
        say(f"round {number + 1} of {repeats}")
    rows = [Row(step, round(median(times[step]))) for step in steps]
    for row in rows:
        shown = row.shown()
        say(
            f"{shown['decode']:>4} decode {shown['prompt']:>5} prompt {shown['context']:>6} context"
            f" {shown['ns'] / 1e6:>9.2f} ms"
        )
    return rows


class _Probe:
    """Plans that consist of one kind of step, on an engine that nobody else uses."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._info = engine.describe()
        self._ticks = 0

    def run(self, step: Step) -> int:
        """Nanoseconds of one step, after one that is not counted."""
        times: list[int] = []
        lanes = tuple(range(step.decode + bool(step.prompt)))
        starts = tuple(LaneStart(lane, self._spec(lane), ()) for lane in lanes)
        for number in range(WARM_STEPS + 1):
            planned = [self._decoding(lane, step.context) for lane in range(step.decode)]
            if step.prompt:
                planned.append(self._prompt(step.decode, step))
            self._run(tuple(planned), () if number else starts, (), times)
        self._run((), (), lanes, [])
        return times[-1]

    def _run(
        self,
        lanes: tuple[LanePlan, ...],
        starts: tuple[LaneStart, ...],
        frees: tuple[int, ...],
        times: list[int],
    ) -> None:
        self._ticks += 1
        tokens = sum(len(lane.inputs) for lane in lanes)
        plan = TickPlan(self._ticks, lanes, max(1, tokens), starts=starts, frees=frees)

        def on_step(done: StepDone) -> None:
            if done.faults:
                raise ConfigError(f"the engine cannot be measured: {done.faults[0].text}")
            times.append(done.elapsed_ns)

        if self._engine.run(plan, on_step, lambda: False).outcome is not TickOutcome.COMPLETE:
            raise ConfigError("the engine refused a plan of the bench")

    def _spec(self, lane: int) -> SessionSpec:
        key = SessionKey("costs", self._ticks * self._info.lanes + lane)
        greedy = SamplingParams(temperature=0.0)
        return SessionSpec(key, "costs", (1,), self._info.window, sampling=greedy)

    def _ids(self, count: int) -> tuple[int, ...]:
        low = self._info.vocabulary // 8
        return tuple(low + at * 7 % max(1, self._info.vocabulary - low) for at in range(count))

    def _blocks(self, lane: int, positions: int) -> tuple[int, ...]:
        each = self._info.blocks // self._info.lanes
        first = lane * each
        return tuple(range(first, first + -(-positions // self._info.block_tokens)))

    def _decoding(self, lane: int, context: int) -> LanePlan:
        blocks = self._blocks(lane, context)
        return LanePlan(lane, True, context - 1, self._ids(1), 1, 1, blocks)

    def _prompt(self, lane: int, step: Step) -> LanePlan:
        start = step.prompt_end - step.prompt
        blocks = self._blocks(lane, step.prompt_end)
        return LanePlan(lane, False, start, self._ids(step.prompt), 1, 0, blocks)


def context_ps(rows: Sequence[Row]) -> int:
    """Picoseconds that one KV position adds: the common slope of groups that decode the same number of lanes."""
    above = below = 0.0
    for group in _groups(rows).values():
        mean_at = sum(row.step.positions for row in group) / len(group)
        mean_ns = sum(row.ns for row in group) / len(group)
        for row in group:
            above += (row.step.positions - mean_at) * (row.ns - mean_ns)
            below += (row.step.positions - mean_at) ** 2
    return max(0, round(1000 * above / below)) if below else 0


def _groups(rows: Sequence[Row]) -> dict[int, list[Row]]:
    groups: dict[int, list[Row]] = {}
    for row in rows:
        if not row.step.prompt:
            groups.setdefault(row.step.decode, []).append(row)
    return groups


def table(rows: Sequence[Row], info: EngineInfo, model: str) -> dict[str, Any]:
    """Boil measured steps down to the simulator's table; the rows stay beside it."""
    each_ps = context_ps(rows)

    def bare(row: Row) -> int:
        return max(0, row.ns - row.step.positions * each_ps // 1000)

    prompts = [
        row for row in rows if not row.step.decode and row.step.prompt == row.step.prompt_end
    ]
    return {
        "format": COSTS_FORMAT,
        "model": model,
        "device": info.device,
        "dtype": info.dtype,
        "build": info.engine_build,
        "kv_bytes_per_token": info.kv_bytes_per_token,
        "host_copy_bytes_per_s": round(info.host_copy_bytes_per_s),
        "host_copy_overhead_ns": info.host_copy_overhead_ns,
        "context_ps": each_ps,
        "decode": [
            [lanes, round(median(map(bare, group)))] for lanes, group in _groups(rows).items()
        ],
        "prefill": [[row.step.prompt, bare(row)] for row in prompts],
        "rows": [row.shown() for row in rows],
    }


def record_costs(engine: Engine, model: str, path: Path, repeats: int, say: Say) -> dict[str, Any]:
    """Measure, write the file, return what was written. Raises ConfigError when it cannot be written."""
    if not path.parent.is_dir():
        raise ConfigError(f"--record-costs {path}: no such directory")
    info = engine.describe()
    found = table(measure(engine, steps_to_try(info), repeats, say), info, model)
    text = json.dumps(found, indent=1) + "\n"
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(
            f"--record-costs {path}: {error.strerror or 'cannot be written'}"
        ) from None
    return found
