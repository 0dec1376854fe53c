"""What an engine is told of a model: `ModelConfig` and the names that may stand in it.

Owns the values and the checks that hold whatever file they came from. It must not know how files say them (config_hf.py,
config_gguf.py) nor what computes them. The idea: a family is no class but a few values that differ from Llama's, so what a path
cannot compute it can tell by looking at values, without knowing families.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.quantization import Quantization

VOCABULARY_MAX = 1 << 22
DIMENSION_MAX = 1 << 20
LAYERS_MAX = 1 << 12
EXPERTS_MAX = 1 << 12
WINDOW_MAX = 1 << 26
THETA_DEFAULT = 10_000.0

# architecture in config.json -> family; in GGUF `general.architecture` names the family itself
HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
}
FAMILIES = tuple(dict.fromkeys(HF_ARCHITECTURES.values()))
GGUF_ARCHITECTURES = FAMILIES
INTERLEAVED = ("llama", "granite", "smollm3")
"""Families whose GGUF files keep rows that turn together side by side."""
ROPE_KINDS = (
    "default",
    "linear",
    "dynamic",
    "llama3",
    "yarn",
    "longrope",
    "factors",
    "long_factors",
)
DTYPES = ("float32", "float16", "bfloat16")
Norms = Literal["before", "after", "around"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched.

    `longrope`: the frequencies are divided by the long factors where more than the original window is served, else by the short
    ones. GGUF only: `factors`, divided by the tensor `rope_freqs.weight`; `long_factors`, as `longrope` by two tensors.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts instead of one gated unit: `used` of `count` compute a token, each `intermediate` wide.

    `sums_to_one`: the weights of those that are used are scaled so. `dense_layers` have one unit all the same.
    """

    count: int
    used: int
    intermediate: int
    sums_to_one: bool
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that an engine needs to know to build a decoder. What has a default says nothing of a Llama.

    rotary_dim       how much of each head turns; 0 is all of it
    norms            where a layer norms: what enters a part, what leaves it, or both
    qk_norm_whole    queries and keys are normed over all heads together
    attention_scale  what scores are multiplied by; None is 1 / sqrt(head_dim)
    *_soft_cap       bounds by tanh, 0 is none
    full_layers      see everything although there is a `sliding_window`
    local_rope_theta of layers with a window; 0: as of all others
    nope_layers      do not turn at all
    quantization     how safetensors were made small; None where they are plain, and for GGUF files
    """

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
    rotary_dim: int = 0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norms: Norms = "before"
    qk_norm_whole: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    full_layers: tuple[int, ...] = ()
    local_rope_theta: float = 0.0
    nope_layers: tuple[int, ...] = ()
    mixture: Mixture | None = None
    quantization: Quantization | None = None

    @property
    def turned(self) -> int:
        """How many numbers of a head turn."""
        return self.rotary_dim or self.head_dim

    @property
    def query_factor(self) -> float:
        """What queries are multiplied by so that 1 / sqrt(head_dim) scales scores as this model wants."""
        scale = self.attention_scale
        return 1.0 if scale is None else float(scale * self.head_dim**0.5)

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.mixture is not None and layer not in self.mixture.dense_layers

    def window_of(self, layer: int) -> int | None:
        """How many positions a layer sees; None is all."""
        return None if layer in self.full_layers else self.sliding_window


def unknown_architecture(name: str) -> ModelFilesError:
    """Refuse an architecture, saying which ones are known."""
    known = ", ".join((*HF_ARCHITECTURES, *(f"GGUF {family}" for family in GGUF_ARCHITECTURES)))
    return ModelFilesError(f"unknown architecture {name[:100]!r}; known are {known}")


def checked(config: ModelConfig) -> ModelConfig:
    """Refuse what contradicts itself."""
    if config.heads % config.kv_heads:
        raise ModelFilesError(
            f"{config.heads} heads cannot share {config.kv_heads} key-value heads evenly"
        )
    if config.head_dim % 2:
        raise ModelFilesError(f"a head of {config.head_dim} numbers cannot be rotated in pairs")
    if config.turned % 2 or config.turned > config.head_dim:
        raise ModelFilesError(f"{config.turned} of {config.head_dim} numbers cannot be rotated")
    for factors in (config.rope_scaling.short_factors, config.rope_scaling.long_factors):
        if factors and len(factors) != config.turned // 2:
            raise ModelFilesError(
                f"{len(factors)} rotary factors for {config.turned // 2} frequencies"
            )
    mixture = config.mixture
    if mixture is not None and not 0 < mixture.used <= mixture.count:
        raise ModelFilesError(f"{mixture.used} of {mixture.count} experts cannot be used")
    return config


def unique(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Each id once, in the order of its first coming."""
    return tuple(dict.fromkeys(ids))


def first(ids: tuple[int, ...]) -> int | None:
    """Take the first id, if there is any."""
    return ids[0] if ids else None


def fully_seeing(kinds: list[str], layers: int) -> tuple[int, ...]:
    """Read a list of a model's layer types: those that see everything. Refuses others than the two."""
    strange = set(kinds) - {"full_attention", "sliding_attention"}
    if strange or len(kinds) != layers:
        what = repr(sorted(strange)[0][:40]) if strange else f"a list of {len(kinds)}"
        raise ModelFilesError(f"layer types: {what} is not supported for {layers} layers")
    return tuple(number for number, kind in enumerate(kinds) if kind == "full_attention")
