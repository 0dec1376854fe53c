"""What files of each family say and leave out: configurations as they are published, GGUF keys, refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from superfluid_core.engine.torch.capabilities import compiled_gap
from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.config import (
    Mixture,
    config_from_gguf,
    config_from_hf,
    config_to_hf,
)
from superfluid_core.modelfiles.fingerprint import weights_fingerprint
from superfluid_core.modelfiles.shape import FAMILIES, HF_ARCHITECTURES

COMMON = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}


def published(name: str, **more: Any) -> dict[str, Any]:
    return {**COMMON, "architectures": [f"{name}ForCausalLM"], **more}


LONG = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
PHI = published("Phi3", original_max_position_embeddings=2048, rope_scaling=LONG)
ALL = [
    published("Mistral"),
    published("Qwen3Moe", head_dim=16, decoder_sparse_step=2, mlp_only_layers=[3]),
    published("Gemma2", query_pre_attn_scalar=144),
    published("Gemma3", rope_scaling={"rope_type": "linear", "factor": 8.0}, sliding_window=512),
    PHI,
    {**PHI, "rope_scaling": {**LONG, "long_factor": [2.0] * 6, "short_factor": [1.0] * 6},
     "partial_rotary_factor": 0.75},
    published("Olmo2"),
    published("Granite", attention_multiplier=0.0078125, residual_multiplier=0.22,
              embedding_multiplier=12.0, logits_scaling=8.0),
    published("SmolLM3", no_rope_layers=[1, 1, 1, 0] * 2, layer_types=["full_attention"] * 8),
    published("SmolLM3", use_sliding_window=True, sliding_window=64),
]  # fmt: skip


@pytest.mark.parametrize("table", ALL, ids=range(len(ALL)))
def test_a_written_config_reads_back_as_itself(table: dict[str, Any]) -> None:
    config = config_from_hf(table)
    assert config_from_hf(config_to_hf(config)) == config


def test_gemmas_leave_much_out() -> None:
    second = config_from_hf(published("Gemma2", num_attention_heads=8, hidden_size=2304))
    assert (second.sliding_window, second.full_layers) == (4096, (1, 3, 5, 7))
    assert (second.attention_soft_cap, second.logit_soft_cap) == (50.0, 30.0)
    assert (second.head_dim, second.attention_scale, second.query_factor) == (256, 1 / 16, 1.0)
    assert (second.activation, second.norms, second.tied_embeddings) == (
        "gelu_tanh",
        "around",
        True,
    )
    assert second.embedding_scale == 48.0
    off = published("Gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    uncapped = config_from_hf(off)
    assert (uncapped.attention_soft_cap, uncapped.logit_soft_cap) == (0.0, 0.0)
    third = config_from_hf(published("Gemma3"))
    assert (third.full_layers, third.qk_norm) == ((5,), True)
    assert (third.rope_theta, third.local_rope_theta) == (1_000_000.0, 10_000.0)
    assert (third.attention_soft_cap, third.logit_soft_cap) == (0.0, 0.0)


def test_the_text_part_of_a_model_that_sees_is_read() -> None:
    inner = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
             "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106]}
    found = config_from_hf({**outer, "text_config": inner, "torch_dtype": "bfloat16"})
    assert (found.heads, found.kv_heads, found.vocabulary) == (8, 4, 262_208)
    assert (found.eos_ids, found.dtype, found.window) == ((1, 106), "bfloat16", 131_072)
    assert found.rope_scaling.factor == 8.0


def test_mistral_without_a_word_about_its_window_has_one_and_with_null_none() -> None:
    assert config_from_hf(published("Mistral")).sliding_window == 4096
    assert config_from_hf(published("Mistral", sliding_window=None)).sliding_window is None


def test_phi_turns_parts_of_heads_by_factors() -> None:
    config = config_from_hf(PHI)
    scaling = config.rope_scaling
    assert (scaling.kind, scaling.original_max_position) == ("longrope", 2048)
    assert scaling.attention_factor == pytest.approx((1 + 2 / 11) ** 0.5)
    assert (config.rotary_dim, config_from_hf(ALL[5]).rotary_dim) == (0, 12)


def test_experts_are_in_the_layers_that_say_so() -> None:
    config = config_from_hf(ALL[1])
    assert config.mixture == Mixture(128, 8, 768, False, (0, 2, 3, 4, 6))
    assert [config.is_mixture(layer) for layer in range(4)] == [False, True, False, False]


def test_smollm_turns_no_fourth_layer() -> None:
    assert config_from_hf(published("SmolLM3")).nope_layers == (3, 7)
    sliding = config_from_hf(ALL[-1])
    assert (sliding.sliding_window, sliding.full_layers) == (64, (0, 1, 2, 4, 5, 6))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (published("Gemma3", use_bidirectional_attention=True), "looks both ways"),
        (published("Gemma2", query_pre_attn_scalar=0), "query_pre_attn_scalar"),
        (published("Gemma2", layer_types=["chunked_attention"] * 8), "chunked_attention"),
        (published("Gemma2", layer_types=["full_attention"] * 3), "list of 3"),
        (published("Gemma2", hidden_activation="relu"), "activation 'relu'"),
        (published("Granite", logits_scaling=0.0), "logits_scaling"),
        (published("SmolLM3", no_rope_layers=[1]), "names 1 of 8"),
        ({**PHI, "rope_scaling": {**LONG, "short_factor": [1.0]}}, "1 rotary factors for 8"),
        ({**PHI, "partial_rotary_factor": 0.01}, "nothing to rotate"),
        (published("Qwen3Moe", num_experts=2, num_experts_per_tok=3), "3 of 2 experts"),
        (published("Mixtral"), "unknown architecture 'MixtralForCausalLM'"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFilesError, match=words):
        config_from_hf(table)


def gguf_of(family: str, own: dict[str, Any], tensors: tuple[str, ...] = ()) -> Any:
    keys = {
        "block_count": 8,
        "context_length": 8192,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "vocab_size": 300,
        **own,
    }
    table = {f"{family}.{key}": value for key, value in keys.items()}
    return config_from_gguf({"general.architecture": family, **table}, tensors)


def test_gguf_says_less_and_means_the_same() -> None:
    wide = {"attention.key_length": 256, "attention.value_length": 256}
    small = gguf_of("gemma2", wide)
    assert (small.query_factor, small.sliding_window, small.full_layers[0]) == (1.0, 4096, 1)
    narrow = {"attention.key_length": 128, "attention.value_length": 128, "block_count": 46}
    largest = gguf_of("gemma2", narrow | {"embedding_length": 4608, "attention.head_count": 32})
    assert largest.attention_scale == pytest.approx(144**-0.5)
    third = gguf_of("gemma3", {"attention.sliding_window": 512})
    assert (third.sliding_window, third.full_layers, third.local_rope_theta) == (
        512,
        (5,),
        10_000.0,
    )
    granite = gguf_of("granite", {"attention.scale": 0.5, "logit_scale": 8.0})
    assert (granite.attention_scale, granite.logit_divisor) == (0.5, 8.0)
    assert gguf_of("granite", {}).attention_scale == 0.25
    phi = gguf_of("phi3", {"rope.dimension_count": 12}, ("rope_factors_long.weight",))
    assert (phi.rotary_dim, phi.rope_scaling.kind) == (12, "long_factors")
    moe = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    assert gguf_of("qwen3moe", moe).mixture == Mixture(8, 2, 32, True)
    for config in (small, largest, third, granite, phi):
        assert config_from_hf(config_to_hf(config)) == config
    with pytest.raises(ModelFilesError, match="OLMo 3"):
        gguf_of("olmo2", {"attention.sliding_window": 4096})


def test_the_text_on_models_has_every_family_with_its_way() -> None:
    text = (Path(__file__).parents[3] / "docs/models.md").read_text("utf-8")
    table = text.partition("## Families")[2].partition("## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| (\w+) \|", table, re.M)
    assert [family for family, _, _ in rows] == sorted(FAMILIES, key=FAMILIES.index)
    for family, classes, way in rows:
        named = re.findall(r"`(\w+)`", classes)
        assert named == [name for name, own in HF_ARCHITECTURES.items() if own == family]
        for name in named:
            config = config_from_hf({**COMMON, "architectures": [name]})
            assert (compiled_gap(config) is None) == (way == "compiled"), name


def test_what_a_config_leaves_at_its_default_is_not_in_the_digest_of_weights() -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    table = published("Llama", num_hidden_layers=2, max_position_embeddings=256)
    del table["num_key_value_heads"]
    config = config_from_hf(
        {**table, "rope_scaling": {**rope, "original_max_position_embeddings": 64}}
    )
    # nodes of an earlier build call the same weights so
    assert weights_fingerprint(config, [("a", "F32", (2, 3))], []) == "cde6fc6ec0731e97"
    capped = config_from_hf(published("Gemma2"))
    other = config_from_hf(published("Gemma2", final_logit_softcapping=20.0))
    assert weights_fingerprint(capped, [], []) != weights_fingerprint(other, [], [])
