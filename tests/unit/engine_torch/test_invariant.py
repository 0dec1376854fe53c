"""Batch-invariant lanes: a session's numbers depend on its context alone, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.engine.torch.invariant import TILE_ROWS
from superfluid_core.engine.torch.linear import PlainLinear
from superfluid_core.scheduler.plan import LanePlan, LaneStart, TickOutcome, TickPlan
from superfluid_core.session import Determinism, SamplingParams
from tests.unit.engine_torch.box import Box, spec

Build = Callable[..., TorchEngine]
Tiny = Callable[[str], tuple[Path, Any]]
LENGTH = 90
FAMILIES = ["llama", "llama-llama3-bias", "mistral-sliding", "qwen2", "qwen3"]


def ids(count: int, seed: int, vocabulary: int = 300) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (count,), generator=generator).tolist()


def compute(
    engine: TorchEngine, context: Sequence[int], cuts: Sequence[int], blocks: Sequence[int]
) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Feed a context in cuts: logits by position at every cut's end, and the keys and values of all positions."""
    found: dict[int, torch.Tensor] = {}
    engine.on_logits = lambda rows, logits: found.update(
        {
            row.position + len(row.inputs): line.clone()
            for row, line in zip(rows, logits, strict=True)
        }
    )
    for first, end in pairwise(cuts):
        lane = LanePlan(0, end - first == 1, first, tuple(context[first:end]), 1, 0, tuple(blocks))
        starts = () if first else (LaneStart(0, spec(1, context, 1), ()),)
        plan = TickPlan(1, (lane,), 4096, starts=starts, batch_invariant=True)
        done = engine.run(plan, lambda _: None, lambda: False)
        assert done.outcome is TickOutcome.COMPLETE, engine.last_refusal
    engine.on_logits = None
    kept = engine._pool.copy_of(blocks).flatten(2, 3)
    return found, kept[:, :, : len(context)]


def every(step: int, length: int) -> list[int]:
    return [*range(0, length, step), length]


def spoil(engine: TorchEngine) -> None:
    """Leave in the pool what no session may ever notice."""
    with torch.inference_mode():
        engine._pool._slab.fill_(torch.nan)


@pytest.mark.parametrize(
    ("family", "dtype", "block_tokens"),
    [
        (family, dtype, (4, 16, 48)[(number + shift) % 3])
        for number, family in enumerate(FAMILIES)
        for shift, dtype in enumerate(("float32", "bfloat16"))
    ],
)
def test_any_cut_and_any_blocks_give_the_same_bits(
    family: str, dtype: str, block_tokens: int, tiny: Tiny, build_engine: Build
) -> None:
    engine = build_engine(
        tiny(family)[0], dtype=dtype, block_tokens=block_tokens, kv_blocks=60, window=96
    )
    context, count = ids(LENGTH, 5), -(-LENGTH // block_tokens)
    logits, kv = compute(engine, context, every(1, LENGTH), range(count))
    assert len(logits) == LENGTH
    scattered = [(block * 7 + 3) % 60 for block in range(count)]
    for cuts in ([0, LENGTH], *(every(step, LENGTH) for step in (1, 7, 16, 50))):
        spoil(engine)
        found, kv_found = compute(engine, context, cuts, scattered)
        assert torch.equal(kv_found, kv)
        assert sorted(found) == cuts[1:]
        assert all(torch.equal(line, logits[end]) for end, line in found.items())


def test_invariant_numbers_are_those_of_the_ordinary_path_but_for_rounding(
    tiny: Tiny, build_engine: Build
) -> None:
    engine = build_engine(tiny("qwen3")[0], kv_blocks=32)
    lane = LanePlan(0, False, 0, tuple(ids(70, 2)), 1, 0, tuple(range(5)))
    plain = engine.forward_only(TickPlan(1, (lane,), 512))
    tiled = engine.forward_only(TickPlan(1, (lane,), 512, batch_invariant=True))
    torch.testing.assert_close(tiled, plain, atol=1e-3, rtol=1e-3)


def test_other_rows_in_a_tile_do_not_show(tiny: Tiny, build_engine: Build) -> None:
    engine = build_engine(tiny("llama")[0], kv_blocks=32)
    context, other = ids(TILE_ROWS, 1), ids(TILE_ROWS, 2)
    mixed = [*context[:20], *other[20:]]
    _, kv = compute(engine, context, [0, TILE_ROWS], (0, 1))
    _, kv_mixed = compute(engine, mixed, [0, TILE_ROWS], (2, 3))
    assert torch.equal(kv[:, :, :20], kv_mixed[:, :, :20])
    assert not torch.equal(kv[:, :, 20:], kv_mixed[:, :, 20:])


def test_the_last_tile_of_a_window_may_be_cut_short(tiny: Tiny, build_engine: Build) -> None:
    engine = build_engine(tiny("llama")[0], window=40, kv_blocks=3)
    context = ids(40, 9)
    whole = compute(engine, context, [0, 40], (0, 1, 2))
    parts = compute(engine, context, [0, 33, 39, 40], (2, 0, 1))
    assert torch.equal(whole[1], parts[1])
    assert torch.equal(whole[0][40], parts[0][40])


def test_several_lanes_of_an_invariant_plan_do_not_show_each_other(
    tiny: Tiny, build_engine: Build
) -> None:
    engine = build_engine(tiny("llama")[0], kv_blocks=32)
    contexts = [ids(n, n) for n in (5, 40, 33)]
    lanes = [
        LanePlan(n, False, 0, tuple(context), 1, 0, tuple(range(4 * n, 4 * n + 4)))
        for n, context in enumerate(contexts)
    ]
    together = engine.forward_only(TickPlan(1, tuple(lanes), 512, batch_invariant=True))
    for number, lane in enumerate(lanes):
        alone = engine.forward_only(TickPlan(1, (lane,), 512, batch_invariant=True))
        assert torch.equal(together[number : number + 1], alone)


def test_what_holds_is_declared(tiny: Tiny, build_engine: Build) -> None:
    info = build_engine(tiny("llama")[0], kv_blocks=4).describe()
    assert info.capabilities.batch_invariant
    assert info.determinism is Determinism.BATCH_INVARIANT


def test_the_probe_leaves_an_empty_pool(tiny: Tiny, build_engine: Build) -> None:
    engine = build_engine(tiny("llama")[0], kv_blocks=4)
    assert not engine._pool._slab.any()


def test_a_kernel_that_mixes_rows_is_found_out_and_never_offered(
    tiny: Tiny, build_engine: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product whose rounding depends on what else is in the batch, as dynamic quantization's does."""
    plain = PlainLinear.__call__

    def mixing(self: PlainLinear, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max()
        return plain(self, (x / scale).bfloat16().float() * scale)

    monkeypatch.setattr(PlainLinear, "__call__", mixing)
    engine = build_engine(tiny("llama")[0], kv_blocks=8)
    info = engine.describe()
    assert not info.capabilities.batch_invariant
    assert info.determinism is Determinism.NONE
    lane = LanePlan(0, False, 0, (1, 2), 1, 0, (0,))
    plan = TickPlan(1, (lane,), 16, (LaneStart(0, spec(1, [1, 2], 1), ()),), batch_invariant=True)
    assert engine.run(plan, lambda _: None, lambda: False).outcome is TickOutcome.REFUSED
    assert "invariance" in engine.last_refusal


@pytest.mark.parametrize("options", [{"window": 1}, {"kv_blocks": 1, "block_tokens": 1}])
def test_a_pool_of_one_position_proves_nothing(
    options: dict[str, int], tiny: Tiny, build_engine: Build
) -> None:
    engine = build_engine(tiny("llama")[0], **({"kv_blocks": 2} | options))
    assert not engine.describe().capabilities.batch_invariant


# --- in company -----------------------------------------------------------------------------------


def drawn(number: int, prompt: Sequence[int], output: int, **more: Any) -> Any:
    """A session that samples, with a seed and filters of its own."""
    params = SamplingParams(
        seed=1000 + number,
        temperature=0.7 + 0.05 * (number % 8),
        top_p=(1.0, 0.9)[number % 2],
        top_k=(0, 0, 40)[number % 3],
        repetition_penalty=(1.0, 1.0, 1.0, 1.15)[number % 4],
    )
    return spec(number, prompt, output, sampling=params, batch_invariant=True, **more)


def crowd_equals_solitude(engine: TorchEngine, vocabulary: int, output: int, count: int) -> None:
    """Sampled sessions alone, then amid 7 neighbours that come and go: ids and logits are equal.

    Filters repeat after 12 sessions. Prompts are up to 60 tokens, however many they are: nearly two tiles.
    """
    sessions = [drawn(n, ids(3 + n * 60 // count, n, vocabulary), output) for n in range(count)]
    alone = Box(engine)
    alone.keep_logits()
    for each in sessions:
        alone.submit(each)
        alone.finish(each.key.session)
    amid = Box(engine, prefill_budget=64)
    amid.keep_logits()
    noise = iter(range(100, 10_000))

    def refill() -> None:
        while amid.scheduler.stats().lanes_busy + sum(amid.scheduler.stats().queued) < 8:
            n = next(noise)
            amid.submit(spec(n, ids(1 + n % 37, n, vocabulary), 3 + n % 11))

    for each in sessions:
        amid.submit(each)
        while each.key.session not in amid.ended:
            refill()
            amid.turn()
    engine.on_logits = None
    numbers = range(count)
    assert [amid.outputs[n] for n in numbers] == [alone.outputs[n] for n in numbers]
    assert len({tuple(alone.outputs[n]) for n in numbers}) > count * 3 // 4
    for at, line in alone.logits.items():
        assert torch.equal(line, amid.logits[at])
    solo = [plan for plan in amid.plans if plan.batch_invariant]
    company = [plan for plan in amid.plans if not plan.batch_invariant]
    assert max(len(plan.lanes) for plan in solo) == 1
    assert max(len(plan.lanes) for plan in company) == 7
    assert len(company) >= 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_twenty_sampled_sessions_are_the_same_alone_and_in_a_crowd(
    dtype: str, tiny: Tiny, build_engine: Build
) -> None:
    engine = build_engine(tiny("qwen3")[0], lanes=8, kv_blocks=128, block_tokens=4, dtype=dtype)
    crowd_equals_solitude(engine, 300, 8, 20)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_model_says_the_same_alone_and_in_a_crowd(
    demo_path: Path, build_engine: Build
) -> None:
    """Fewer sessions than of the tiny models: in float32, as CPUs without bf16 have it, each takes a quarter of a minute with its neighbours."""
    engine = build_engine(demo_path, lanes=8, window=256, dtype="auto", kv_blocks=128)
    crowd_equals_solitude(engine, 40_000, 6, 12)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_model_gives_the_same_bits_for_any_cut(
    demo_path: Path, build_engine: Build
) -> None:
    engine = build_engine(demo_path, window=128, dtype="auto", kv_blocks=40)
    context = ids(70, 4, 40_000)
    logits, kv = compute(engine, context, every(1, 70), range(5))
    scattered = [21, 3, 8, 39, 11]
    for cuts in ([0, 70], *(every(step, 70) for step in (7, 16, 50))):
        spoil(engine)
        found, kv_found = compute(engine, context, cuts, scattered)
        assert torch.equal(kv_found, kv)
        assert all(torch.equal(line, logits[end]) for end, line in found.items())


def test_a_moved_session_goes_on_with_the_same_bits(tiny: Tiny, build_engine: Build) -> None:
    """What another node said first is computed as a prompt here, and was decoded there."""
    engine = build_engine(tiny("llama")[0], lanes=8, kv_blocks=64)
    first = Box(engine)
    first.keep_logits()
    first.submit(drawn(5, ids(20, 3), 40))
    first.finish(5)
    said = first.outputs[5]
    moved = Box(build_engine(tiny("llama")[0], lanes=2, kv_blocks=40, block_tokens=8))
    moved.keep_logits()
    moved.submit(drawn(5, ids(20, 3), 40, delivered=tuple(said[:17])))
    moved.finish(5)
    assert moved.outputs[5] == said
    assert all(torch.equal(line, first.logits[at]) for at, line in moved.logits.items())
    assert len(moved.logits) == 40 - 17
