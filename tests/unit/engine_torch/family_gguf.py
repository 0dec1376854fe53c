"""Tiny checkpoints as GGUF, written the way llama.cpp's converter does: its keys, its tensor names, its order of rows.

Names come from the `gguf` package's own map, so that ours is compared with one that somebody else keeps.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from superfluid_core.modelfiles.config import ModelConfig

ARCHITECTURES = {
    "mistral": "llama",
    "gemma2-16": "gemma2",
    "gemma3-16": "gemma3",
    "phi3": "phi3",
    "phi4": "phi3",
    "qwen3moe": "qwen3moe",
    "olmo2": "olmo2",
    "granite": "granite",
    "smollm3-4": "smollm3",
}
PAIRED = ("llama", "granite", "smollm3")


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as it names them."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def write_family(
    directory: Path, name: str, target: Path, kind: gguf.GGMLQuantizationType | None = None
) -> None:
    """Convert the checkpoint of family `name`; its matrices are quantized as `kind` if that is given."""
    config = json.loads((directory / "config.json").read_text())
    architecture = ARCHITECTURES[name]
    writer = gguf.GGUFWriter(target, architecture)
    _vocabulary(writer, config["vocab_size"])
    _sizes(writer, config, architecture)
    _own(writer, config, architecture)
    tensors = _converted(read_tensors(directory), config, architecture)
    names = gguf.get_tensor_name_map(
        next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture),
        config["num_hidden_layers"],
    )
    for stored, tensor in tensors.items():
        known = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        numbers = np.ascontiguousarray(tensor.float().numpy())
        if kind is None or numbers.ndim < 2:
            writer.add_tensor(known or stored, numbers)
        else:
            packed = gguf.quants.quantize(numbers, kind)
            writer.add_tensor(known or stored, packed, raw_dtype=kind)
    finish(writer)


def started(path: Path, architecture: str, config: ModelConfig) -> Any:
    """Begin a file with the sizes that every family names; its tensors come next, `finish` last."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.window)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocabulary)
    return writer


def finish(writer: Any) -> None:
    """Write everything that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _vocabulary(writer: Any, size: int) -> None:
    # no bytes: llama.cpp tells nothing of a token that ends within a character
    tokens = ["<unk>", "<s>", "</s>", *(f"word{number}" for number in range(3, size))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(size)])
    writer.add_token_types([2, 3, 3, *([1] * (size - 3))])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)


def _sizes(writer: Any, config: dict[str, Any], architecture: str) -> None:
    rope = config["rope_parameters"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    turned = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(turned)
    writer.add_file_type(0)
    if architecture != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)


def _own(writer: Any, config: dict[str, Any], architecture: str) -> None:
    rope = config["rope_parameters"]
    if config.get("sliding_window") or architecture == "phi3":
        writer.add_sliding_window(config["sliding_window"] or 0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    elif architecture == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["full_attention"]["factor"])
    elif architecture == "phi3" and "long_factor" in rope:
        original = rope["original_max_position_embeddings"]
        grown = math.log(config["max_position_embeddings"] / original) / math.log(original)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + grown))
    elif architecture == "qwen3moe":
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    elif architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def _converted(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], architecture: str
) -> dict[str, torch.Tensor]:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=_place):
        tensor = tensors[name]
        part = name.split(".")[-2]
        if architecture in PAIRED and part in heads:
            halves = tensor.reshape(heads[part], 2, -1, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if ".experts." in name:
            layer = name.split(".")[2]
            experts.setdefault(f"model.layers.{layer}.mlp.experts.{part}.weight", []).append(tensor)
        else:
            found[name] = tensor
    rope = config["rope_parameters"]
    for kind in ("long", "short"):
        if f"{kind}_factor" in rope:
            found[f"rope_factors_{kind}.weight"] = torch.tensor(rope[f"{kind}_factor"])
    return found | {name: torch.stack(parts) for name, parts in experts.items()}


def _place(name: str) -> list[tuple[int, str]]:
    """Sort experts by number."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in name.split(".")]
