"""What the tests of the compiled CPU path share: the built ops, and tiny models in float and in quantized form."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from superfluid_core.clock import SystemClock
from superfluid_core.engine.compose import StepRow
from superfluid_core.engine.torch.attention.base import AttentionShape
from superfluid_core.engine.torch.batch import Batch, BlockTables, compose_batch
from superfluid_core.engine.torch.kvcache import KvPool, KvShape
from superfluid_core.engine.torch.models import Decoder
from superfluid_core.engine.torch.native.ops import NativeOps, load_native
from superfluid_core.engine.torch.quantized import GROUP, QuantizedRows, floats, to_int8
from superfluid_core.engine.torch.weights import assemble
from superfluid_core.modelfiles.config import ModelConfig, config_from_hf
from superfluid_core.scheduler.plan import LanePlan

CPU = torch.device("cpu")
BLOCK_TOKENS = 16
BLOCKS = 160
TINY: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 700,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "sliding": {"model_type": "mistral", "sliding_window": 20, "head_dim": 64},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "num_key_value_heads": 1},
}


def cache_folder() -> Path:
    """One folder for all test processes of this user, so that the ops are compiled once."""
    return Path(tempfile.gettempdir()) / f"superfluid-tests-{os.getuid()}"


@cache
def ops(threads: int = 1) -> NativeOps:
    return load_native(cache_folder(), threads, SystemClock())


def to_int4(weight: Tensor) -> QuantizedRows:
    """Quantize rows as Q4_1 does."""
    grouped = weight.reshape(weight.shape[0], -1, GROUP)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = ((high - low) / 15).half()
    q = ((grouped - low.unsqueeze(-1)) / scale.float().unsqueeze(-1)).round().clamp_(0, 15)
    return QuantizedRows(q.to(torch.uint8).reshape(weight.shape), scale, low.half())


class TinySource:
    """Random tensors of a model, the same whenever they are asked for; matrices are numbers that quantization keeps."""

    def __init__(self, config: ModelConfig, *, int8: tuple[str, ...] = ("embed",)) -> None:
        self._config = config
        self._int8 = int8
        self._made: dict[str, Tensor] = {}
        self._rows: dict[str, QuantizedRows] = {}

    def has(self, name: str) -> bool:
        return bool(name)

    def rows(self, name: str) -> QuantizedRows | None:
        self.get(name)
        return self._rows.get(name)

    def get(self, name: str) -> Tensor:
        if name not in self._made:
            generator = torch.Generator().manual_seed(sum(name.encode()) + len(self._made))
            drawn = torch.randn(self._shape(name), generator=generator)
            if name.endswith("norm.weight"):
                drawn = 1 + drawn * 0.2
            elif drawn.dim() == 2:
                narrow = any(part in name for part in self._int8)
                rows = to_int8(drawn * 0.3) if narrow else to_int4(drawn * 0.3)
                self._rows[name], drawn = rows, floats(rows)
            self._made[name] = drawn
        return self._made[name]

    def _shape(self, name: str) -> tuple[int, ...]:
        c = self._config
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        outputs = {
            "embed_tokens": c.vocabulary, "lm_head": c.vocabulary, "q_proj": q, "k_proj": kv, "v_proj": kv,
            "o_proj": c.hidden, "gate_proj": c.intermediate, "up_proj": c.intermediate, "down_proj": c.hidden,
            "q_norm": c.head_dim, "k_norm": c.head_dim,
        }  # fmt: skip
        part, kind = name.rsplit(".", 2)[-2:]
        rows = outputs.get(part, c.hidden)
        if kind == "bias" or part.endswith(("norm", "layernorm")):
            return (rows,)
        inputs = {"o_proj": q, "down_proj": c.intermediate}
        return (rows, inputs.get(part, c.hidden))


def tiny_config(variant: str) -> ModelConfig:
    return config_from_hf(TINY | VARIANTS[variant], None)


def tiny_decoder(source: TinySource, config: ModelConfig, dtype: torch.dtype) -> Decoder:
    class Cast:
        def has(self, name: str) -> bool:
            return source.has(name)

        def get(self, name: str) -> Tensor:
            return source.get(name).to(dtype)

    return Decoder(config, assemble(Cast(), config, config.window))


def tiny_pool(config: ModelConfig, dtype: torch.dtype, seed: int = 3) -> KvPool:
    """A pool full of noise; what lies beyond a context must not matter."""
    shape = KvShape(config.layers, BLOCKS, BLOCK_TOKENS, config.kv_heads, config.head_dim, dtype)
    pool = KvPool(shape, CPU)
    generator = torch.Generator().manual_seed(seed)
    for part in (*pool.keys, *pool.values):
        part.copy_(torch.randn(part.shape, generator=generator).to(dtype))
    return pool


def attention_shape(config: ModelConfig) -> AttentionShape:
    return AttentionShape(config.heads, config.kv_heads, config.head_dim, config.sliding_window)


def make_batch(lanes: list[tuple[int, int, bool]], vocabulary: int = 300) -> Batch:
    """Lay out lanes of (positions computed, inputs, decoding) over scattered blocks."""
    order = [(7 * n + 5) % BLOCKS for n in range(BLOCKS)]
    plans = []
    for number, (computed, count, decoding) in enumerate(lanes):
        needed = -(-(computed + count) // BLOCK_TOKENS)
        blocks = tuple(order.pop() for _ in range(needed))
        ids = tuple((computed * 31 + at * 17 + number * 7) % vocabulary for at in range(count))
        plans.append(LanePlan(number, decoding, computed, ids, 1, 0, blocks))
    rows = [StepRow(p.lane, p.computed, p.inputs, True, 0, p.decoding) for p in plans]
    return compose_batch(rows, BlockTables(plans, BLOCK_TOKENS), CPU)
