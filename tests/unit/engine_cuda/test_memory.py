"""The KV pool's share of a device: what steps and recorded steps need is measured first, and stays free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine
from superfluid_core.engine.torch.cuda.graphs import graph_sizes
from superfluid_core.engine.torch.cuda.memory import (
    GRAPH_BYTES_MIN,
    Reserve,
    measure_reserve,
    pool_bytes,
)
from superfluid_core.engine.torch.device import Machine, PoolWish, choose_blocks
from superfluid_core.engine.torch.selftest.model import TinyModel
from superfluid_core.errors import ConfigError, EngineError
from superfluid_core.limits import MIB

CUDA = torch.device("cuda")


class Gauge:
    """A device whose steps take `peak` bytes and whose recorded sizes take what is said."""

    def __init__(self, peak: int, sizes: dict[int, int]) -> None:
        self.peak, self.sizes = peak, sizes
        self.used = 0
        self.steps = 0
        self.recorded: list[int] = []

    def used_bytes(self) -> int:
        return self.used

    def peak_bytes(self, run: Callable[[], None]) -> int:
        run()
        return self.peak

    def step(self) -> None:
        self.steps += 1

    def record(self, size: int) -> None:
        self.recorded.append(size)
        self.used += self.sizes[size]


def test_the_largest_size_pays_for_all_and_the_next_shows_what_each_further_one_adds() -> None:
    sizes = graph_sizes(24)
    gauge = Gauge(100 * MIB, {24: 300 * MIB, 16: 5 * MIB})
    found = measure_reserve(gauge, gauge.step, gauge.record, sizes)
    assert gauge.recorded == [24, 16]
    assert gauge.steps == 2  # once to compile, once to measure
    assert found == Reserve(100 * MIB, 300 * MIB + 5 * MIB * (len(sizes) - 1))


def test_a_size_that_seems_to_take_nothing_counts_for_something() -> None:
    gauge = Gauge(0, {2: 0, 1: 0})
    found = measure_reserve(gauge, gauge.step, gauge.record, (1, 2))
    assert found.graphs_bytes == 2 * GRAPH_BYTES_MIN


def test_nothing_recorded_needs_nothing() -> None:
    gauge = Gauge(7, {})
    assert measure_reserve(gauge, gauge.step, gauge.record, ()) == Reserve(7, 0)


def test_the_pool_takes_its_share_of_what_is_left() -> None:
    assert pool_bytes(1000, Reserve(100, 300), 0.9) == 540
    assert pool_bytes(1000, Reserve(900, 300), 0.9) == 0


class Device(Machine):
    """A machine with a CUDA device that has so much free."""

    def __init__(self, free: int) -> None:
        self._free = free

    def cuda_bytes_free(self, device: torch.device) -> int:
        return self._free


def wish(**more: Any) -> PoolWish:
    values: dict[str, Any] = {
        "block_bytes": 10, "block_tokens": 16, "tokens_useful": 1 << 20, "blocks": None,
        "memory_bytes": None,
    }  # fmt: skip
    return PoolWish(**(values | more))


def test_blocks_follow_from_memory_reserve_and_utilization() -> None:
    assert choose_blocks(wish(), CUDA, Device(1000)) == 90
    assert choose_blocks(wish(utilization=0.5), CUDA, Device(1000)) == 50
    assert choose_blocks(wish(reserve=Reserve(200, 300)), CUDA, Device(1000)) == 45
    assert choose_blocks(wish(memory_bytes=321), CUDA, Device(1000)) == 32
    with pytest.raises(ConfigError, match="no room for the KV cache"):
        choose_blocks(wish(reserve=Reserve(995)), CUDA, Device(1000))


def test_the_trial_measures_this_models_widest_step_on_a_pool_of_its_own(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same trial as on CUDA, with torch's CPU standing in; what it records is called once and forgotten."""
    from superfluid_core.engine.torch.attention.base import AttentionBackend, Site
    from superfluid_core.engine.torch.attention.registry import make_attention
    from superfluid_core.engine.torch.cuda import setup as setups
    from superfluid_core.engine.torch.cuda.setup import GraphSetup
    from superfluid_core.engine.torch.draw import draw

    options = TorchOptions(device="cpu", dtype="float32", lanes=9, kv_blocks=16, threads=1)
    engine = build_torch_engine(tiny_model, options)
    paths, pool = engine._paths, engine._pool
    site = Site(pool.device, torch.float32, 16, paths.pooler.attention)
    setup = GraphSetup(
        paths.decoder, site, "padded", replace(pool.shape, blocks=1), 9, 256, step_tokens=600
    )
    steps: list[int] = []
    made: list[str] = []
    drawn: list[int] = []

    def noted(name: str, *rest: Any) -> AttentionBackend:
        made.append(name)
        return make_attention(name, *rest)

    def counted(logits: Tensor, *rest: Any) -> Tensor:
        drawn.append(len(logits))
        return draw(logits, *rest)

    monkeypatch.setattr(setups, "make_attention", noted)
    monkeypatch.setattr(setups, "draw", counted)

    class Watching(Gauge):
        def peak_bytes(self, run: Callable[[], None]) -> int:
            steps.append(1)
            before = len(made), len(drawn)
            peak = super().peak_bytes(run)
            # what a backend keeps for itself, and drawing for all lanes at once, are part of a step's need
            assert (len(made), len(drawn)) == (before[0] + 1, before[1] + 2)
            return peak

    with torch.inference_mode():
        found = setup.reserve(Watching(50, {}))
    assert steps == [1]
    assert set(drawn) == {9}
    assert found == Reserve(50, GRAPH_BYTES_MIN * 5)
    setup.warm()
    assert len(drawn) == 6


def test_what_torch_says_at_start_comes_with_the_versions(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available\nmore lines")

    monkeypatch.setattr("superfluid_core.engine.torch.build.load_weights", fail)
    with pytest.raises(EngineError) as found:
        build_torch_engine(tiny_model, TorchOptions(device="cpu"))
    assert torch.__version__ in found.value.message
    assert "NVIDIA driver" in found.value.message
    assert found.value.message.endswith("CUDA error: no kernel image is available")
