"""Recorded decode steps with a stand-in that calls them again: sizes, padding, fixed tensors, equality with eager steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from superfluid_core.engine.torch.attention.base import Site
from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine
from superfluid_core.engine.torch.cuda.devices import HostDevice
from superfluid_core.engine.torch.cuda.graphs import (
    DecodeGraphs,
    DecodeRow,
    GraphShape,
    graph_sizes,
    size_for,
)
from superfluid_core.engine.torch.cuda.setup import recorded_backend
from superfluid_core.engine.torch.drive import Driver
from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.engine.torch.selftest.engines import run_sessions
from superfluid_core.engine.torch.selftest.model import TinyModel
from superfluid_core.session import SamplingParams

OPTIONS = TorchOptions(device="cpu", dtype="float32", lanes=4, kv_blocks=64, threads=1)


def recorded(files: TinyModel, **options: object) -> TorchEngine:
    return build_torch_engine(files, replace(OPTIONS, graphs=True, **options))  # type: ignore[arg-type]


def test_sizes_are_the_small_powers_of_two_and_then_every_eighth() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 4)
    assert graph_sizes(4) == (1, 2, 4)
    assert graph_sizes(8) == (1, 2, 4, 8)
    assert graph_sizes(9) == (1, 2, 4, 8, 16)
    assert graph_sizes(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert graph_sizes(41) == (1, 2, 4, 8, 16, 24, 32, 40, 48)
    for lanes in range(1, 100):
        sizes = graph_sizes(lanes)
        assert list(sizes) == sorted(set(sizes))
        for rows in range(1, lanes + 1):
            assert 0 <= size_for(rows, sizes) - rows < 8


def test_recorded_steps_say_what_eager_ones_say(tiny_model: TinyModel) -> None:
    assert run_sessions(recorded(tiny_model)) == run_sessions(
        build_torch_engine(tiny_model, OPTIONS)
    )


def test_the_scheduler_does_not_see_the_spare_block(tiny_model: TinyModel) -> None:
    engine = recorded(tiny_model)
    assert engine.describe().blocks == 64
    assert engine._pool.shape.blocks == 65


def test_every_size_is_recorded_largest_first_and_told(tiny_model: TinyModel) -> None:
    said: list[str] = []
    build_torch_engine(
        tiny_model, replace(OPTIONS, graphs=True, lanes=9, kv_blocks=64), say=said.append
    )
    assert said == [f"recorded decode steps: {n} of 5 sizes" for n in range(1, 6)]


class Counting(HostDevice):
    """Counts what is recorded, in order, and how often it is replayed."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.recorded = 0
        self.replayed = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        run()

        def replay() -> None:
            self.replayed += 1
            run()

        return replay


def graphs_of(engine: TorchEngine, device: HostDevice, lanes: int) -> DecodeGraphs:
    pool, decoder = engine._pool, engine._paths.decoder
    config = decoder.config
    site = Site(
        pool.device,
        torch.float32,
        16,
        engine._paths.pooler.attention,
    )
    from superfluid_core.engine.torch.attention.registry import make_attention

    name = recorded_backend("padded", pool, site)
    assert name == "reference"
    shape = GraphShape(lanes, config.window, 16, pool.shape.blocks - 1)
    return DecodeGraphs(decoder, lambda: make_attention(name, pool, site.shape), shape, device)


def test_padding_touches_nothing_but_the_spare_block(tiny_model: TinyModel) -> None:
    engine, device = recorded(tiny_model), Counting()
    pool = engine._pool
    with torch.inference_mode():
        graphs = graphs_of(engine, device, 8)
        graphs.record()
        assert device.recorded == len(graphs.sizes) == 4
        for part in (*pool.keys, *pool.values):
            part.normal_()
        before = pool.copy_of(range(64))
        rows = [DecodeRow(7, 20, (3, 9)), DecodeRow(8, 5, (30,)), DecodeRow(9, 0, (31,))]
        graphs.load(rows)
        logits = graphs.replay()
        after = pool.copy_of(range(64))
    assert device.replayed == 1
    assert logits.shape == (3, 300)
    changed = (before != after).flatten(4).any(-1).any(0).any(0).nonzero().tolist()
    assert changed == [[9, 4], [30, 5], [31, 0]]


def test_a_row_is_worth_the_same_in_every_size(tiny_model: TinyModel) -> None:
    engine = recorded(tiny_model)
    with torch.inference_mode():
        graphs = graphs_of(engine, HostDevice(torch.device("cpu")), 8)
        graphs.record()
        rows = [DecodeRow(n + 1, 0, (n,)) for n in range(7)]
        found = []
        for count in (1, 2, 3, 7):
            graphs.load(rows[:count])
            found.append(graphs.replay()[0].clone())
    # one row and seven are multiplied by other kernels: sums of logits near 27 differ by roundings, on some CPUs by five
    rounding = float(torch.finfo(torch.float32).eps * found[0].abs().max())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=16 * rounding, rtol=0)


def test_fed_ids_are_read_by_the_next_replay_one_position_on(tiny_model: TinyModel) -> None:
    engine = recorded(tiny_model)
    with torch.inference_mode():
        graphs = graphs_of(engine, HostDevice(torch.device("cpu")), 2)
        graphs.record()
        graphs.load([DecodeRow(5, 0, (1, 2)), DecodeRow(6, 15, (3, 4))])
        graphs.replay()
        graphs.feed(torch.tensor([11, -1]))
        fed = graphs.replay().clone()
        assert graphs._ids.tolist() == [11, 0]
        assert graphs._positions.tolist() == [1, 16]
        assert graphs._slots.tolist() == [1 * 16 + 1, 4 * 16]
        graphs.load([DecodeRow(11, 1, (1, 2)), DecodeRow(0, 16, (3, 4))])
        assert torch.equal(graphs.replay(), fed)


def test_logits_of_every_size_lie_in_one_place(tiny_model: TinyModel) -> None:
    """Sizes are many and a vocabulary is wide: a place for each would be gigabytes at 256 lanes."""
    engine = recorded(tiny_model)
    with torch.inference_mode():
        graphs = graphs_of(engine, HostDevice(torch.device("cpu")), 8)
        graphs.record()
        places = set()
        for count in (1, 2, 5):
            graphs.load([DecodeRow(n + 1, 0, (n,)) for n in range(count)])
            found = graphs.replay()
            assert (tuple(found.shape), found.dtype) == ((count, 300), torch.float32)
            places.add(found.data_ptr())
    assert len(places) == 1


def test_stale_nan_in_a_block_that_a_stretch_opens_reaches_nobody(tiny_model: TinyModel) -> None:
    engine = recorded(tiny_model)
    with torch.inference_mode():
        for part in (*engine._pool.keys, *engine._pool.values):
            part.fill_(float("nan"))
    driver = Driver(engine)
    opened = [driver.open([3, 4, 5], 40, SamplingParams(temperature=0.0)) for _ in range(3)]
    driver.finish(steps=16)
    assert all(session.fault is None for session in opened)
    driver.open([3] * 20, 5)
    driver.finish(steps=2)
    assert [session.fault for session in driver.sessions] == [None] * 4


@pytest.mark.parametrize("attention", ["padded", "reference"])
def test_steps_are_recorded_whatever_the_backend_of_eager_ones(
    tiny_model: TinyModel, attention: str
) -> None:
    engine = recorded(tiny_model, attention=attention)
    assert run_sessions(engine) == run_sessions(build_torch_engine(tiny_model, OPTIONS))
