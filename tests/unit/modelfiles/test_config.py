"""Model shapes from config.json and from GGUF metadata."""

from __future__ import annotations

from typing import Any

import pytest

from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.config import (
    ModelConfig,
    RopeScaling,
    config_from_gguf,
    config_from_hf,
    config_to_hf,
)

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008],
}
QWEN2 = {
    **LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "rope_scaling": None,
    "sliding_window": 4096,
    "max_window_layers": 16,
    "use_sliding_window": False,
}
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "attention_bias": False}


def test_llama_with_stretched_rope_is_understood() -> None:
    config = config_from_hf(LLAMA, {"eos_token_id": [128001, 128008, 128009]})
    assert config.family == "llama"
    assert (config.heads, config.kv_heads, config.head_dim) == (32, 8, 64)
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    assert config.eos_ids == (128001, 128008, 128009)
    assert (config.attention_bias, config.qk_norm, config.tied_embeddings) == (False, False, True)


def test_the_families_differ_in_bias_and_norms() -> None:
    qwen2, qwen3 = config_from_hf(QWEN2), config_from_hf(QWEN3)
    assert (qwen2.attention_bias, qwen2.attention_out_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.attention_bias, qwen3.attention_out_bias, qwen3.qk_norm) == (False, False, True)
    assert qwen2.sliding_window is None


def test_mistral_is_read_as_llama_with_its_window() -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    config = config_from_hf({**mistral, "rope_scaling": None})
    assert (config.family, config.sliding_window) == ("llama", 4096)


def test_the_newer_spelling_of_rope_and_type_is_understood() -> None:
    newer = {key: LLAMA[key] for key in LLAMA if key not in ("rope_theta", "rope_scaling")}
    newer |= {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
        "dtype": "float16",
    }
    config = config_from_hf(newer)
    assert (config.rope_theta, config.dtype) == (1e6, "float16")
    assert (config.rope_scaling.kind, config.rope_scaling.original_max_position) == ("yarn", 131072)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "unknown architecture 'GemmaForCausalLM'"),
        ({"architectures": [], "model_type": "mamba"}, "'mamba'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "big"}, "hidden_size should be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers should be from 1"),
        ({"vocab_size": 1 << 40}, "vocab_size should be from 1"),
        ({"rope_theta": float("nan")}, "finite"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling 'longrope'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized .'bitsandbytes'."),
        ({"num_key_value_heads": 5}, "cannot share"),
        ({"torch_dtype": "int8"}, "weights of type 'int8'"),
        ({"eos_token_id": "x"}, "token ids"),
        ({"head_dim": 63}, "pairs"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelFilesError, match=words):
        config_from_hf({**LLAMA, **change})


def test_mixed_windows_are_told_layer_by_layer() -> None:
    mixed = {**QWEN2, "use_sliding_window": True, "max_window_layers": 8}
    found = config_from_hf(mixed)
    assert (found.sliding_window, found.full_layers) == (4096, tuple(range(8)))
    assert (found.window_of(7), found.window_of(8)) == (None, 4096)
    everywhere = config_from_hf({**mixed, "max_window_layers": 0})
    assert (everywhere.sliding_window, everywhere.full_layers) == (4096, ())
    assert config_from_hf({**mixed, "max_window_layers": 99}).sliding_window is None


@pytest.mark.parametrize("table", [LLAMA, QWEN2, QWEN3])
def test_a_written_config_reads_back_as_itself(table: dict[str, Any]) -> None:
    config = config_from_hf(table)
    assert config_from_hf(config_to_hf(config)) == config


def gguf_of(family: str, **changes: Any) -> ModelConfig:
    own = {
        "block_count": 2,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e6,
        **changes.pop("own", {}),
    }
    metadata = {f"{family}.{key}": value for key, value in own.items() if value is not None}
    metadata |= {
        "general.architecture": family,
        "general.file_type": 1,
        "tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|endoftext|>"],
        "tokenizer.ggml.eos_token_id": 1,
    }
    return config_from_gguf(metadata, changes.pop("tensors", ()))


def test_gguf_metadata_is_understood_with_its_tensors() -> None:
    config = gguf_of("qwen2", tensors=("output.weight", "blk.0.attn_q.bias"))
    assert (config.family, config.head_dim, config.vocabulary) == ("qwen2", 16, 3)
    assert (config.tied_embeddings, config.attention_bias, config.dtype) == (False, True, "float16")
    assert config.eos_ids == (1, 2)
    assert gguf_of("qwen3", own={"attention.key_length": 32}).head_dim == 32
    assert gguf_of("llama", tensors=("rope_freqs.weight",)).rope_scaling.kind == "factors"
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    assert gguf_of("llama", own=yarn).rope_scaling.factor == 4.0


@pytest.mark.parametrize(
    ("family", "own", "words"),
    [
        ("gemma", {}, "unknown architecture 'gemma'"),
        ("llama", {"expert_count": 8}, "experts"),
        ("llama", {"rope.dimension_count": 8}, "rotates a part"),
        ("llama", {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "longrope"),
        ("llama", {"embedding_length": None}, "embedding_length is missing"),
    ],
)
def test_gguf_that_would_be_computed_wrongly_is_refused(
    family: str, own: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelFilesError, match=words):
        gguf_of(family, own=own)


@pytest.mark.parametrize("tensors", [(), ("rope_freqs.weight", "output.weight")])
def test_a_config_from_gguf_survives_being_written(tensors: tuple[str, ...]) -> None:
    config = gguf_of("llama", tensors=tensors)
    assert config_from_hf(config_to_hf(config)) == config
