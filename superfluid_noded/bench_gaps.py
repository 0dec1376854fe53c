"""The part of `superfluid bench engine` about pauses: what lanes that decode see while a long prompt comes in.

Owns the scene (a few streams that decode, then one prompt beside them) and its figures; scheduler and engine are used as a node uses
them. The scene is played twice with the same engine: in chunks, as the scheduler does by default, its budget chosen from the rates that
it measures meanwhile, and with the whole prompt in one step.

    {"mode": "chunked", "gap_ms": 310, "pause_ms": 12, "first_ms": 2900, "budget": 1536, "step": 512, "decode_grant": 4}
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from superfluid_core.clock import MS, Clock
from superfluid_core.engine.base import Engine
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.plan import Cancel, Emits, Finish, Submit, TickPlan
from superfluid_core.scheduler.rules import PrefillMode, Rules
from superfluid_core.scheduler.scheduler import PoolShape, Scheduler
from superfluid_core.session import SamplingParams, SessionKey, SessionSpec

DECODERS = 4
PROMPT_TOKENS = 4_000
BEFORE_TOKENS = 24
AFTER_TOKENS = 8
CHUNK_STEP = 512
MODES = (PrefillMode.CHUNKED, PrefillMode.MONOLITHIC)
ROWS_SPARE = 16


class Scene(NamedTuple):
    """One playing: the streams' worst pause, their usual one, the prompt's first token, and what the scheduler chose."""

    gap_ms: float
    pause_ms: float
    first_ms: float
    budget: int
    step: int
    decode_grant: int


class _Stage:
    """A scheduler of one mode over an engine that outlives it."""

    def __init__(self, engine: Engine, mode: PrefillMode, prompt: int, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        info = engine.describe()
        self._vocabulary = info.vocabulary
        whole = prompt + ROWS_SPARE
        is_whole = mode is PrefillMode.MONOLITHIC
        limits = SchedulerLimits(
            lanes=DECODERS + 1,
            prefill_budget=whole if is_whole else 0,
            step_tokens=whole if is_whole else min(CHUNK_STEP, info.step_tokens),
        )
        pool = PoolShape(info.block_tokens, info.blocks, info.window)
        rules = Rules(prefill_mode=mode)
        self.scheduler = Scheduler(limits, pool, cuts_are_free=info.cuts_are_free, rules=rules)
        self.times: dict[SessionKey, list[int]] = {}
        self.left: set[SessionKey] = set()
        self.budget = self.step = self.grant = 0

    def submit(self, name: str, number: int, length: int, outputs: int) -> SessionKey:
        """Put one prompt in; `number` makes its ids differ from all others."""
        key = SessionKey(name, number)
        low, high = self._vocabulary // 8, self._vocabulary - 8
        ids = tuple(low + (at * 7919 + number * 104_729) % (high - low) for at in range(length))
        greedy = SamplingParams(temperature=0.0)
        self.times[key] = []
        self.left.add(key)
        self._take([Submit(SessionSpec(key, "bench", ids, outputs, sampling=greedy))])
        return key

    def cancel(self, keys: Sequence[SessionKey]) -> None:
        self._take([Cancel(key) for key in keys])

    def tick(self) -> bool:
        """Plan and run one tick; False when there is nothing to do."""
        plan = self.scheduler.plan(self._clock.now_ns())
        if plan is None:
            return False
        self._note(plan)
        done = self._engine.run(plan, lambda step: self._take([step]), lambda: False)
        self._take([done])
        return True

    def _note(self, plan: TickPlan) -> None:
        """Remember what the scheduler chose for the tick that carries most of the prompt."""
        prompt = sum(len(lane.inputs) for lane in plan.lanes if not lane.decoding)
        if prompt > self.budget:
            stats = self.scheduler.stats()
            self.budget, self.step = prompt, min(plan.step_tokens, prompt)
            self.grant = stats.decode_grant_tokens

    def _take(self, inputs: Sequence[Any]) -> None:
        now_ns = self._clock.now_ns()
        for effect in self.scheduler.receive(inputs, now_ns):
            if isinstance(effect, Emits):
                for key in effect.keys:
                    self.times[key].append(now_ns)
            elif isinstance(effect, Finish):
                self.left.discard(effect.key)


def play(engine: Engine, mode: PrefillMode, prompt: int, number: int, clock: Clock) -> Scene:
    """Let streams decode, bring the prompt in, and let them go on for a while behind it."""
    stage = _Stage(engine, mode, prompt, clock)
    outputs = BEFORE_TOKENS + AFTER_TOKENS + prompt
    base = number * (DECODERS + 1)
    streams = [stage.submit("stream", base + n, ROWS_SPARE, outputs) for n in range(DECODERS)]
    while min(len(stage.times[key]) for key in streams) < BEFORE_TOKENS:
        stage.tick()
    stage.budget = 0
    came_ns = clock.now_ns()
    long = stage.submit("prompt", base + DECODERS, prompt, 1)
    while long in stage.left and stage.tick():
        pass
    end = [len(stage.times[key]) + AFTER_TOKENS for key in streams]
    while any(len(stage.times[key]) < n for key, n in zip(streams, end, strict=True)):
        stage.tick()
    stage.cancel(streams)
    while stage.tick():
        pass
    gaps: list[float] = []
    pauses: list[float] = []
    for key in streams:
        for before_ns, after_ns in pairwise(stage.times[key]):
            (gaps if after_ns > came_ns else pauses).append((after_ns - before_ns) / MS)
    first_ms = (stage.times[long][0] - came_ns) / MS
    return Scene(max(gaps), median(pauses), first_ms, stage.budget, stage.step, stage.grant)


def measure_gaps(engine: Engine, rounds: int, clock: Clock, prompt: int = PROMPT_TOKENS) -> list[dict[str, Any]]:  # fmt: skip
    """Play both modes in turn, once more than counted; medians of the rounds."""
    scenes: dict[PrefillMode, list[Scene]] = {mode: [] for mode in MODES}
    for number in range(rounds + 1):
        for at, mode in enumerate(MODES):
            scene = play(engine, mode, prompt, number * len(MODES) + at, clock)
            if number:
                scenes[mode].append(scene)
    return [
        {"mode": str(mode), "prompt": prompt, "decoders": DECODERS}
        | {name: median(getattr(scene, name) for scene in found) for name in Scene._fields}
        for mode, found in scenes.items()
    ]


def gap_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Draw the figures for people."""
    return [
        f"{row['decoders']} streams while a prompt of {row['prompt']} tokens comes in, {row['mode']}:"
        f" worst pause {row['gap_ms']:.0f} ms (else {row['pause_ms']:.1f}), its first token after {row['first_ms']:.0f} ms,"
        f" at most {row['budget']:.0f} prompt tokens a tick in steps of {row['step']:.0f}"
        for row in rows
    ]
