"""`ModelConfig` -> a `config.json` that reads back as the same value.

Owns the writing alone: heads get a model's shape as that file, also where it came from a GGUF. It must not invent: each name written is
one that config_hf.py reads, so that the two are each other's test.
"""

from __future__ import annotations

from superfluid_core.modelfiles.shape import HF_ARCHITECTURES, ModelConfig


def config_to_hf(config: ModelConfig) -> dict[str, object]:
    """Write a config.json that `config_from_hf` reads back as the same value."""
    names = {family: name for name, family in reversed(HF_ARCHITECTURES.items())}
    table: dict[str, object] = {
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
        "rope_parameters": _rope(config),
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
    if config.sliding_window is not None:
        table["layer_types"] = [
            "sliding_attention" if config.window_of(layer) else "full_attention"
            for layer in range(config.layers)
        ]
    return table | _own(config)


def _rope(config: ModelConfig) -> dict[str, object]:
    scaling = config.rope_scaling
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
    if scaling.kind == "longrope":
        rope |= {
            "short_factor": list(scaling.short_factors),
            "long_factor": list(scaling.long_factors),
        }
    if config.rotary_dim:
        rope["partial_rotary_factor"] = (config.rotary_dim + 0.5) / config.head_dim
    if not config.local_rope_theta:
        return rope
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    return {"full_attention": rope, "sliding_attention": local}


def _own(config: ModelConfig) -> dict[str, object]:
    """Write what only some families have."""
    table: dict[str, object] = {}
    if config.family in ("gemma2", "gemma3"):
        table |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": round((config.attention_scale or 1.0) ** -2, 6),
            "attn_logit_softcapping": config.attention_soft_cap,
            "final_logit_softcapping": config.logit_soft_cap,
        }
    if config.family == "granite":
        table |= {
            "attention_multiplier": config.attention_scale or config.head_dim**-0.5,
            "embedding_multiplier": config.embedding_scale,
            "residual_multiplier": config.residual_scale,
            "logits_scaling": config.logit_divisor,
        }
    if config.family == "smollm3":
        table["no_rope_layers"] = [
            int(layer not in config.nope_layers) for layer in range(config.layers)
        ]
    if config.mixture is not None:
        table |= {
            "num_experts": config.mixture.count,
            "num_experts_per_tok": config.mixture.used,
            "moe_intermediate_size": config.mixture.intermediate,
            "norm_topk_prob": config.mixture.sums_to_one,
            "mlp_only_layers": list(config.mixture.dense_layers),
        }
    return table
