"""Tiny random checkpoints of the families beside Llama and Qwen, as transformers makes and writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LAYERS = 4
WINDOW = 256
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": WINDOW,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
KINDS = ["sliding_attention", "full_attention"]
GEMMA = {
    "head_dim": 16,
    "sliding_window": 20,
    "layer_types": KINDS * (LAYERS // 2),
    "query_pre_attn_scalar": 24,
}
FULL = {"rope_type": "linear", "factor": 2.0, "rope_theta": 50_000.0}
LOCAL = {"rope_type": "default", "rope_theta": 1_000.0}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16}


def longrope(turned: int, original: int) -> dict[str, Any]:
    """Phi's rotary settings for heads of which `turned` numbers turn."""
    half = turned // 2
    return {
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0 + 0.1 * number for number in range(half)],
            "long_factor": [1.5 + 0.5 * number for number in range(half)],
            "original_max_position_embeddings": original,
            "partial_rotary_factor": turned / 16,
        },
    }


def makers() -> dict[str, Callable[[], Any]]:
    """Configurations by name; each shows something that no other does."""
    import transformers as hf

    return {
        "mistral": lambda: hf.MistralConfig(**SIZES, head_dim=16, sliding_window=20),
        "qwen2-mixed": lambda: hf.Qwen2Config(
            **SIZES, use_sliding_window=True, sliding_window=20, max_window_layers=2
        ),
        "gemma2": lambda: hf.Gemma2Config(
            **SIZES, **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
        ),
        "gemma2-16": lambda: hf.Gemma2Config(
            **SIZES,
            **(GEMMA | {"query_pre_attn_scalar": 16}),
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        "gemma3": lambda: hf.Gemma3TextConfig(
            **SIZES,
            **GEMMA,
            rope_parameters={"full_attention": FULL, "sliding_attention": LOCAL},
        ),
        "gemma3-16": lambda: hf.Gemma3TextConfig(
            **(SIZES | {"num_hidden_layers": 7}),
            **(GEMMA | {"query_pre_attn_scalar": 16, "layer_types": None}),
            rope_parameters={"full_attention": FULL, "sliding_attention": {"rope_type": "default"}},
        ),
        "phi3": lambda: hf.Phi3Config(**SIZES, sliding_window=20),
        "phi4": lambda: hf.Phi3Config(
            **SIZES, sliding_window=None, tie_word_embeddings=True, **longrope(8, 8)
        ),
        "qwen3moe": lambda: hf.Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True),
        "qwen3moe-mixed": lambda: hf.Qwen3MoeConfig(
            **SIZES, **EXPERTS, norm_topk_prob=False, mlp_only_layers=[1]
        ),
        "olmo2": lambda: hf.Olmo2Config(**SIZES),
        "granite": lambda: hf.GraniteConfig(
            **SIZES,
            attention_multiplier=0.2,
            embedding_multiplier=3.0,
            residual_multiplier=0.4,
            logits_scaling=2.5,
            tie_word_embeddings=True,
        ),
        "smollm3": lambda: hf.SmolLM3Config(**SIZES, no_rope_layer_interval=2),
        "smollm3-4": lambda: hf.SmolLM3Config(**SIZES),
    }


NAMES = (
    *("mistral", "qwen2-mixed", "gemma2", "gemma3", "phi3", "phi4"),
    *("qwen3moe", "qwen3moe-mixed", "olmo2", "granite", "smollm3"),
)
# those whose values a GGUF file can say: what llama.cpp has as constants is as it has it
GGUF_NAMES = (
    *("mistral", "gemma2-16", "gemma3-16", "phi3", "phi4"),
    *("qwen3moe", "olmo2", "granite", "smollm3-4"),
)


def make_model(name: str) -> Any:
    """A random model of one family; norms and biases are random too."""
    import transformers

    torch.manual_seed(sum(name.encode()))
    model = transformers.AutoModelForCausalLM.from_config(makers()[name]()).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.12)
    return model
