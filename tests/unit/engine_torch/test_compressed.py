"""Quantized safetensors: every matrix and every logit is that of the plain checkpoint of the same numbers; what lies is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from superfluid_core.engine.torch.checkpoints import open_source
from superfluid_core.engine.torch.compressed.integers import unpack
from superfluid_core.engine.torch.compressed.rows import Fp8Rows
from superfluid_core.engine.torch.compressed.source import CompressedSource
from superfluid_core.engine.torch.drive import Driver
from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.engine.torch.outline import outline
from superfluid_core.engine.torch.parallel.shards import ShardedSource, local_config
from superfluid_core.engine.torch.quantized import GROUP, floats
from superfluid_core.engine.torch.weights import assemble
from superfluid_core.errors import ModelFilesError
from tests.unit.engine_torch.conftest import files_of
from tests.unit.engine_torch.families import make_model
from tests.unit.engine_torch.packers import FORMS, gptq, publish, words, written

Build = Callable[..., TorchEngine]
Published = Callable[[str, str], tuple[Path, Path]]
CPU = torch.device("cpu")
FAMILY_FORMS = [
    *(("phi4", name) for name in ("awq-32", "gptq-4-zeros", "gptq-4-order", "ct-4-sym")),
    *(("phi4", name) for name in ("fp8-block", "ct-fp8-tensor", "ct-fp8-channel", "ct-8-row")),
    *(("phi3", name) for name in ("awq-32", "gptq-8-sym", "fp8-block", "ct-4-zeros")),
    *(("qwen3moe", name) for name in ("awq-32", "fp8-block", "gptq-4-sym")),
    *(("gemma3", name) for name in ("ct-fp8-channel", "gptq-4-sym", "mlx-4")),
    *((family, name) for family in ("phi3", "phi4") for name in ("fp8-tensor", "mlx-4", "mlx-6")),
    *(("phi3", name) for name in ("ct-fp8-tensor", "ct-int8-tensor", "ct-int8-channel")),
]
LAYER = "model.layers.1.mlp.down_proj"
CASES = [*(("llama-llama3-bias", name) for name in FORMS), *FAMILY_FORMS]


@pytest.fixture(scope="session")
def published(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Published:
    """(quantized directory, plain directory of the same numbers), made once."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}
    sources: dict[str, Path] = {}

    def make(family: str, form: str) -> tuple[Path, Path]:
        if family not in sources and not family.startswith("llama"):
            sources[family] = tmp_path_factory.mktemp(family)
            make_model(family).save_pretrained(sources[family])
        source = sources.get(family) or tiny(family)[0]
        if (family, form) not in made:
            made[family, form] = publish(source, FORMS[form], tmp_path_factory.mktemp(form))
        return made[family, form]

    return make


def source_of(path: Path, dtype: torch.dtype = torch.float32) -> CompressedSource:
    files = files_of(path)
    source = open_source(path, "hf", files.config, CPU, dtype)
    assert isinstance(source, CompressedSource)
    return source


def taken(path: Path) -> list[str]:
    found = outline(files_of(path))
    assert found.problem is None
    return list(found.taken)


def logits_and_ids(engine: TorchEngine) -> tuple[torch.Tensor, list[int]]:
    driver = Driver(engine)
    session = driver.open(list(range(40, 71)), 8)
    driver.finish(steps=3, prompt_tokens=13)
    last = Driver(engine)
    last.open(list(range(30, 60)), 1)
    return engine.forward_only(last.plan(steps=1)), session.outputs


@pytest.mark.parametrize(("family", "form"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_matrix_is_that_of_the_plain_checkpoint(
    family: str, form: str, dtype: torch.dtype, published: Published
) -> None:
    small, plain = published(family, form)
    names = taken(small)
    assert names == taken(plain)
    reference = open_source(plain, "hf", files_of(plain).config, CPU, dtype)
    with source_of(small, dtype) as source, reference:
        for name in names:
            assert source.has(name)
            found, expected = source.get(name), reference.get(name)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected), name


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), CASES)
def test_logits_and_greedy_ids_are_those_of_the_plain_checkpoint(
    family: str, form: str, published: Published, build_engine: Build
) -> None:
    small, plain = (
        logits_and_ids(build_engine(path, kv_blocks=64)) for path in published(family, form)
    )
    assert torch.equal(small[0], plain[0])
    assert small[1] == plain[1]


@pytest.mark.parametrize(("family", "form"), CASES)
def test_rows_hold_the_numbers_that_get_writes_out(
    family: str, form: str, published: Published
) -> None:
    small, _ = published(family, form)
    exact = FORMS[form].exact
    with source_of(small) as source:
        for name in taken(small):
            rows, numbers = source.rows(name), source.get(name)
            if not name.endswith("_proj.weight") or exact is None:
                assert rows is None, name
            elif isinstance(rows, Fp8Rows):
                assert rows.weight.dtype == torch.float8_e4m3fn
                outputs, inputs = rows.weight.shape
                blocks = (-(-outputs // rows.block[0]), -(-inputs // rows.block[1]))
                assert tuple(rows.scale.shape) == blocks
                assert torch.equal(written(rows.weight, rows.scale, rows.block), numbers), name
            else:
                assert rows is not None, name
                assert rows.scale.shape == (rows.q.shape[0], rows.q.shape[1] // GROUP)
                assert (rows.minimum is None) == ("-8-" in form or "int8" in form)
                error = (floats(rows) - numbers).abs().max()
                # the minimum of rows with zero points, at most 15 scales, is rounded to half precision
                bound = 0.0 if exact else float(rows.scale.abs().max()) * 15 * 2**-11
                assert float(error) <= bound, name


def test_a_head_that_is_quantized_too_is_read(published: Published, tmp_path: Path) -> None:
    small, plain = published("llama-llama3-bias", "gptq-4-sym")
    tensors = load_file(small / "model.safetensors")
    parts, numbers = gptq(4, 32, symmetric=True).pack(tensors.pop("lm_head.weight"))
    tensors |= {f"lm_head.{part}": each for part, each in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((small / "config.json").read_bytes())
    assert taken(tmp_path) == taken(plain)
    with source_of(tmp_path) as source:
        assert torch.equal(source.get("lm_head.weight"), numbers)
        assert source.rows("lm_head.weight") is not None
        assert source.rows("model.embed_tokens.weight") is None


@pytest.mark.parametrize("form", ["awq-32", "gptq-4-order", "fp8-block", "ct-4-zeros"])
def test_ranks_share_the_numbers(form: str, published: Published) -> None:
    small, plain = published("llama-llama3-bias", form)
    config = files_of(small).config
    for rank in range(2):
        products = []
        for path in (small, plain):
            with open_source(path, "hf", files_of(path).config, CPU, torch.float32) as source:
                shard = ShardedSource(source, rank, 2)
                weights = assemble(shard, local_config(config, 2), 64)
            x = torch.ones(1, config.hidden)
            products.append([layer.qkv(x) for layer in weights.layers])
        assert all(map(torch.equal, *products))


def test_the_outline_names_all_that_a_matrix_is_made_of(published: Published) -> None:
    small, _ = published("phi4", "ct-4-order")
    held = load_file(small / "model.safetensors")
    assert outline(files_of(small)).stored == set(held)
    small, _ = published("llama-llama3-bias", "fp8-tensor")
    unread = set(load_file(small / "model.safetensors")) - outline(files_of(small)).stored
    assert {name.rpartition(".")[2] for name in unread} == {"input_scale"}


@pytest.mark.parametrize(
    ("form", "part"),
    [
        ("awq-32", "qzeros"),
        ("awq-32", "scales"),
        ("gptq-4-sym", "qzeros"),
        ("ct-4-sym", "weight_shape"),
        ("ct-4-zeros", "weight_zero_point"),
        ("fp8-block", "weight_scale_inv"),
        ("ct-int8-channel", "weight_scale"),
        ("mlx-4", "biases"),
    ],
)
def test_the_outline_misses_what_loading_would_miss(
    form: str, part: str, published: Published, tmp_path: Path
) -> None:
    small, _ = published("llama-llama3-bias", form)
    tensors = load_file(small / "model.safetensors")
    less(part)(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((small / "config.json").read_bytes())
    assert LAYER in (outline(files_of(tmp_path)).problem or "")


def less(part: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(f"{LAYER}.{part}")


def put(part: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({f"{LAYER}.{part}": tensor})


@pytest.mark.parametrize(
    ("form", "change", "said"),
    [
        ("awq-32", less("scales"), "scales'"),
        ("awq-32", less("qzeros"), "qzeros'"),
        ("awq-32", put("scales", torch.ones(2, 64).half()), r"\(2, 64\).*\(3, 64\)"),
        ("awq-32", put("scales", torch.ones(3, 64, dtype=torch.int32)), "is of type I32"),
        ("awq-32", put("qweight", torch.ones(96, dtype=torch.int32)), "not a matrix"),
        ("awq-32", put("qweight", torch.ones(96, 8).half()), "is of type F16, not I32"),
        ("gptq-4-sym", less("qzeros"), "qzeros'"),
        ("gptq-4-sym", put("g_idx", torch.full((96,), 3, dtype=torch.int32)), "not one of 3"),
        ("gptq-4-order", less("g_idx"), "g_idx' is missing, and desc_act"),
        ("gptq-4-sym", put("qweight", torch.ones(8, 64, dtype=torch.int32)), "scales'|64, 96"),
        ("fp8-block", less("weight_scale_inv"), "has 0 scales"),
        ("fp8-block", put("weight_scale", torch.ones(1)), "has 2 scales"),
        ("fp8-block", put("weight_scale_inv", torch.ones(3, 2)), "weight_scale_inv' is"),
        ("ct-4-sym", put("weight_shape", torch.tensor([64, 200])), "its weight_shape says"),
        ("ct-4-sym", put("weight_shape", torch.tensor([1.0, 2.0])), "not two sizes"),
        ("ct-4-zeros", less("weight_zero_point"), "weight_zero_point'"),
        ("ct-4-order", less("weight_g_idx"), "weight_g_idx' is missing, and actorder"),
        ("ct-int8-channel", put("weight_scale", torch.ones(3)), "weight_scale' is"),
        ("ct-int8-channel", less("weight_scale"), "weight_scale'"),
        ("mlx-4", less("scales"), "scales'"),
        ("mlx-4", put("biases", torch.ones(64, 2)), r"biases' is \(64, 2\).*\(64, 3\)"),
        ("mlx-4", put("scales", torch.ones(64, 3, dtype=torch.uint8)), "is of type U8"),
        ("mlx-5", put("weight", torch.ones(64, 7, dtype=torch.uint32)), "no groups of 32 numbers"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_by_tensor(
    form: str,
    change: Callable[[dict[str, torch.Tensor]], None],
    said: str,
    published: Published,
    build_engine: Build,
    tmp_path: Path,
) -> None:
    small, _ = published("llama-llama3-bias", form)
    tensors = load_file(small / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((small / "config.json").read_bytes())
    with pytest.raises(ModelFilesError, match=said) as caught:
        build_engine(tmp_path)
    assert LAYER in caught.value.message


def test_small_numbers_without_a_configuration_are_not_taken_for_weights(
    published: Published, build_engine: Build, tmp_path: Path
) -> None:
    small, _ = published("llama-llama3-bias", "fp8-block")
    table = json.loads((small / "config.json").read_text())
    del table["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(table))
    save_file(load_file(small / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(ModelFilesError, match=r"float8_e4m3fn, not a plain float"):
        build_engine(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mode": "mxfp4"}, "mode mxfp4, of which only affine is read; --engine mlx runs it"),
        ({LAYER: {"group_size": 32, "bits": 8, "mode": "mxfp8"}}, "mode mxfp8"),
        ({LAYER: {"group_size": 32, "bits": 8}}, "no groups of 32 numbers of 8 bits"),
    ],
)
def test_what_mlx_packed_in_another_mode_or_width_is_refused_by_tensor(
    change: dict[str, Any], said: str, published: Published, build_engine: Build, tmp_path: Path
) -> None:
    small, _ = published("llama-llama3-bias", "mlx-4")
    table = json.loads((small / "config.json").read_text())
    table["quantization"] |= change
    (tmp_path / "config.json").write_text(json.dumps(table))
    (tmp_path / "model.safetensors").write_bytes((small / "model.safetensors").read_bytes())
    with pytest.raises(ModelFilesError, match=said):
        build_engine(tmp_path)
    assert "weight" in (outline(files_of(tmp_path)).problem or "")


def test_experts_that_mlx_stacked_are_refused_by_name(published: Published, tmp_path: Path) -> None:
    small, _ = published("qwen3moe", "mlx-4")
    tensors = load_file(small / "model.safetensors")
    for name in [name for name in tensors if ".experts.0." in name]:
        tensors[name.replace(".experts.0.", ".switch_mlp.")] = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((small / "config.json").read_bytes())
    problem = outline(files_of(tmp_path)).problem
    assert problem is not None
    assert "MLX stacks experts, which --engine mlx alone reads" in problem


@pytest.mark.parametrize("form", ["fp8-tensor", "ct-fp8-tensor", "ct-int8-tensor"])
def test_one_scale_of_fused_projections_holds_for_each_of_them(
    form: str, published: Published, tmp_path: Path
) -> None:
    small, _ = published("phi3", form)
    tensors = load_file(small / "model.safetensors")
    prefix = "model.layers.0.self_attn.qkv_proj."
    scale = torch.tensor(0.25)
    tensors[f"{prefix}weight_scale"] = scale.reshape(tensors[f"{prefix}weight_scale"].shape)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((small / "config.json").read_bytes())
    with source_of(tmp_path) as source:
        names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
        found = torch.cat([source.get(name) for name in names])
        kept = [source.rows(name) for name in names]
    assert torch.equal(found, tensors[f"{prefix}weight"].float() * scale)
    rows = [each.weight if isinstance(each, Fp8Rows) else each.q for each in kept if each]
    assert sum(each.shape[0] for each in rows) == found.shape[0]


@pytest.mark.parametrize("scale", [1e-7, 1e6])
def test_scales_that_half_precision_does_not_hold_give_no_rows(
    scale: float, published: Published, tmp_path: Path
) -> None:
    small, _ = published("llama-llama3-bias", "ct-4-sym")
    tensors = load_file(small / "model.safetensors")
    put("weight_scale", torch.full((64, 3), scale))(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((small / "config.json").read_bytes())
    with source_of(tmp_path) as source:
        assert source.rows(f"{LAYER}.weight") is None
        assert bool(source.get(f"{LAYER}.weight").isfinite().all())


@given(st.sampled_from([4, 8]), st.data())
def test_numbers_come_out_of_words_as_they_went_in(bits: int, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 4))
    columns = data.draw(st.integers(1, 3)) * (32 // bits)
    row = st.lists(st.integers(0, (1 << bits) - 1), min_size=columns, max_size=columns)
    numbers = np.array(data.draw(st.lists(row, min_size=rows, max_size=rows)))
    expected = torch.from_numpy(numbers.astype(np.uint8))
    made = words(numbers, bits)
    assert torch.equal(unpack(made, bits, 1), expected)
    assert torch.equal(unpack(made.T, bits, 0), expected.T)
