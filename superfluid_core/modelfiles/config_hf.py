"""`config.json` of a Hugging Face model -> `ModelConfig`.

Owns the names that those files use, the values that a family's files leave out, and the refusal of everything that this product
would compute wrongly: an unknown architecture, another activation, a quantization that is not read. It must not know tensors. The idea: one
table of left-out values a family, laid under the file's own, then one reading for all families and a short one for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.quantization import quantization_of
from superfluid_core.modelfiles.shape import (
    DIMENSION_MAX,
    DTYPES,
    EXPERTS_MAX,
    FAMILIES,
    HF_ARCHITECTURES,
    LAYERS_MAX,
    ROPE_KINDS,
    THETA_DEFAULT,
    VOCABULARY_MAX,
    WINDOW_MAX,
    Mixture,
    ModelConfig,
    RopeScaling,
    checked,
    first,
    fully_seeing,
    unique,
    unknown_architecture,
)
from superfluid_core.modelfiles.values import Fields

ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_GEMMA: dict[str, object] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
# what a file of the family means where it says nothing; a null in the file counts as said
LEFT_OUT: dict[str, dict[str, object]] = {
    "qwen2": {"max_window_layers": 28},
    "qwen3": {"max_window_layers": 28, "head_dim": 128},
    "qwen3moe": {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    },
    "gemma2": {
        **_GEMMA,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
    },
    "gemma3": {
        **_GEMMA,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "sliding_window_pattern": 6,
    },
    "phi3": {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "olmo2": {"rms_norm_eps": 1e-5},
    "smollm3": {
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
}
WITHOUT_WINDOW = ("olmo2", "granite")
WINDOW_IF_ASKED = ("qwen2", "qwen3", "qwen3moe", "smollm3")
_MODEL_TYPES = {
    "mistral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    **{name: name for name in FAMILIES},
}


def config_from_hf(
    config: Mapping[str, object], generation_config: Mapping[str, object] | None = None
) -> ModelConfig:
    """Translate `config.json`, with the stop ids of `generation_config.json` merged in."""
    family = _family(Fields(config, "config.json"))
    table = _with_left_out(config, family)
    fields = Fields(table, "config.json")
    quantization = quantization_of(table)
    _refuse_what_would_be_computed_wrongly(fields)
    heads = fields.integer("num_attention_heads", at_most=DIMENSION_MAX)
    hidden = fields.integer("hidden_size", at_most=DIMENSION_MAX)
    layers = fields.integer("num_hidden_layers", at_most=LAYERS_MAX)
    rope, _ = _rope_tables(fields)
    window = fields.integer("max_position_embeddings", at_most=WINDOW_MAX)
    generation = Fields(generation_config or {}, "generation_config.json")
    bias = family == "qwen2" or fields.truth("attention_bias", False)
    sliding_window, full_layers = _windows(fields, family, layers)
    found = ModelConfig(
        family=family,
        vocabulary=fields.integer("vocab_size", at_most=VOCABULARY_MAX),
        hidden=hidden,
        intermediate=fields.integer("intermediate_size", at_most=DIMENSION_MAX),
        layers=layers,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads, at_most=DIMENSION_MAX),
        head_dim=fields.integer("head_dim", max(1, hidden // heads), at_most=DIMENSION_MAX),
        norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=rope.real("rope_theta", fields.real("rope_theta", THETA_DEFAULT)),
        rope_scaling=_scaling(rope, fields, family),
        window=window,
        tied_embeddings=fields.truth("tie_word_embeddings", False),
        attention_bias=bias,
        attention_out_bias=fields.truth("attention_out_bias", bias and family != "qwen2"),
        mlp_bias=fields.truth("mlp_bias", False),
        qk_norm=family in ("qwen3", "qwen3moe", "gemma3", "olmo2"),
        sliding_window=sliding_window,
        bos_id=first(fields.ids("bos_token_id") + generation.ids("bos_token_id")),
        eos_ids=unique(fields.ids("eos_token_id") + generation.ids("eos_token_id")),
        dtype=_dtype(fields),
        activation=_activation(fields),
        full_layers=full_layers,
        quantization=quantization,
    )
    more = _MORE.get(family)
    return checked(found if more is None else more(found, fields))


# --- for all families


def _family(fields: Fields) -> str:
    names = fields.texts("architectures")
    for name in names:
        if name in HF_ARCHITECTURES:
            return HF_ARCHITECTURES[name]
    kind = fields.text("model_type", "")
    if not names and kind in _MODEL_TYPES:
        return _MODEL_TYPES[kind]
    raise unknown_architecture(names[0] if names else kind or "(none named in config.json)")


def _with_left_out(config: Mapping[str, object], family: str) -> dict[str, object]:
    """Lay the file over what its family leaves out; the text part of a model that also sees comes last."""
    table = {**LEFT_OUT.get(family, {}), **config}
    if "MistralForCausalLM" in Fields(config, "config.json").texts("architectures"):
        table.setdefault("sliding_window", 4096)
    return {**table, **Fields(config, "config.json").mapping("text_config")}


def _refuse_what_would_be_computed_wrongly(fields: Fields) -> None:
    if fields.truth("use_bidirectional_attention", False):
        raise ModelFilesError("this model looks both ways: it is no text generator")


def _activation(fields: Fields) -> Literal["silu", "gelu_tanh"]:
    name = fields.text("hidden_activation", fields.text("hidden_act", "silu"))
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ModelFilesError(f"activation {name[:40]!r} is not supported, only {known}")
    return ACTIVATIONS[name]


def _rope_tables(fields: Fields) -> tuple[Fields, Fields]:
    """Find what says how layers turn, and how those with a window do, where files tell them apart."""
    found = fields.mapping("rope_parameters") or fields.mapping("rope_scaling")
    tables = Fields(found, "rope")
    if not tables.has("full_attention"):
        return tables, Fields({}, "rope")
    return (
        Fields(tables.mapping("full_attention"), "rope of full_attention"),
        Fields(tables.mapping("sliding_attention"), "rope of sliding_attention"),
    )


def _scaling(rope: Fields, fields: Fields, family: str) -> RopeScaling:
    kind = rope.text("rope_type", rope.text("type", "default"))
    is_long = bool(rope.numbers("long_factor"))
    if family == "phi3" and is_long and kind in ("su", "yarn"):
        kind = "longrope"  # what those two names meant there
    if kind not in ROPE_KINDS or is_long != (kind == "longrope"):
        raise ModelFilesError(f"rope scaling {kind[:40]!r} is not supported")
    if kind == "default":
        return RopeScaling()
    if is_long:
        return _long_scaling(rope, fields)
    window = fields.integer("max_position_embeddings", at_most=WINDOW_MAX)
    return RopeScaling(
        kind=kind,
        factor=rope.real("factor", 1.0),
        low_freq_factor=rope.real("low_freq_factor", 1.0),
        high_freq_factor=rope.real("high_freq_factor", 4.0),
        original_max_position=rope.integer("original_max_position_embeddings", window, at_least=0),
        attention_factor=rope.real("attention_factor") if rope.has("attention_factor") else None,
        beta_fast=rope.real("beta_fast", 32.0),
        beta_slow=rope.real("beta_slow", 1.0),
    )


def _long_scaling(rope: Fields, fields: Fields) -> RopeScaling:
    """Read factors for short and long windows; how far they stretch decides by how much cosines and sines grow."""
    window = fields.integer("max_position_embeddings", at_most=WINDOW_MAX)
    original = fields.integer("original_max_position_embeddings", window, at_least=2)
    original = rope.integer("original_max_position_embeddings", original, at_least=2)
    factor = rope.real("factor", window / original)
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=rope.real("attention_factor", grown),
        short_factors=tuple(map(float, rope.numbers("short_factor"))),
        long_factors=tuple(map(float, rope.numbers("long_factor"))),
    )


def _windows(fields: Fields, family: str, layers: int) -> tuple[int | None, tuple[int, ...]]:
    """Find the window, None for full attention, and the layers that have none."""
    size = fields.integer("sliding_window", 0, at_least=0)
    is_off = family in WINDOW_IF_ASKED and not fields.truth("use_sliding_window", False)
    if not size or is_off or family in WITHOUT_WINDOW:
        return None, ()
    kinds = fields.texts("layer_types")
    if kinds:
        full = fully_seeing(kinds, layers)
    elif family in ("gemma2", "gemma3"):
        every = fields.integer("sliding_window_pattern")
        full = tuple(range(every - 1, layers, every))
    elif family == "smollm3":
        full = tuple(sorted(set(range(layers)) - set(_nope_layers(fields, layers))))
    else:
        full = tuple(range(min(layers, fields.integer("max_window_layers", 0, at_least=0))))
    return (None, ()) if len(full) == layers else (size, full)


def _dtype(fields: Fields) -> str:
    name = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelFilesError(f"weights of type {name[:40]!r} are not supported")
    return name


# --- for one family each


def _gemma(found: ModelConfig, fields: Fields) -> ModelConfig:
    _, local = _rope_tables(fields)
    if local.text("rope_type", "default") != "default":
        raise ModelFilesError("layers with a window whose rotation is scaled: not supported")
    theta = local.real("rope_theta", fields.real("rope_local_base_freq", THETA_DEFAULT))
    scalar = fields.real("query_pre_attn_scalar")
    if scalar <= 0:
        raise ModelFilesError(f"query_pre_attn_scalar should be above 0, it is {scalar:g}")
    return replace(
        found,
        norms="around",
        attention_scale=scalar**-0.5,
        attention_soft_cap=fields.real("attn_logit_softcapping", 0.0),
        logit_soft_cap=fields.real("final_logit_softcapping", 0.0),
        embedding_scale=math.sqrt(found.hidden),
        local_rope_theta=theta if found.family == "gemma3" else 0.0,
    )


def _phi3(found: ModelConfig, fields: Fields) -> ModelConfig:
    rope, _ = _rope_tables(fields)
    part = rope.real("partial_rotary_factor", fields.real("partial_rotary_factor", 1.0))
    turned = int(found.head_dim * part)
    if turned < 1:
        raise ModelFilesError(f"partial_rotary_factor {part:g} leaves nothing to rotate")
    return replace(found, rotary_dim=0 if turned == found.head_dim else turned)


def _qwen3moe(found: ModelConfig, fields: Fields) -> ModelConfig:
    every = fields.integer("decoder_sparse_step", at_most=LAYERS_MAX)
    dense = set(map(int, fields.numbers("mlp_only_layers")))
    experts = fields.integer("num_experts", at_most=EXPERTS_MAX)
    dense |= {number for number in range(found.layers) if (number + 1) % every}
    mixture = Mixture(
        count=fields.integer("num_local_experts", experts, at_most=EXPERTS_MAX),
        used=fields.integer("num_experts_per_tok", at_most=EXPERTS_MAX),
        intermediate=fields.integer("moe_intermediate_size", at_most=DIMENSION_MAX),
        sums_to_one=fields.truth("norm_topk_prob", False),
        dense_layers=tuple(sorted(dense)),
    )
    return replace(found, mixture=mixture)


def _olmo2(found: ModelConfig, _fields: Fields) -> ModelConfig:
    return replace(found, norms="after", qk_norm_whole=True)


def _granite(found: ModelConfig, fields: Fields) -> ModelConfig:
    divisor = fields.real("logits_scaling", 1.0)
    if divisor == 0:
        raise ModelFilesError("logits_scaling should not be 0")
    return replace(
        found,
        attention_scale=fields.real("attention_multiplier", 1.0),
        embedding_scale=fields.real("embedding_multiplier", 1.0),
        residual_scale=fields.real("residual_multiplier", 1.0),
        logit_divisor=divisor,
    )


def _nope_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Read the layers that do not turn: those that the list has a 0 for, or every so many."""
    turns = fields.numbers("no_rope_layers")
    if turns:
        if len(turns) != layers:
            raise ModelFilesError(f"no_rope_layers names {len(turns)} of {layers} layers")
        return tuple(number for number, turn in enumerate(turns) if not turn)
    every = fields.integer("no_rope_layer_interval", at_most=LAYERS_MAX)
    return tuple(range(every - 1, layers, every))


def _smollm3(found: ModelConfig, fields: Fields) -> ModelConfig:
    return replace(found, nope_layers=_nope_layers(fields, found.layers))


_MORE: dict[str, Callable[[ModelConfig, Fields], ModelConfig]] = {
    "gemma2": _gemma,
    "gemma3": _gemma,
    "phi3": _phi3,
    "qwen3moe": _qwen3moe,
    "olmo2": _olmo2,
    "granite": _granite,
    "smollm3": _smollm3,
}
