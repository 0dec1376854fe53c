"""A virtual clock and builders for plans, shared by the tests of the simulated engine and its loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from superfluid_core.engine.script import load_script
from superfluid_core.engine.sim import NumberedTexts, SimEngine, SimOptions
from superfluid_core.scheduler.plan import LanePlan, LaneStart, StepDone, TickDone, TickPlan
from superfluid_core.session import SamplingParams, SessionKey, SessionSpec

TEXTS = NumberedTexts(1024)
EOS = TEXTS.eos_ids[0]


class VirtualTime:
    """A clock that only sleeping moves; also the engine's pause."""

    def __init__(self) -> None:
        self.ns = 0
        self.is_closed = False
        self.slept: list[float] = []

    def now_ns(self) -> int:
        return self.ns

    def boot_ns(self) -> int:
        return self.ns

    def wall_s(self) -> int:
        return 0

    def wait(self, seconds: float) -> bool:
        self.slept.append(seconds)
        self.ns += round(seconds * 1e9)
        return not self.is_closed

    def close(self) -> None:
        self.is_closed = True


def spec_of(prompt: str | tuple[int, ...] = "hello", **fields: object) -> SessionSpec:
    ids = tuple(prompt.encode()) if isinstance(prompt, str) else prompt
    values: dict[str, object] = {
        "key": SessionKey("head", 1),
        "model": "m",
        "prompt": ids,
        "max_output": 32,
        "stop_ids": frozenset({EOS}),
        "sampling": SamplingParams(seed=7),
    }
    values.update(fields)
    return SessionSpec(**values)  # type: ignore[arg-type] # built by name for brevity


class Bench:
    """Runs plans by hand on a SimEngine and keeps what it reported."""

    def __init__(self, script: str = "", **options: object) -> None:
        self.time = VirtualTime()
        self.crashed = 0
        self.engine = SimEngine(
            TEXTS,
            SimOptions(**options),  # type: ignore[arg-type] # built by name for brevity
            self.time,
            pause=self.time,
            script=load_script(script, TEXTS) if script else None,
            crash=self._crash,
        )
        self.steps: list[StepDone] = []
        self._tick = 0

    def _crash(self) -> None:
        self.crashed += 1

    def tick(
        self,
        lanes: list[LanePlan],
        starts: list[LaneStart],
        step_tokens: int = 512,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> TickDone:
        self._tick += 1
        plan = TickPlan(self._tick, tuple(lanes), step_tokens, tuple(starts))
        return self.engine.run(plan, self.steps.append, interrupted)

    def prefill(
        self, specs: list[SessionSpec], grant: int, step_tokens: int = 512
    ) -> list[list[int]]:
        """Start every spec in a lane of its own and let it sample `grant` ids; ids per lane."""
        before = len(self.steps)
        starts, lanes = [], []
        for lane, spec in enumerate(specs):
            context = spec.prompt + spec.delivered
            blocks = -(-(len(context) + grant) // 16)
            table = tuple(range(lane * 64, lane * 64 + blocks))
            starts.append(LaneStart(lane, spec, spec.delivered))
            lanes.append(LanePlan(lane, False, 0, context, grant, len(spec.delivered), table))
        self.tick(lanes, starts, step_tokens)
        ids: list[list[int]] = [[] for _ in specs]
        for step in self.steps[before:]:
            for lane, token in zip(step.lanes, step.ids, strict=True):
                ids[lane].append(token)
        return ids


@pytest.fixture
def bench() -> Bench:
    return Bench(eos_probability=0.0)
