"""Decoding one step ahead: the order of launches and reads, early ends, interruptions, faults, and who is no matter for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine
from superfluid_core.engine.torch.cuda.ahead import AheadDecoder
from superfluid_core.engine.torch.cuda.devices import HostDevice, Pending
from superfluid_core.engine.torch.drive import Driver
from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.engine.torch.selftest.engines import run_sessions
from superfluid_core.engine.torch.selftest.model import TinyModel
from superfluid_core.errors import ErrorCode
from superfluid_core.scheduler.plan import StepDone, TickOutcome
from superfluid_core.session import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
OPTIONS = TorchOptions(device="cpu", dtype="float32", lanes=4, kv_blocks=64, threads=1)


class Watched(HostDevice):
    """Notes launches (one fetch each) and reads; ids are kept back until they are read."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.notes: list[str] = []

    def fetch(self, ids: Tensor) -> Pending:
        launched = sum(note.startswith("launch") for note in self.notes)
        self.notes.append(f"launch {launched}")
        return Kept(ids.clone(), launched, self.notes)


class Kept:
    def __init__(self, ids: Tensor, number: int, notes: list[str]) -> None:
        self._ids, self._number, self._notes = ids, number, notes

    def ids(self) -> list[int]:
        self._notes.append(f"read {self._number}")
        found: list[int] = self._ids.tolist()
        return found


def watched(files: TinyModel) -> tuple[TorchEngine, Watched]:
    engine, device = build_torch_engine(files, replace(OPTIONS, graphs=True)), Watched()
    assert engine._paths.graphs is not None
    engine._ahead = AheadDecoder(engine._paths.graphs, engine._sampler, device, engine._pool)
    return engine, device


def started(engine: TorchEngine, *prompts: Sequence[int], **more: Any) -> Driver:
    """Open sessions and compute their prompts."""
    driver = Driver(engine)
    for number, prompt in enumerate(prompts):
        values: dict[str, Any] = {"max_output": 40, "sampling": GREEDY}
        driver.open(prompt, **(values | more.get(f"session_{number}", {})))
    driver.tick(steps=1)
    driver.steps.clear()
    return driver


def test_a_step_is_launched_before_the_one_before_it_is_read(tiny_model: TinyModel) -> None:
    engine, device = watched(tiny_model)
    driver = started(engine, [1, 2, 3], [4, 5])
    driver.tick(steps=4)
    assert device.notes == [
        "launch 0", "launch 1", "read 0", "launch 2", "read 1", "launch 3", "read 2", "read 3",
    ]  # fmt: skip
    assert [step.step for step in driver.steps] == [0, 1, 2, 3]
    assert all(step.tokens == 2 and step.elapsed_ns > 0 for step in driver.steps)


def test_grants_of_unlike_length_end_a_stretch_where_the_first_one_ends(
    tiny_model: TinyModel,
) -> None:
    engine, device = watched(tiny_model)
    driver = started(engine, [1, 2, 3], [4, 5], session_1={"max_output": 3})
    driver.tick(steps=5)
    assert [len(step.ids) for step in driver.steps] == [2, 2, 1, 1, 1]
    assert device.notes[:4] == ["launch 0", "launch 1", "read 0", "read 1"]


def plain(files: TinyModel, prompt: Sequence[int], count: int) -> list[int]:
    driver = Driver(build_torch_engine(files, OPTIONS))
    session = driver.open(prompt, count, GREEDY)
    driver.finish()
    return session.outputs


def stop_in(ids: Sequence[int], first: int) -> int:
    return next(token for at, token in enumerate(ids) if at >= first and token not in ids[:at])


def test_what_was_drawn_for_a_lane_after_its_end_is_thrown_away(tiny_model: TinyModel) -> None:
    free = plain(tiny_model, [4, 5], 30)
    stop = stop_in(free, 4)
    end = free.index(stop)
    engine, device = watched(tiny_model)
    driver = started(engine, [1, 2, 3], [4, 5], session_1={"stop_ids": [stop]})
    driver.tick(steps=20)
    first, second = driver.sessions
    assert second.outputs == free[: end + 1]
    assert first.outputs == plain(tiny_model, [1, 2, 3], 21)
    lengths = [len(step.ids) for step in driver.steps]
    assert lengths == [2] * end + [1] * (20 - end)
    # one launch more than reported steps would be a third of a step lost; it was reported for the lane that lives
    launches = [note for note in device.notes if note.startswith("launch")]
    assert len(launches) == 20


def test_when_all_lanes_end_the_step_under_way_is_reported_to_nobody(
    tiny_model: TinyModel,
) -> None:
    free = plain(tiny_model, [4, 5], 30)
    stop = stop_in(free, 4)
    engine, device = watched(tiny_model)
    driver = started(engine, [4, 5], session_0={"stop_ids": [stop]})
    done = driver.tick(steps=20)
    assert done.outcome is TickOutcome.COMPLETE
    assert done.steps == len(driver.steps) == free.index(stop)
    assert device.notes[-1] == f"read {free.index(stop)}"


def test_an_interruption_reports_what_is_under_way_and_starts_nothing(
    tiny_model: TinyModel,
) -> None:
    engine, device = watched(tiny_model)
    driver = started(engine, [1, 2, 3])
    reported: list[StepDone] = []

    def on_step(step: StepDone) -> None:
        reported.append(step)
        driver._take(step)

    done = engine.run(driver.plan(steps=10), on_step, lambda: len(reported) >= 2)
    assert done.outcome is TickOutcome.INTERRUPTED
    assert done.steps == len(reported) == 3  # two were read, the one under way follows
    assert [n for n in device.notes if n.startswith("launch")] == [f"launch {n}" for n in range(3)]
    driver.finish()
    assert driver.sessions[0].outputs == plain(tiny_model, [1, 2, 3], 40)


def test_a_lane_whose_numbers_are_none_ends_alone(tiny_model: TinyModel) -> None:
    engine, _ = watched(tiny_model)
    driver = started(engine, [1, 2, 3], [4, 5])
    broken = driver.sessions[1]
    with torch.inference_mode():
        engine._pool.keys[0][broken.blocks[0]] = float("nan")
    driver.tick(steps=6)
    assert broken.fault is not None
    assert broken.fault.code is ErrorCode.NAN_LOGITS
    assert driver.sessions[0].outputs == plain(tiny_model, [1, 2, 3], 7)


def test_faults_of_a_tick_go_out_with_its_first_step(tiny_model: TinyModel) -> None:
    engine, _ = watched(tiny_model)
    driver = started(engine, [1, 2, 3])
    bad = driver.open([5, 9_999], 4, GREEDY)
    driver.tick(steps=3)
    assert bad.fault is not None
    assert [len(step.faults) for step in driver.steps] == [1, 0, 0]


NEEDS_HOST = {
    "log-probabilities": SamplingParams(temperature=0.0, logprobs=2),
    "bad words of several ids": SamplingParams(temperature=0.0, bad_words=((7, 8),)),
}


@pytest.mark.parametrize("name", NEEDS_HOST)
def test_what_needs_the_host_runs_recorded_steps_one_by_one(
    tiny_model: TinyModel, name: str
) -> None:
    engine, device = watched(tiny_model)
    driver = started(engine, [1, 2, 3], [4, 5], session_1={"sampling": NEEDS_HOST[name]})
    driver.tick(steps=6)
    assert device.notes == []
    assert driver.sessions[0].outputs == plain(tiny_model, [1, 2, 3], 7)


def test_a_minimum_keeps_a_lane_by_the_host_until_it_is_reached(tiny_model: TinyModel) -> None:
    engine, device = watched(tiny_model)
    driver = started(
        engine, [1, 2, 3], session_0={"min_output": 4, "stop_ids": [299], "max_output": 12}
    )
    driver.finish(steps=12)
    assert [note for note in device.notes if note.startswith("launch")] == [
        f"launch {n}" for n in range(8)
    ]


def test_drawn_ids_use_the_noise_of_their_index(tiny_model: TinyModel) -> None:
    """Penalties, filters and plain draws, over many ticks of unlike length: as if every step were awaited."""
    eager = run_sessions(build_torch_engine(tiny_model, OPTIONS))
    engine, device = watched(tiny_model)
    assert run_sessions(engine) == eager
    assert device.notes


def test_nothing_runs_ahead_while_somebody_looks_at_logits(tiny_model: TinyModel) -> None:
    engine, device = watched(tiny_model)
    seen: list[int] = []
    engine.on_logits = lambda rows, _: seen.append(len(rows))
    driver = started(engine, [1, 2, 3])
    driver.tick(steps=5)
    assert device.notes == []
    assert seen == [1] * 6


def test_a_long_tick_is_cut_into_stretches_of_bounded_noise(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("superfluid_core.engine.torch.cuda.ahead.STEPS_MAX", 3)
    engine, device = watched(tiny_model)
    driver = started(engine, [1, 2, 3])
    driver.tick(steps=8)
    assert driver.sessions[0].outputs == plain(tiny_model, [1, 2, 3], 9)
    assert device.notes.index("read 2") < device.notes.index("launch 3")
