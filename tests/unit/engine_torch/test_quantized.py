"""Quantized weights: GGUF blocks to rows to tiles, and what is kept of them between starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine
from superfluid_core.engine.torch.dequant import dequantize
from superfluid_core.engine.torch.drive import Driver
from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.engine.torch.quantized import (
    GROUP,
    TILE,
    QuantizedMatrix,
    QuantizedRows,
    assemble_quantized,
    floats,
    interleave,
    pack,
    read_rows,
    to_int8,
)
from superfluid_core.engine.torch.weights_cache import (
    WeightsCache,
    cache_name,
    flatten,
    unflatten,
)
from superfluid_core.modelfiles.gguf import BLOCKS, GgmlType
from superfluid_core.modelfiles.resolve import resolve
from tests.unit.engine_torch.native import TinySource, cache_folder, ops, tiny_config, to_int4

BuildEngine = Callable[..., TorchEngine]
KEPT = (GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q8_0, GgmlType.Q4_K)
MADE_INT8 = (GgmlType.Q5_0, GgmlType.Q5_1, GgmlType.Q5_K, GgmlType.Q6_K)


def random_blocks(kind: GgmlType, rows: int, columns: int) -> bytes:
    """Random bytes whose half-precision scales are small, finite numbers."""
    elements, size = BLOCKS[kind]
    generator = np.random.default_rng(int(kind))
    raw = generator.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    scales = generator.uniform(0.001, 0.01, (raw.shape[0], 2)).astype(np.float16).view(np.uint8)
    where = {GgmlType.Q6_K: slice(208, 210), GgmlType.Q8_0: slice(0, 2), GgmlType.Q4_0: slice(0, 2)}
    at = where.get(kind, slice(0, 2 if kind is GgmlType.Q5_0 else 4))
    raw[:, at] = scales[:, : at.stop - at.start]
    return raw.tobytes()


def unpack(matrix: QuantizedMatrix) -> torch.Tensor:
    """Write out the numbers of tiles, one at a time and by the description in products.h."""
    out = torch.zeros(matrix.tiles.shape[0] * TILE, matrix.inputs)
    for tile, group in np.ndindex(*matrix.tiles.shape[:2]):
        raw = matrix.tiles[tile, group]
        weights = 256 if matrix.kind == 4 else 512
        halves = raw[weights:].clone().view(torch.float16).float()
        for output in range(TILE):
            for at in range(GROUP):
                run, rest = divmod(at, 4)
                if matrix.kind == 8:
                    value = int(raw[64 * run + 4 * output + rest]) - 128
                    number = value * halves[output]
                else:
                    byte = int(raw[64 * (run % 4) + 4 * output + rest])
                    number = (byte >> 4 if run > 3 else byte & 15) * halves[output] + halves[TILE + output]  # fmt: skip
                out[tile * TILE + output, group * GROUP + at] = number
    return out[: matrix.outputs]


@pytest.mark.parametrize("kind", KEPT)
def test_rows_of_four_bits_and_int8_are_the_files_own_numbers(kind: GgmlType) -> None:
    data, shape = random_blocks(kind, 6, 512), (6, 512)
    rows = read_rows(data, kind, shape)
    assert rows is not None
    wanted = dequantize(data, kind, shape)
    # a K-quant's scale is a product, which is rounded to half precision once
    bound = 1e-3 * float(wanted.abs().max()) if kind is GgmlType.Q4_K else 1e-9
    assert (floats(rows) - wanted).abs().max() <= bound


@pytest.mark.parametrize("kind", MADE_INT8)
def test_wider_formats_become_int8_within_half_a_step(kind: GgmlType) -> None:
    data, shape = random_blocks(kind, 6, 512), (6, 512)
    rows = read_rows(data, kind, shape)
    assert rows is not None
    assert rows.minimum is None
    off = (floats(rows) - dequantize(data, kind, shape)).abs().reshape(6, -1, GROUP)
    assert (off <= 0.51 * rows.scale.float().unsqueeze(-1) + 1e-6).all()


def test_plain_and_odd_matrices_are_not_quantized() -> None:
    assert read_rows(b"\0" * 256, GgmlType.F32, (2, 32)) is None
    assert read_rows(b"\0" * 64, GgmlType.Q8_0, (64,)) is None


@pytest.mark.parametrize("quantize", [to_int4, to_int8])
@pytest.mark.parametrize("outputs", [16, 21])
def test_tiles_hold_the_numbers_of_their_rows(
    quantize: Callable[[torch.Tensor], QuantizedRows], outputs: int
) -> None:
    weight = torch.randn(outputs, 64, generator=torch.Generator().manual_seed(4))
    rows = quantize(weight)
    assert torch.allclose(unpack(pack([rows])), floats(rows), atol=1e-6)


def test_parts_of_two_kinds_become_int8_together() -> None:
    narrow, wide = to_int4(torch.randn(16, 64)), to_int8(torch.randn(16, 64))
    matrix = pack([narrow, wide])
    assert matrix.kind == 8
    found = unpack(matrix)
    assert torch.allclose(found[16:], floats(wide), atol=1e-6)
    assert torch.allclose(found[:16], floats(narrow), atol=0.02)


def test_gate_and_up_alternate_tile_by_tile() -> None:
    gate, up = to_int4(torch.randn(32, 32)), to_int4(torch.randn(32, 32))
    bias = torch.arange(32.0)
    both = interleave(pack([gate], bias), pack([up], bias + 100))
    found = unpack(both).reshape(2, 2, TILE, 32)
    assert torch.allclose(found[:, 0].flatten(0, 1), floats(gate), atol=1e-6)
    assert torch.allclose(found[:, 1].flatten(0, 1), floats(up), atol=1e-6)
    assert both.bias is not None
    assert both.bias[TILE] == 100


def test_a_model_with_one_plain_matrix_has_no_tiles() -> None:
    config = tiny_config("llama")
    source = TinySource(config)
    whole = source.rows
    source.rows = lambda name: None if "layers.1.mlp.down" in name else whole(name)  # type: ignore[method-assign] # a fake
    assert assemble_quantized(source, config) is None


# --- what is kept


def test_quantized_weights_come_back_from_a_file(tmp_path: Path) -> None:
    config = tiny_config("biased")
    weights = assemble_quantized(TinySource(config), config)
    assert weights is not None
    cache = WeightsCache(tmp_path / "weights")
    tensors, notes = flatten(weights)
    assert cache.write("a.safetensors", tensors, notes)
    found = cache.read("a.safetensors")
    assert found is not None
    back = unflatten(*found, config.layers)
    assert back is not None
    for mine, theirs in zip((*back.layers, back), (*weights.layers, weights), strict=True):
        part = "head" if mine is back else "qkv"
        one, other = getattr(mine, part), getattr(theirs, part)
        assert torch.equal(one.tiles, other.tiles)
        assert (one.kind, one.outputs, one.inputs) == (other.kind, other.outputs, other.inputs)
    bias, wanted = back.layers[1].qkv.bias, weights.layers[1].qkv.bias
    assert bias is not None
    assert wanted is not None
    assert torch.equal(bias, wanted)
    assert unflatten({"model.norm.weight": torch.ones(1)}, {}, 1) is None


def test_a_changed_model_has_another_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + b"a" * 100)
    names = {cache_name(path, torch.float32), cache_name(path, torch.bfloat16)}
    os.utime(path, ns=(1, 1))
    names.add(cache_name(path, torch.float32))
    path.write_bytes(b"GGUF" + b"b" * 100)
    os.utime(path, ns=(1, 1))
    names.add(cache_name(path, torch.float32))
    assert len(names) == 4


def test_a_broken_file_is_thrown_away(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0nonsense")
    cache = WeightsCache(tmp_path)
    assert cache.read("a.safetensors") is None
    assert not (tmp_path / "a.safetensors").exists()
    assert cache.read("a.safetensors") is None


def test_the_cache_is_bounded_and_the_least_used_goes_first(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path, bytes_max=10_000)
    for number, name in enumerate("abc"):
        assert cache.write(name, {"x": torch.zeros(1000, dtype=torch.uint8)}, {})
        os.utime(tmp_path / name, (number + 1, number + 1))
    assert cache.read("a") is not None  # used again just now
    assert cache.write("d", {"x": torch.zeros(8000, dtype=torch.uint8)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "d"]
    assert not cache.write("e", {"x": torch.zeros(20_000, dtype=torch.uint8)}, {})


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert not WeightsCache(tmp_path / "file").write("a", {"x": torch.zeros(1)}, {})


# --- the whole engine


PROMPTS = ("The capital of France is", "Water boils at a temperature of", "To bake bread you need")


def greedy(engine: TorchEngine, prompts: list[list[int]]) -> list[list[int]]:
    driver = Driver(engine)
    sessions = [driver.open(prompt, 12) for prompt in prompts]
    driver.finish()
    return [session.outputs for session in sessions]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_model_says_the_same_in_small_steps_over_its_own_blocks(
    build_engine: BuildEngine, tmp_path: Path
) -> None:
    """Greedy ids equal those of float32 torch, and those of an engine that starts from the cache."""
    demo = resolve("demo")
    prompts = [demo.tokenizer().encode(text, allow_special=False) for text in PROMPTS]

    ops()
    (tmp_path / "native").symlink_to(cache_folder() / "native")
    said: list[str] = []
    options = TorchOptions(
        device="cpu", window=256, threads=1, dtype="bfloat16", cache_dir=tmp_path
    )
    found = []
    for _ in range(2):
        engine = build_torch_engine(demo, options, say=said.append)
        assert "quantized small steps" in engine.describe().engine_build
        found.append(greedy(engine, prompts))
    assert said == ["dequantizing the weights, once: they are kept for the next start"]
    assert len(list((tmp_path / "weights").iterdir())) == 1
    assert found[0] == found[1]
    assert found[0] == greedy(build_engine(Path(demo.path), window=256), prompts)
