"""Checkpoints that contradict themselves are refused by tensor name; GGUF rows are put back in order; rotary scalings."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from superfluid_core.engine.torch.drive import Driver
from superfluid_core.engine.torch.rope import rope_frequencies, rope_table, rotate
from superfluid_core.engine.torch.sources import gguf_name, uninterleave
from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.config import ModelConfig, RopeScaling, config_from_hf
from tests.unit.engine_torch.conftest import files_of

Tiny = Callable[[str], tuple[Path, Any]]
NORM = "model.layers.1.input_layernorm.weight"


def changed(tiny: Tiny, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    source, _ = tiny("llama")
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def test_a_missing_tensor_is_named(tiny: Tiny, tmp_path: Path, build_engine: Any) -> None:
    path = changed(tiny, tmp_path / "m", lambda t: t.__delitem__(NORM))
    with pytest.raises(ModelFilesError, match=NORM):
        build_engine(path)


def test_a_misshapen_tensor_is_named_with_both_shapes(
    tiny: Tiny, tmp_path: Path, build_engine: Any
) -> None:
    path = changed(tiny, tmp_path / "m", lambda t: t.update({NORM: torch.ones(63)}))
    with pytest.raises(ModelFilesError, match=r"\(63,\).*\(64,\)"):
        build_engine(path)


def test_integers_are_not_taken_for_weights(tiny: Tiny, tmp_path: Path, build_engine: Any) -> None:
    ints = torch.ones(64, dtype=torch.int8)
    path = changed(tiny, tmp_path / "m", lambda t: t.update({NORM: ints}))
    with pytest.raises(ModelFilesError, match="int8"):
        build_engine(path)


def write_gguf(directory: Path, model: Any, path: Path, architecture: str) -> None:
    """A small GGUF as converters write it: `llama` query and key rows interleaved, rotary factors in a tensor."""
    from tests.unit.engine_torch.family_gguf import finish, started

    config = model.config
    writer = started(path, architecture, files_of(directory).config)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        numbers = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            halves = numbers.reshape(heads[part], 2, -1, *numbers.shape[1:])
            numbers = halves.swapaxes(1, 2).reshape(numbers.shape)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(numbers))
    if config.rope_parameters["rope_type"] == "llama3":
        plain = 1.0 / (
            config.rope_parameters["rope_theta"] ** (torch.arange(0, 16, 2).float() / 16)
        )
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    finish(writer)


@pytest.mark.reference
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama", "llama"),
        ("llama-llama3-bias", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
def test_a_gguf_file_runs_as_the_checkpoint_it_was_made_of(
    name: str, architecture: str, tiny: Tiny, build_engine: Any, tmp_path: Path
) -> None:
    directory, model = tiny(name)
    write_gguf(directory, model, tmp_path / "tiny.gguf", architecture)
    found = []
    for path in (directory, tmp_path / "tiny.gguf"):
        engine = build_engine(path, kv_blocks=16)
        driver = Driver(engine)
        driver.open(list(range(40, 70)), 1)
        found.append(engine.forward_only(driver.plan(steps=1)))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


def test_interleaved_rows_become_halves() -> None:
    rows = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7, 10, 14, 11, 15, 12, 16, 13, 17])
    assert uninterleave(rows, 2).tolist() == [*range(8), *range(10, 18)]
    columns = rows.unsqueeze(1) * torch.ones(1, 3, dtype=torch.int64)
    assert uninterleave(columns, 2)[:, 2].tolist() == [*range(8), *range(10, 18)]


def config_with(scaling: RopeScaling) -> ModelConfig:
    plain = config_from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 300,
            "hidden_size": 256,
            "intermediate_size": 96,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "max_position_embeddings": 4096,
        }
    )
    return replace(plain, rope_scaling=scaling)


@pytest.mark.reference
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn"])
def test_rotary_frequencies_equal_those_of_transformers(kind: str) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    window = 4096
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0}
    if kind != "default":
        parameters |= {"factor": 4.0}
    if kind in ("llama3", "yarn"):
        parameters |= {"original_max_position_embeddings": 1024}
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=1024 if kind == "dynamic" else window,
        rope_parameters=parameters,
    )
    if kind == "default":
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        expected, magnitude = rotary.inv_freq, 1.0
    else:
        expected, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), window)
    scaling = RopeScaling(kind, 4.0, 1.0, 4.0, 1024)
    found, times = rope_frequencies(config_with(scaling), window)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
    assert times == pytest.approx(magnitude)


def test_dynamic_scaling_is_none_within_the_original_window() -> None:
    plain, _ = rope_frequencies(config_with(RopeScaling()), 1024)
    scaled, _ = rope_frequencies(config_with(RopeScaling("dynamic", 4.0, 1, 4, 1024)), 1024)
    assert torch.equal(plain, scaled)


def test_rotation_turns_pairs_by_position_times_frequency() -> None:
    config = config_with(RopeScaling())
    table = rope_table(config, 32, torch.device("cpu"))
    x = torch.randn(32, 2, 64)
    turned = rotate(x, table.cos.unsqueeze(1), table.sin.unsqueeze(1))
    frequencies, _ = rope_frequencies(config, 32)
    pairs = torch.complex(x[..., :32], x[..., 32:])
    angles = torch.outer(torch.arange(32.0), frequencies).unsqueeze(1)
    expected = pairs * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(torch.cat((expected.real, expected.imag), -1), turned)
    assert torch.equal(turned[0], x[0])
