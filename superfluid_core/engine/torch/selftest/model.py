"""A small random model of the Qwen 3 kind, written as safetensors into a directory: what whole engines are tried with.

Owns its sizes and its weights, which follow from a seed. Norms and scales are chosen so that logits spread and greedy choices are clear.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from superfluid_core.engine.torch.attention.base import AttentionShape
from superfluid_core.modelfiles.config import ModelConfig, config_from_hf

FILE = "model.safetensors"
SPREAD = 3.0  # what layers add must outweigh the embedding, or a tied head says the last id again and again


@dataclass(frozen=True, slots=True)
class TinySizes:
    """Sizes of a model; the rest follows."""

    vocabulary: int = 1000
    hidden: int = 128
    intermediate: int = 256
    layers: int = 3
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    window: int = 512


@dataclass(frozen=True, slots=True)
class TinyModel:
    """Implements `Checkpoint`."""

    path: Path
    config: ModelConfig
    kind: str = "hf"

    def weights_fingerprint(self) -> str:
        return "0" * 16

    def text_fingerprint(self) -> str:
        return "0" * 16


def write_tiny_model(directory: Path, sizes: TinySizes, seed: int = 2) -> TinyModel:
    """Write weights that follow from the seed."""
    save_file(_tensors(sizes, seed), directory / FILE)
    described = _described(sizes)
    (directory / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return TinyModel(directory, config_from_hf(described, None))


def config_for(shape: AttentionShape) -> ModelConfig:
    """Describe a model that has such heads; its other sizes matter to nobody."""
    sizes = TinySizes(heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
    return config_from_hf(_described(sizes), None)


def _described(sizes: TinySizes) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.window,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def _tensors(sizes: TinySizes, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, kv_rows = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (rows, sizes.hidden),
        "self_attn.k_proj": (kv_rows, sizes.hidden),
        "self_attn.v_proj": (kv_rows, sizes.hidden),
        "self_attn.o_proj": (sizes.hidden, rows),
        "self_attn.q_norm": (sizes.head_dim,),
        "self_attn.k_norm": (sizes.head_dim,),
        "mlp.gate_proj": (sizes.intermediate, sizes.hidden),
        "mlp.up_proj": (sizes.intermediate, sizes.hidden),
        "mlp.down_proj": (sizes.hidden, sizes.intermediate),
        "input_layernorm": (sizes.hidden,),
        "post_attention_layernorm": (sizes.hidden,),
    }
    tensors = {
        "model.embed_tokens.weight": torch.randn(
            (sizes.vocabulary, sizes.hidden), generator=generator
        ),
        "model.norm.weight": torch.rand(sizes.hidden, generator=generator) + 0.5,
    }
    for layer in range(sizes.layers):
        for name, shape in shapes.items():
            drawn = torch.randn(shape, generator=generator)
            tensor = SPREAD * drawn / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.1 * drawn
            tensors[f"model.layers.{layer}.{name}.weight"] = tensor
    return tensors
