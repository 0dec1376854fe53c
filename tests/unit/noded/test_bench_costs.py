"""Recorded costs: what is tried, what is written, and that the simulator reads it back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from superfluid_core.engine.base import Capabilities, EngineInfo, Interrupted, OnStep
from superfluid_core.errors import CapacityError, ConfigError, ErrorCode
from superfluid_core.scheduler.plan import LaneFault, StepDone, TickDone, TickOutcome, TickPlan
from superfluid_core.session import Determinism
from superfluid_core.simulator.costs import StepLoad, parse_cost
from superfluid_noded.bench_costs import Row, Step, context_ps, powers, record_costs, steps_to_try

INFO = EngineInfo(
    weights_fingerprint="0" * 16,
    text_fingerprint="0" * 16,
    engine_build="exact",
    dtype="bfloat16",
    device="cpu",
    vocabulary=500,
    eos_ids=(),
    window=600,
    lanes=8,
    block_tokens=16,
    blocks=8 * 40,
    step_tokens=256,
    determinism=Determinism.NONE,
    capabilities=Capabilities(),
    kv_bytes_per_token=64,
    host_copy_bytes_per_s=1.5e9,
)


@dataclass
class ExactEngine:
    """Costs are a formula; every other step is a slow outlier when `stutters`. Plans are checked as a real engine would."""

    info: EngineInfo = INFO
    stutters: bool = False
    fault: LaneFault | None = None
    outcome: TickOutcome = TickOutcome.COMPLETE
    steps: int = 0
    sitting: set[int] = field(default_factory=set)

    def describe(self) -> EngineInfo:
        return self.info

    def close(self) -> None:
        self.sitting.clear()

    def run(self, plan: TickPlan, on_step: OnStep, interrupted: Interrupted) -> TickDone:
        del interrupted
        self.sitting -= set(plan.frees)
        self.sitting |= {start.lane for start in plan.starts}
        decode = prompt = positions = 0
        taken: list[int] = []
        for lane in plan.lanes:
            assert lane.lane in self.sitting
            end = lane.computed + len(lane.inputs)
            assert end <= min(self.info.window, len(lane.blocks) * self.info.block_tokens)
            assert all(0 <= token < self.info.vocabulary for token in lane.inputs)
            taken += lane.blocks
            positions += end
            decode += lane.decoding
            prompt += 0 if lane.decoding else len(lane.inputs)
        assert len(set(taken)) == len(taken)
        assert max(taken, default=0) < self.info.blocks
        assert decode + prompt <= self.info.step_tokens
        if plan.lanes:
            self.steps += 1
            elapsed = cost_ns(decode, prompt, positions) * (
                1 + 9 * (self.stutters and self.steps % 10 == 0)
            )
            faults = (self.fault,) if self.fault else ()
            on_step(StepDone(plan.tick, 0, (), (), (), decode + prompt, elapsed, None, faults))
        return TickDone(plan.tick, self.outcome, 1, 0)


def cost_ns(decode: int, prompt: int, positions: int) -> int:
    return 20_000_000 + 1_000_000 * decode + 50_000 * prompt + 3_000 * positions


@pytest.mark.parametrize("stutters", [False, True])
def test_the_simulator_reads_back_what_the_engine_costs(tmp_path: Path, stutters: bool) -> None:
    path = tmp_path / "costs.json"
    engine = ExactEngine(stutters=stutters)
    said: list[str] = []
    record_costs(engine, "some-model", path, 5, said.append)
    assert engine.sitting == set()
    cost = parse_cost(f"measured({path})", 1)
    for decode, prompt, positions in [
        (1, 0, 40),
        (3, 0, 900),
        (8, 0, 4000),
        (0, 64, 64),
        (0, 200, 200),
    ]:
        expected = cost_ns(decode, prompt, positions)
        assert cost.step_ns(StepLoad(decode, prompt, positions)) == pytest.approx(
            expected, rel=1e-4
        )
    written = json.loads(path.read_text())
    assert (written["model"], written["device"], written["dtype"]) == (
        "some-model",
        "cpu",
        "bfloat16",
    )
    assert (written["kv_bytes_per_token"], written["host_copy_bytes_per_s"]) == (64, 1_500_000_000)
    assert written["context_ps"] == 3_000_000
    row = {"decode": 8, "prompt": 0, "context": 256, "ns": cost_ns(8, 0, 8 * 256)}
    assert row in written["rows"]
    assert len(said) == 5 + len(written["rows"])
    assert [file.name for file in tmp_path.iterdir()] == ["costs.json"]


def test_small_pools_windows_and_steps_are_respected(tmp_path: Path) -> None:
    for info in (
        replace(INFO, lanes=1, blocks=1, window=600),
        replace(INFO, lanes=3, blocks=4, step_tokens=3),
        replace(INFO, window=1),
        replace(INFO, step_tokens=8),
    ):
        engine = ExactEngine(info)
        record_costs(engine, "m", tmp_path / "c.json", 1, lambda _: None)
        assert parse_cost(f"measured({tmp_path / 'c.json'})", 1).step_ns(StepLoad(1, 0, 1)) > 0
    with pytest.raises(CapacityError, match="too small"):
        steps_to_try(replace(INFO, blocks=7))


def test_a_fault_or_a_refusal_of_the_engine_is_told(tmp_path: Path) -> None:
    faulty = ExactEngine(fault=LaneFault(0, ErrorCode.NAN_LOGITS, "not finite"))
    with pytest.raises(ConfigError, match="not finite"):
        record_costs(faulty, "m", tmp_path / "c.json", 1, lambda _: None)
    with pytest.raises(ConfigError, match="refused"):
        record_costs(ExactEngine(outcome=TickOutcome.REFUSED), "m", tmp_path / "c.json", 1, print)
    with pytest.raises(ConfigError, match="no such directory"):
        record_costs(ExactEngine(), "m", tmp_path / "none" / "c.json", 1, print)
    assert list(tmp_path.iterdir()) == []


def test_the_cost_of_context_is_a_slope_within_batches() -> None:
    rows = [Row(Step(n, 0, c, 0), 7_000_000 * n + 40 * n * c) for n in (1, 4) for c in (10, 500)]
    assert context_ps(rows) == 40_000
    assert context_ps([Row(Step(1, 0, c, 0), 100 - c) for c in (1, 2)]) == 0
    assert context_ps(rows[:1]) == 0


def test_sizes_double_and_end_with_the_last() -> None:
    assert powers(1, 8) == [1, 2, 4, 8]
    assert powers(16, 100) == [16, 32, 64, 100]
    assert powers(16, 3) == [3]
    assert powers(16, 0) == []
