"""What a quantized checkpoint says of itself: as publishers write it, and refused where it would be read wrongly."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.config import config_from_hf
from superfluid_core.modelfiles.fingerprint import weights_fingerprint
from superfluid_core.modelfiles.quantization import (
    Quantization,
    Width,
    holds_matrix,
    numbers_in,
    quantization_of,
)

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
BYTES = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


def packed(form: str = "pack-quantized", *weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    groups = {f"group_{number}": {"weights": each} for number, each in enumerate(weights)}
    table = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return table | more


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (AWQ, Quantization("awq", "awq", 4, 128, zero_points=True)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "zero_point": False},
            Quantization("awq", "awq", 4),
        ),
        (GPTQ, Quantization("gptq", "gptq", 4, 128, zeros_less_1=True)),
        (
            GPTQ | {"bits": 8, "desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"},
            Quantization("gptq", "gptq", 8, 128, zero_points=True, by_activation=True),
        ),
        (
            GPTQ | {"format": "gptq_v2", "dynamic": {"-:.*gate": {}}, "pack_dtype": "int32"},
            Quantization("gptq", "gptq", 4, 128),
        ),
        (FP8, Quantization("fp8", "fp8", 8, block=(128, 128))),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
            Quantization("fp8", "fp8", 8),
        ),
        (
            packed("float-quantized", FLOATS, FLOATS | {"observer": "minmax"}, ignore=["re:.*(("]),
            Quantization("compressed-tensors", "fp8", 8),
        ),
        (
            packed("float-quantized", FLOATS | {"strategy": "block", "block_structure": [64, 32]}),
            Quantization("compressed-tensors", "fp8", 8, block=(64, 32)),
        ),
        (
            packed("int-quantized", BYTES | {"observer": "minmax"}, ignore=["lm_head"]),
            Quantization("compressed-tensors", "int8", 8),
        ),
        (
            packed("pack-quantized", INTS | {"symmetric": False, "actorder": "group"}),
            Quantization(
                "compressed-tensors", "packed", 4, 128, zero_points=True, by_activation=True
            ),
        ),
        (
            packed("pack-quantized", INTS | {"strategy": "channel", "actorder": "weight"}),
            Quantization("compressed-tensors", "packed", 4),
        ),
    ],
)
def test_published_tables_are_understood(table: dict[str, Any], expected: Quantization) -> None:
    assert quantization_of({"quantization_config": table}) == expected
    assert quantization_of({"quantization_config": table | {"of_no_meaning": None}}) == expected


def test_the_older_name_of_the_table_is_read_and_plain_weights_say_nothing() -> None:
    table = packed("pack-quantized", INTS)
    del table["quant_method"]
    found = quantization_of({"compression_config": table})
    assert found == Quantization("compressed-tensors", "packed", 4, 128)
    assert quantization_of({}) is None
    assert quantization_of({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes.*read are awq"),
        ({"quant_method": "exl2", "bits": 4.5}, "exl2.*read are awq"),
        ({"load_in_8bit": True}, "not named"),
        (AWQ | {"version": "gemv"}, "awq.: version 'gemv'"),
        (AWQ | {"version": "marlin"}, "version 'marlin'"),
        (AWQ | {"bits": 8}, "8 bits"),
        (AWQ | {"group_size": 48}, "groups of 48"),
        (AWQ | {"group_size": 0}, "group_size 0"),
        (AWQ | {"zeros_are_floats": True}, "the key 'zeros_are_floats'"),
        (AWQ | {"bits": None}, "w_bit is missing"),
        (GPTQ | {"bits": 2}, "2 bits"),
        (GPTQ | {"bits": 3}, "3 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
        (GPTQ | {"pack_dtype": "int64"}, "pack_dtype 'int64'"),
        (GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}, "a width of its own for .*down"),
        (GPTQ | {"rotation": "hadamard"}, "the key 'rotation'"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size"),
        (FP8 | {"activation_scheme": "odd"}, "activation_scheme 'odd'"),
        (packed("int-quantized", INTS | {"num_bits": 8}), "strategy 'group'"),
        (packed("int-quantized", BYTES | {"num_bits": 4}), "4 bits"),
        (packed("int-quantized", BYTES | {"actorder": "group"}), "actorder"),
        (packed("nvfp4-pack-quantized", INTS), "format 'nvfp4"),
        (packed("pack-quantized"), "no config_groups"),
        (packed("pack-quantized", INTS, INTS | {"num_bits": 8}), "config_groups that differ"),
        (packed("pack-quantized", INTS | {"num_bits": 3}), "3 bits"),
        (packed("pack-quantized", INTS | {"type": "float"}), "type 'float'"),
        (packed("pack-quantized", INTS | {"group_size": None}), "without a group_size"),
        (packed("pack-quantized", INTS | {"strategy": "tensor"}), "strategy 'tensor'"),
        (packed("pack-quantized", INTS | {"actorder": "odd"}), "actorder 'odd'"),
        (packed("pack-quantized", INTS | {"actorder": 3}), "actorder ''"),
        (packed("pack-quantized", INTS | {"dynamic": True}), "dynamic"),
        (packed("float-quantized", FLOATS | {"symmetric": False}), "zero points of 8-bit floats"),
        (packed("float-quantized", FLOATS | {"strategy": "block"}), "without a block_structure"),
        (packed("float-quantized", FLOATS | {"strategy": "token"}), "strategy 'token'"),
        (packed("pack-quantized", INTS, transform_config={"r1": {}}), "transform_config"),
        (packed("pack-quantized", INTS, sparsity_config={"format": "2:4"}), "format '2:4'"),
        (packed("pack-quantized", INTS, ignore="lm_head"), "a list of texts"),
        (packed("pack-quantized", INTS) | {"config_groups": {"W4A16": ["x"]}}, "config_groups"),
    ],
)
def test_what_would_be_read_wrongly_is_refused_by_name(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFilesError, match=words):
        quantization_of({"quantization_config": table})


MLX = {"group_size": 64, "bits": 4}


def test_the_table_of_mlx_counts_before_its_copy_and_names_modules() -> None:
    own = {
        "b.down": {"group_size": 32, "bits": 6},
        "a.up": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    }
    table = MLX | own | {"lm_head": False, "a.down": True}
    found = quantization_of({"quantization": table, "quantization_config": table})
    assert found is not None
    assert (found.method, found.layout, found.bits, found.group) == ("mlx", "mlx", 4, 64)
    assert found.width("a.up") == Width(8, 32, "mxfp8")
    assert found.width("b.down") == Width(6, 32, "affine")
    for name in ("a.down", "b", "z", "lm_head"):
        assert found.width(name) == Width(4, 64, "affine")
    assert numbers_in(found, "b.down.weight", "U32", (2, 6)) == 2 * 32
    assert numbers_in(found, "c.weight", "U32", (2, 8)) == 2 * 64
    assert numbers_in(found, "c.scales", "F16", (2, 1)) == 0
    assert not holds_matrix(found, "norm.weight", "F16")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (MLX | {"mode": "int3x"}, "mlx.: mode 'int3x'"),
        (MLX | {"bits": 7}, "7 bits"),
        (MLX | {"group_size": 16}, "groups of 16"),
        (MLX | {"mode": "nvfp4"}, "groups of 64 .mode nvfp4"),
        ({"bits": 4}, "groups of 0"),
        (MLX | {"linear_class": "Odd"}, "the key 'linear_class'"),
        (MLX | {"a.up": {"group_size": 32, "bits": 4, "mode": "odd"}}, "a.up.: mode 'odd'"),
        (MLX | {"a.up": {"group_size": 32, "bits": 4, "rotated": 1}}, "the key 'rotated'"),
    ],
)
def test_what_mlx_would_be_read_wrongly_is_refused_by_name(
    table: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelFilesError, match=words):
        quantization_of({"quantization": table})


def test_fingerprints_of_checkpoints_that_were_read_before_mlx_stay() -> None:
    sizes = {"vocab_size": 99, "num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 1}
    more = {"intermediate_size": 64, "max_position_embeddings": 128, "model_type": "llama"}
    plain = sizes | more
    found = [
        weights_fingerprint(config_from_hf(plain | own), [], [])
        for own in ({"quantization_config": AWQ}, {"quantization": MLX}, {})
    ]
    assert found[0] == "79cc3706d5da3684"
    assert len(set(found)) == 3


LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
VALUE = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner)
)
BASES = st.sampled_from(
    [AWQ, GPTQ, FP8, packed("pack-quantized", INTS), packed("float-quantized", FLOATS)]
)


@given(BASES, st.data())
def test_no_table_does_anything_but_be_understood_or_refused(
    table: dict[str, Any], data: st.DataObject
) -> None:
    changed = json.loads(json.dumps(table))
    places = [changed]
    for scheme in changed.get("config_groups", {}).values():
        places += [scheme, scheme["weights"]]
    place = data.draw(st.sampled_from(places))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(VALUE)
    with contextlib.suppress(ModelFilesError):
        quantization_of({"quantization_config": changed})


def test_numbers_are_counted_where_they_are() -> None:
    awq = quantization_of({"quantization_config": AWQ})
    assert awq is not None
    assert numbers_in(awq, "a.q_proj.qweight", "I32", (128, 8)) == 128 * 64
    assert numbers_in(awq, "a.q_proj.qzeros", "I32", (1, 8)) == 0
    assert numbers_in(awq, "a.q_proj.bias", "F16", (64,)) == 64
    assert numbers_in(None, "a.q_proj.scales", "F16", (2, 3)) == 6
    fp8 = quantization_of({"quantization_config": FP8})
    assert fp8 is not None
    assert numbers_in(fp8, "a.q_proj.weight", "F8_E4M3", (8, 4)) == 32
    assert numbers_in(fp8, "a.q_proj.weight_scale_inv", "F32", (1, 1)) == 0
    assert not holds_matrix(fp8, "a.q_proj.weight", "BF16")


def test_of_models_that_see_the_table_beside_the_text_part_counts() -> None:
    text = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64}
    sizes = {"vocab_size": 99, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    config = config_from_hf(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": text | sizes,
            "quantization_config": FP8,
        }
    )
    assert config.quantization == Quantization("fp8", "fp8", 8, block=(128, 128))
