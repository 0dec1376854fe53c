"""Checkpoints that MLX quantized: mlx-lm's own ids and logits under our scheduler, its modes, its memory, and the native engine's numbers."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from superfluid_core.engine.compose import StepRow
from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine
from superfluid_core.engine.torch.checkpoints import open_source
from superfluid_core.engine.torch.device import Machine
from superfluid_core.engine.torch.drive import Driver
from superfluid_core.engine.torch.outline import outline
from superfluid_core.errors import ConfigError, ModelFilesError
from superfluid_core.modelfiles.inventory import inventory
from superfluid_core.modelfiles.resolve import _safetensors_weights
from superfluid_core.scheduler.plan import LanePlan, TickPlan
from tests.unit.engine_library.conftest import VOCABULARY, build, need, write_checkpoint
from tests.unit.engine_library.test_engine import prompt
from tests.unit.engine_torch.conftest import files_of

OUTPUT = 12
PLAIN = "model.layers.1.self_attn.o_proj"
WIDER = "model.layers.1.mlp.down_proj"
Quantized = Callable[[str], Path]


def _own_widths(name: str, module: Any) -> Any:
    """Choose as mixed recipes do: some modules wider, one plain, one of 6 bits."""
    if name == PLAIN:
        return False
    if name == WIDER:
        return {"group_size": 32, "bits": 8}
    if name == "lm_head":
        return {"group_size": 64, "bits": 6}
    return hasattr(module, "to_quantized")


FORMS: dict[str, dict[str, Any]] = {
    "4-64": {"bits": 4, "group_size": 64},
    "8-32": {"bits": 8, "group_size": 32},
    "mixed": {"bits": 4, "group_size": 32, "quant_predicate": _own_widths},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
}
AFFINE = ("4-64", "8-32", "mixed")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model whose rows are whole groups of 64. It names its theta as mlx-lm reads it."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 2}
    folder = tmp_path_factory.mktemp("wide") / "plain"
    return write_checkpoint(folder, rope_theta=30_000.0, **sizes)


@pytest.fixture(scope="module")
def quantized(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """Make a folder as `mlx_lm.convert` writes it, once for each form."""
    need("mlx")
    made: dict[str, Path] = {}

    def make(form: str) -> Path:
        if form not in made:
            from mlx_lm.utils import load_model, quantize_model, save_config, save_model

            model, config = quantize_model(*load_model(wide), **FORMS[form])
            made[form] = tmp_path_factory.mktemp(form) / "model"
            save_model(made[form], model)
            save_config(config, made[form] / "config.json")
        return made[form]

    return make


def own_run(path: Path, ids: list[int], dtype: str) -> tuple[list[int], np.ndarray]:
    """Let mlx-lm decode greedily over its own cache: ids, and the first logits."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    found: list[int] = []
    lines = []
    with mx.stream(mx.cpu):
        model, _ = load_model(path)
        model.set_dtype(getattr(mx, dtype))
        cache, inputs = make_prompt_cache(model), ids
        for _ in range(OUTPUT):
            line = model(mx.array([inputs]), cache=cache)[0, -1].astype(mx.float32)
            lines.append(np.array(line))
            inputs = [int(lines[-1].argmax())]
            found += inputs
    return found, lines[0]


@pytest.mark.parametrize("form", FORMS)
def test_ids_and_logits_are_those_of_mlx_lm_alone_and_beside_others(
    form: str, quantized: Quantized
) -> None:
    path, ids = quantized(form), prompt(21, 4)
    expected, logits = own_run(path, ids, "float32")
    engine = build("mlx", path)
    try:
        driver = Driver(engine)
        first = driver.open(ids, OUTPUT)
        driver.finish()
        others = [driver.open(prompt(5 + 7 * number, number), OUTPUT) for number in range(2)]
        again = driver.open(ids, OUTPUT)
        driver.finish(prompt_tokens=8)
        engine._library.open(
            TickPlan(0, [LanePlan(0, False, 0, tuple(ids), 1, 0, (3, 1))], len(ids))
        )
        found = engine._library.forward([StepRow(0, 0, tuple(ids), True, 0, True)])
    finally:
        engine.close()
    assert first.outputs == again.outputs == expected
    assert all(other.fault is None for other in others)
    assert found.shape == (1, VOCABULARY)
    assert np.abs(found[0].numpy() - logits).max() < 1e-4


def test_keys_and_values_are_counted_in_the_type_that_they_have(quantized: Quantized) -> None:
    """Float modes compute the embedding in bfloat16: beside norms in float16 that makes float32."""
    sizes = {}
    for form in ("4-64", "mxfp4"):
        engine = build("mlx", quantized(form), dtype="float16")
        library: Any = engine._library
        info, arrays = engine.describe(), library._pool.arrays()
        sizes[form] = (info.dtype, info.kv_bytes_per_token)
        held = sum(array.nbytes for array in arrays)
        assert held == info.kv_bytes_per_token * info.block_tokens * info.blocks
        engine.close()
    assert sizes == {"4-64": ("float16", 2 * 2 * 64 * 2), "mxfp4": ("float32", 2 * 2 * 64 * 4)}


def test_the_pool_is_sized_when_the_packed_weights_are_in_memory(
    quantized: Quantized, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx

    taken: list[int] = []

    def available(_self: Machine) -> int:
        taken.append(mx.get_active_memory())
        return 1 << 30

    monkeypatch.setattr(Machine, "host_bytes_available", available)
    for path in (quantized("4-64"), wide):
        gc.collect()  # what earlier tests left would be given back meanwhile
        before = mx.get_active_memory()
        build("mlx", path).close()
        held = sum(each.bytes for each in inventory(path, "hf"))
        assert held <= taken[-1] - before < held + (64 << 10)
    small, plain = (
        sum(each.bytes for each in inventory(path, "hf")) for path in (quantized("4-64"), wide)
    )
    assert small < plain / 5


def test_weights_have_a_name_of_their_own(quantized: Quantized, wide: Path) -> None:
    paths = [wide, *map(quantized, FORMS)]
    prints = [_safetensors_weights(path, files_of(path).config) for path in paths]
    assert len(set(prints)) == len(paths)


@pytest.mark.parametrize("form", AFFINE)
def test_the_native_engine_reads_the_numbers_that_mlx_does(form: str, quantized: Quantized) -> None:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    path = quantized(form)
    with mx.stream(mx.cpu):
        model, _ = load_model(path)
        model.set_dtype(mx.float32)
        modules = dict(model.named_modules())
        expected = {
            f"{name}.weight": np.array(
                mx.dequantize(
                    own.weight, own.scales, own.biases, group_size=own.group_size, bits=own.bits
                )
            )
            for name, own in modules.items()
            if hasattr(own, "scales")
        }
    files = files_of(path)
    with open_source(path, "hf", files.config, torch.device("cpu"), torch.float32) as source:
        for name, numbers in expected.items():
            assert np.array_equal(source.get(name).numpy(), numbers), name
    assert len(expected) == (15 if form == "mixed" else 16)
    assert outline(files).problem is None


def test_the_native_engine_gives_the_ids_of_mlx(quantized: Quantized) -> None:
    path, ids = quantized("mixed"), prompt(21, 4)
    expected, _ = own_run(path, ids, "float32")
    options = TorchOptions(device="cpu", dtype="float32", threads=1, lanes=2, kv_blocks=16)
    driver = Driver(build_torch_engine(files_of(path), options))
    session = driver.open(ids, OUTPUT)
    driver.finish()
    assert session.outputs == expected


def test_modes_that_an_engine_does_not_know_are_named(quantized: Quantized, tmp_path: Path) -> None:
    path = quantized("nvfp4")
    assert "mode nvfp4, of which only affine is read; --engine mlx runs it" in (
        outline(files_of(path)).problem or ""
    )
    table = json.loads((path / "config.json").read_text())
    table["quantization"]["mode"] = "affine3d"
    (tmp_path / "config.json").write_text(json.dumps(table))
    with pytest.raises(ModelFilesError, match=r"mlx.: mode 'affine3d' is not supported"):
        files_of(tmp_path)
    other = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    plain = write_checkpoint(tmp_path / "m", quantization_config=other)
    with pytest.raises(ConfigError, match=r"those that MLX quantized; .* otherwise .fp8."):
        build("mlx", plain)
