"""Steps of many rows by AMX against the plain decoder in float32: lanes, windows, spans, odd sizes, threads, and what is not finite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from superfluid_core.engine.torch.attention.padded import PaddedAttention
from superfluid_core.engine.torch.batch import Batch
from superfluid_core.engine.torch.kvcache import KvPool, KvShape
from superfluid_core.engine.torch.large_step import PART_ROWS, LargeStep, cut_parts, fits_large
from superfluid_core.engine.torch.quantized import assemble_quantized
from superfluid_core.engine.torch.small_step import SPAN, SmallStep
from superfluid_core.modelfiles.config import ModelConfig
from tests.unit.engine_torch.native import (
    VARIANTS,
    TinySource,
    attention_shape,
    make_batch,
    ops,
    tiny_config,
    tiny_decoder,
    tiny_pool,
)

STEPS = {
    "one prompt": [(0, 70, False)],
    "many short chunks": [(9, 1, True), (3, 7, False), (0, 12, False), (40, 3, False)],
    "decoding beside chunks": [(30, 1, True), (0, 50, False), (4, 3, False), (18, 21, False)],
    "over the end of a span": [(SPAN + 90, 1, True), (SPAN - 30, 65, False), (SPAN, 16, False)],
}
OFF_MAX = 0.08  # what bf16 products make of so small a model; the compiled parts are further off
needs_tiles = pytest.mark.skipif(ops().large_room == 0, reason="this CPU has no bf16 tiles")


def wide_config(variant: str) -> ModelConfig:
    """A model whose heads fill tiles."""
    config = tiny_config(variant)
    return config if config.head_dim >= 32 else replace(config, head_dim=32)


class Ways:
    """One model's plain and large steps, each over a pool of its own."""

    def __init__(self, variant: str, threads: int = 1, int8: tuple[str, ...] = ("embed",)) -> None:
        self.config = wide_config(variant)
        source = TinySource(self.config, int8=int8)
        self.decoder = tiny_decoder(source, self.config, torch.float32)
        quantized = assemble_quantized(source, self.config)
        assert quantized is not None
        self.plain = tiny_pool(self.config, torch.bfloat16)
        self.pool = tiny_pool(self.config, torch.bfloat16)
        small = SmallStep(ops(threads), self.decoder, quantized, self.pool)
        self.large = LargeStep(ops(threads), self.config, small)

    def wanted(self, batch: Batch) -> torch.Tensor:
        """What float32 says over what both pools hold."""
        pool = widened(self.plain)
        with torch.inference_mode():
            return self.decoder.forward(batch, PaddedAttention(pool, attention_shape(self.config)))

    def found(self, batch: Batch) -> torch.Tensor:
        with torch.inference_mode():
            return self.large.forward(batch)


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of a row's difference beside its spread, of the worst row."""
    return float(((found - wanted).pow(2).mean(1).sqrt() / wanted.std(1)).max())


def widened(pool: KvPool) -> KvPool:
    wide = KvPool(replace(pool.shape, dtype=torch.float32), pool.device)
    for mine, theirs in zip((*wide.keys, *wide.values), (*pool.keys, *pool.values), strict=True):
        mine.copy_(theirs)
    return wide


@needs_tiles
@pytest.mark.parametrize("step", list(STEPS))
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_large_step_equals_the_plain_one(variant: str, step: str) -> None:
    ways, batch = Ways(variant), make_batch(STEPS[step])
    wanted, found = ways.wanted(batch), ways.found(batch)
    assert off(found, wanted) < OFF_MAX


@needs_tiles
def test_matrices_of_int8_are_multiplied_too() -> None:
    ways = Ways("qwen3", int8=("embed", "proj"))
    batch = make_batch(STEPS["one prompt"])
    wanted = ways.wanted(batch)
    assert off(ways.found(batch), wanted) < OFF_MAX


@needs_tiles
def test_a_rows_numbers_depend_neither_on_other_lanes_nor_on_threads() -> None:
    alone, crowd = make_batch([(0, 100, False)]), make_batch([(0, 100, False), (7, 90, False)])
    one, two = Ways("qwen3"), Ways("qwen3", threads=2)
    found = two.found(crowd)
    assert torch.equal(one.found(alone)[0], found[0])
    again = two.found(crowd)
    assert torch.equal(found, again)


@needs_tiles
def test_a_lane_whose_context_holds_a_nan_harms_no_other() -> None:
    ways, batch = Ways("llama"), make_batch([(64, 40, False), (64, 40, False), (20, 1, True)])
    ways.pool.values[0][batch.blocks[0][0], 3] = float("nan")
    found = ways.found(batch)
    assert not found[0].isfinite().all()
    assert found[1:].isfinite().all()


@needs_tiles
def test_what_lies_behind_a_context_or_before_its_window_does_not_matter() -> None:
    clean, dirty = Ways("sliding"), Ways("sliding")
    batch = make_batch([(90, 40, False)])
    blocks = batch.blocks[0]
    for part in (*dirty.pool.keys, *dirty.pool.values):
        part[list(blocks[:3])] = float("nan")
        part[blocks[-1], 130 % dirty.pool.shape.block_tokens :] = float("nan")
    assert torch.equal(clean.found(batch), dirty.found(batch))


@needs_tiles
def test_a_step_that_samples_nothing_only_keeps_keys_and_values() -> None:
    ways, batch = Ways("llama"), make_batch([(0, 40, False)])
    silent = replace(batch, sampled=batch.sampled[:0])
    assert ways.found(silent).shape == (0, ways.config.vocabulary)
    kept = [part.clone() for part in (*ways.pool.keys, *ways.pool.values)]
    ways.found(batch)
    for mine, theirs in zip((*ways.pool.keys, *ways.pool.values), kept, strict=True):
        assert torch.equal(mine, theirs)


def test_prompts_are_cut_into_parts_and_decoding_rows_are_left_whole() -> None:
    batch = make_batch([(9, 1, True), (0, PART_ROWS + 6, False)])
    assert cut_parts(batch) == [(0, 1, 0, 0), (1, PART_ROWS, 1, 0), (1 + PART_ROWS, 6, 1, 0)]


@needs_tiles
def test_sizes_that_do_not_fill_tiles_are_not_taken() -> None:
    config = wide_config("llama")

    def shape(block_tokens: int, dtype: torch.dtype) -> KvShape:
        return KvShape(2, 8, block_tokens, config.kv_heads, config.head_dim, dtype)

    assert fits_large(config, shape(16, torch.bfloat16), ops())
    assert not fits_large(config, shape(8, torch.bfloat16), ops())
    assert not fits_large(config, shape(16, torch.float32), ops())
    assert not fits_large(tiny_config("llama"), shape(16, torch.bfloat16), ops())
