"""The shape of a model, as one value, whichever file it was written in.

Owns the translation of a Hugging Face `config.json` or of GGUF metadata into `ModelConfig`, and the
refusal of everything that this product would compute wrongly: an unknown architecture, another
activation, mixed attention windows, quantized safetensors. It must not know tensors or the engine.
The idea: the engine trusts a `ModelConfig` blindly, so each doubt is settled here, in words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.endings import ending_ids
from superfluid_core.modelfiles.values import Fields

VOCABULARY_MAX = 1 << 22
DIMENSION_MAX = 1 << 20
LAYERS_MAX = 1 << 12
WINDOW_MAX = 1 << 26
THETA_DEFAULT = 10_000.0

# architecture in config.json -> family; in GGUF `general.architecture` names the family itself
HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "factors")
DTYPES = ("float32", "float16", "bfloat16")
# general.file_type of files that are not quantized; a quantized file computes best in bfloat16
GGUF_DTYPES = {0: "float32", 1: "float16", 32: "bfloat16"}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched.

    `factors` (GGUF only): the frequencies are divided by the tensor `rope_freqs.weight`.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that an engine needs to know to build a dense decoder of the llama kind."""

    family: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    window: int
    tied_embeddings: bool
    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    dtype: str


def config_from_hf(
    config: Mapping[str, object], generation_config: Mapping[str, object] | None = None
) -> ModelConfig:
    """Translate `config.json`, with the stop ids of `generation_config.json` merged in."""
    fields = Fields(config, "config.json")
    family = _hf_family(fields)
    _refuse_what_would_be_computed_wrongly(fields)
    heads = fields.integer("num_attention_heads", at_most=DIMENSION_MAX)
    hidden = fields.integer("hidden_size", at_most=DIMENSION_MAX)
    layers = fields.integer("num_hidden_layers", at_most=LAYERS_MAX)
    rope = Fields(fields.mapping("rope_parameters") or fields.mapping("rope_scaling"), "rope")
    window = fields.integer("max_position_embeddings", at_most=WINDOW_MAX)
    generation = Fields(generation_config or {}, "generation_config.json")
    bias = family == "qwen2" or fields.truth("attention_bias", False)
    return _checked(
        ModelConfig(
            family=family,
            vocabulary=fields.integer("vocab_size", at_most=VOCABULARY_MAX),
            hidden=hidden,
            intermediate=fields.integer("intermediate_size", at_most=DIMENSION_MAX),
            layers=layers,
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads", heads, at_most=DIMENSION_MAX),
            head_dim=fields.integer(
                "head_dim", 128 if family == "qwen3" else hidden // heads, at_most=DIMENSION_MAX
            ),
            norm_eps=fields.real("rms_norm_eps", 1e-6),
            rope_theta=rope.real("rope_theta", fields.real("rope_theta", THETA_DEFAULT)),
            rope_scaling=_hf_rope(rope, window),
            window=window,
            tied_embeddings=fields.truth("tie_word_embeddings", False),
            attention_bias=bias,
            attention_out_bias=fields.truth("attention_out_bias", bias and family != "qwen2"),
            mlp_bias=fields.truth("mlp_bias", False),
            qk_norm=family == "qwen3",
            sliding_window=_hf_sliding_window(fields, family, layers),
            bos_id=_first(fields.ids("bos_token_id") + generation.ids("bos_token_id")),
            eos_ids=_unique(fields.ids("eos_token_id") + generation.ids("eos_token_id")),
            dtype=_hf_dtype(fields),
        )
    )


def config_from_gguf(metadata: Mapping[str, object], tensors: Collection[str] = ()) -> ModelConfig:
    """Translate GGUF metadata; the names of the tensors tell what no key says (ties, biases)."""
    fields = Fields(metadata, "GGUF metadata")
    family = fields.text("general.architecture")
    if family not in GGUF_ARCHITECTURES:
        raise ModelFilesError(_unknown(family))
    own = Fields(
        {
            key.removeprefix(family + "."): value
            for key, value in metadata.items()
            if key.startswith(family + ".")
        },
        f"GGUF metadata of {family}",
    )
    if own.integer("expert_count", 0, at_least=0):
        raise ModelFilesError(_unknown(f"{family} with experts"))
    hidden = own.integer("embedding_length", at_most=DIMENSION_MAX)
    heads = own.integer("attention.head_count", at_most=DIMENSION_MAX)
    head_dim = own.integer("attention.key_length", hidden // heads, at_most=DIMENSION_MAX)
    if own.integer("attention.value_length", head_dim) != head_dim:
        raise ModelFilesError("this model's keys and values differ in width: not supported")
    if own.integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelFilesError("this model rotates a part of each head only: not supported")
    tokens = metadata.get("tokenizer.ggml.tokens")
    return _checked(
        ModelConfig(
            family=family,
            vocabulary=len(tokens)
            if isinstance(tokens, list)
            else own.integer("vocab_size", at_most=VOCABULARY_MAX),
            hidden=hidden,
            intermediate=own.integer("feed_forward_length", at_most=DIMENSION_MAX),
            layers=own.integer("block_count", at_most=LAYERS_MAX),
            heads=heads,
            kv_heads=own.integer("attention.head_count_kv", heads, at_most=DIMENSION_MAX),
            head_dim=head_dim,
            norm_eps=own.real("attention.layer_norm_rms_epsilon"),
            rope_theta=own.real("rope.freq_base", THETA_DEFAULT),
            rope_scaling=_gguf_rope(own, tensors),
            window=own.integer("context_length", at_most=WINDOW_MAX),
            tied_embeddings="output.weight" not in tensors,
            attention_bias="blk.0.attn_q.bias" in tensors or family == "qwen2",
            attention_out_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_up.bias" in tensors,
            qk_norm=family == "qwen3",
            sliding_window=own.integer("attention.sliding_window", 0, at_least=0) or None,
            bos_id=_first(fields.ids("tokenizer.ggml.bos_token_id")),
            eos_ids=_unique(
                fields.ids("tokenizer.ggml.eos_token_id")
                + fields.ids("tokenizer.ggml.eot_token_id")
                + fields.ids("tokenizer.ggml.eom_token_id")
                + ending_ids(fields.texts("tokenizer.ggml.tokens"))
            ),
            dtype=GGUF_DTYPES.get(fields.integer("general.file_type", 0, at_least=0), "bfloat16"),
        )
    )


def config_to_hf(config: ModelConfig) -> dict[str, object]:
    """Write a config.json that `config_from_hf` reads back as the same value."""
    scaling = config.rope_scaling
    names = {family: name for name, family in reversed(HF_ARCHITECTURES.items())}
    rope: dict[str, object] = {"rope_type": scaling.kind, "rope_theta": config.rope_theta}
    if scaling.kind != "default":
        rope |= {
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
            "attention_factor": scaling.attention_factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
        }
    return {
        "architectures": [names[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "max_position_embeddings": config.window,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.attention_bias,
        "attention_out_bias": config.attention_out_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
        "dtype": config.dtype,
    }


def _hf_family(fields: Fields) -> str:
    names = fields.texts("architectures")
    for name in names:
        if name in HF_ARCHITECTURES:
            return HF_ARCHITECTURES[name]
    if names:
        raise ModelFilesError(_unknown(names[0]))
    kind = fields.text("model_type", "")
    if kind in GGUF_ARCHITECTURES:
        return kind
    if kind == "mistral":
        return "llama"
    raise ModelFilesError(_unknown(kind or "(none named in config.json)"))


def _unknown(architecture: str) -> str:
    known = ", ".join((*HF_ARCHITECTURES, *(f"GGUF {name}" for name in GGUF_ARCHITECTURES)))
    return f"unknown architecture {architecture[:100]!r}; known are {known}"


def _refuse_what_would_be_computed_wrongly(fields: Fields) -> None:
    quantization = fields.mapping("quantization_config")
    if quantization:
        method = str(quantization.get("quant_method", "unknown"))[:40]
        raise ModelFilesError(
            f"these safetensors are quantized ({method}); give the unquantized model or a GGUF"
        )
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelFilesError(f"activation {activation[:40]!r} is not supported, only silu")


def _hf_rope(rope: Fields, window: int) -> RopeScaling:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelFilesError(f"rope scaling {kind[:40]!r} is not supported")
    if kind == "default":
        return RopeScaling()
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


def _gguf_rope(own: Fields, tensors: Collection[str]) -> RopeScaling:
    if "rope_freqs.weight" in tensors:
        return RopeScaling(kind="factors")
    kind = own.text("rope.scaling.type", "none")
    factor = own.real("rope.scaling.factor", own.real("rope.scale_linear", 1.0))
    if kind == "none" or factor in (0.0, 1.0):
        return RopeScaling()
    if kind not in ("linear", "yarn"):
        raise ModelFilesError(f"rope scaling {kind[:40]!r} is not supported")
    original = own.integer("rope.scaling.original_context_length", 0, at_least=0)
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_max_position=original or own.integer("context_length", at_most=WINDOW_MAX),
    )


def _hf_sliding_window(fields: Fields, family: str, layers: int) -> int | None:
    """Find the window of all layers, None for full attention; a mixture is refused."""
    size = fields.integer("sliding_window", 0, at_least=0)
    if not size or (family != "llama" and not fields.truth("use_sliding_window", False)):
        return None
    kinds = set(fields.texts("layer_types"))
    first = fields.integer("max_window_layers", 0, at_least=0) if family != "llama" else 0
    if kinds == {"full_attention"} or (not kinds and first >= layers):
        return None
    if len(kinds) > 1 or (not kinds and first):
        raise ModelFilesError("layers with and without a sliding window mixed: not supported")
    return size


def _hf_dtype(fields: Fields) -> str:
    name = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelFilesError(f"weights of type {name[:40]!r} are not supported")
    return name


def _checked(config: ModelConfig) -> ModelConfig:
    if config.heads % config.kv_heads:
        raise ModelFilesError(
            f"{config.heads} heads cannot share {config.kv_heads} key-value heads evenly"
        )
    if config.head_dim % 2:
        raise ModelFilesError(f"a head of {config.head_dim} numbers cannot be rotated in pairs")
    return config


def _unique(ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None
