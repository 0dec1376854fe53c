"""GGUF metadata -> `ModelConfig`.

Owns the keys that those files use and what they leave to the reader: which layers have a window, which do not turn, what scales
scores. Those rules are part of the format as llama.cpp reads it. It must not know tensors, but for their names, which tell what no key
says (ties, biases, rotary factors).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.endings import ending_ids
from superfluid_core.modelfiles.shape import (
    DIMENSION_MAX,
    EXPERTS_MAX,
    GGUF_ARCHITECTURES,
    LAYERS_MAX,
    THETA_DEFAULT,
    VOCABULARY_MAX,
    WINDOW_MAX,
    Mixture,
    ModelConfig,
    RopeScaling,
    checked,
    first,
    unique,
    unknown_architecture,
)
from superfluid_core.modelfiles.values import Fields

# general.file_type of files that are not quantized; a quantized file computes best in bfloat16
DTYPES = {0: "float32", 1: "float16", 32: "bfloat16"}
WINDOW_PATTERNS = {"gemma2": 2, "gemma3": 6}
LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose scores are scaled by the width of a head as hidden / heads, not as it is."""
NOPE_EVERY = 4


def config_from_gguf(metadata: Mapping[str, object], tensors: Collection[str] = ()) -> ModelConfig:
    """Translate GGUF metadata; the names of the tensors tell what no key says (ties, biases)."""
    fields = Fields(metadata, "GGUF metadata")
    family = fields.text("general.architecture")
    if family not in GGUF_ARCHITECTURES:
        raise unknown_architecture(family)
    own = Fields(
        {
            key.removeprefix(family + "."): value
            for key, value in metadata.items()
            if key.startswith(family + ".")
        },
        f"GGUF metadata of {family}",
    )
    if family != "qwen3moe" and own.integer("expert_count", 0, at_least=0):
        raise unknown_architecture(f"{family} with experts")
    found = _common(family, fields, own, tensors)
    more = _MORE.get(family)
    return checked(found if more is None else more(found, own))


def _common(family: str, fields: Fields, own: Fields, tensors: Collection[str]) -> ModelConfig:
    hidden = own.integer("embedding_length", at_most=DIMENSION_MAX)
    heads = own.integer("attention.head_count", at_most=DIMENSION_MAX)
    head_dim = own.integer("attention.key_length", max(1, hidden // heads), at_most=DIMENSION_MAX)
    if own.integer("attention.value_length", head_dim) != head_dim:
        raise ModelFilesError("this model's keys and values differ in width: not supported")
    turned = own.integer("rope.dimension_count", head_dim)
    if turned != head_dim and family != "phi3":
        raise ModelFilesError("this model rotates a part of each head only: not supported")
    tokens = fields.texts("tokenizer.ggml.tokens")
    return ModelConfig(
        family=family,
        vocabulary=len(tokens) or own.integer("vocab_size", at_most=VOCABULARY_MAX),
        hidden=hidden,
        intermediate=own.integer("feed_forward_length", at_most=DIMENSION_MAX),
        layers=own.integer("block_count", at_most=LAYERS_MAX),
        heads=heads,
        kv_heads=own.integer("attention.head_count_kv", heads, at_most=DIMENSION_MAX),
        head_dim=head_dim,
        norm_eps=own.real("attention.layer_norm_rms_epsilon"),
        rope_theta=own.real("rope.freq_base", THETA_DEFAULT),
        rope_scaling=_scaling(own, tensors),
        window=own.integer("context_length", at_most=WINDOW_MAX),
        tied_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors or family == "qwen2",
        attention_out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm=family in ("qwen3", "qwen3moe", "gemma3", "olmo2"),
        sliding_window=own.integer("attention.sliding_window", 0, at_least=0) or None,
        bos_id=first(fields.ids("tokenizer.ggml.bos_token_id")),
        eos_ids=unique(
            fields.ids("tokenizer.ggml.eos_token_id")
            + fields.ids("tokenizer.ggml.eot_token_id")
            + fields.ids("tokenizer.ggml.eom_token_id")
            + ending_ids(tokens)
        ),
        dtype=DTYPES.get(fields.integer("general.file_type", 0, at_least=0), "bfloat16"),
        rotary_dim=0 if turned == head_dim else turned,
    )


def _scaling(own: Fields, tensors: Collection[str]) -> RopeScaling:
    if "rope_freqs.weight" in tensors:
        return RopeScaling(kind="factors")
    kind = own.text("rope.scaling.type", "none")
    factor = own.real("rope.scaling.factor", own.real("rope.scale_linear", 1.0))
    original = own.integer("rope.scaling.original_context_length", 0, at_least=0)
    original = original or own.integer("context_length", at_most=WINDOW_MAX)
    if "rope_factors_long.weight" in tensors:
        return RopeScaling(
            kind="long_factors",
            factor=factor,
            original_max_position=original,
            attention_factor=own.real("rope.scaling.attn_factor", 1.0),
        )
    if kind == "none" or factor in (0.0, 1.0):
        return RopeScaling()
    if kind not in ("linear", "yarn"):
        raise ModelFilesError(f"rope scaling {kind[:40]!r} is not supported")
    return RopeScaling(kind=kind, factor=factor, original_max_position=original)


# --- for one family each


def _gemma(found: ModelConfig, own: Fields) -> ModelConfig:
    every, is_second = WINDOW_PATTERNS[found.family], found.family == "gemma2"
    full = tuple(range(every - 1, found.layers, every))
    is_largest = found.layers == LARGEST_GEMMAS[found.family]
    width = found.hidden / found.heads if is_largest else found.head_dim
    window = own.integer("attention.sliding_window", 4096, at_least=0) or None
    return replace(
        found,
        activation="gelu_tanh",
        norms="around",
        attention_scale=float(width) ** -0.5,
        attention_soft_cap=own.real("attn_logit_softcapping", 50.0 if is_second else 0.0),
        logit_soft_cap=own.real("final_logit_softcapping", 30.0 if is_second else 0.0),
        embedding_scale=math.sqrt(found.hidden),
        sliding_window=window,
        full_layers=() if window is None else full,
        rope_theta=own.real("rope.freq_base", THETA_DEFAULT if is_second else 1_000_000.0),
        local_rope_theta=0.0 if is_second else own.real("rope.freq_base_swa", THETA_DEFAULT),
    )


def _qwen3moe(found: ModelConfig, own: Fields) -> ModelConfig:
    mixture = Mixture(
        count=own.integer("expert_count", at_most=EXPERTS_MAX),
        used=own.integer("expert_used_count", at_most=EXPERTS_MAX),
        intermediate=own.integer("expert_feed_forward_length", at_most=DIMENSION_MAX),
        sums_to_one=True,
    )
    return replace(found, mixture=mixture)


def _olmo2(found: ModelConfig, _own: Fields) -> ModelConfig:
    if found.sliding_window is not None:
        raise unknown_architecture("olmo2 with windows (OLMo 3)")
    return replace(found, norms="after", qk_norm_whole=True)


def _granite(found: ModelConfig, own: Fields) -> ModelConfig:
    return replace(
        found,
        sliding_window=None,
        attention_scale=own.real("attention.scale", 0.0) or found.head_dim**-0.5,
        embedding_scale=own.real("embedding_scale", 1.0) or 1.0,
        residual_scale=own.real("residual_scale", 1.0) or 1.0,
        logit_divisor=own.real("logit_scale", 1.0) or 1.0,
    )


def _smollm3(found: ModelConfig, _own: Fields) -> ModelConfig:
    nope = tuple(range(NOPE_EVERY - 1, found.layers, NOPE_EVERY))
    return replace(found, nope_layers=nope, sliding_window=None)


_MORE: dict[str, Callable[[ModelConfig, Fields], ModelConfig]] = {
    "gemma2": _gemma,
    "gemma3": _gemma,
    "qwen3moe": _qwen3moe,
    "olmo2": _olmo2,
    "granite": _granite,
    "smollm3": _smollm3,
}
