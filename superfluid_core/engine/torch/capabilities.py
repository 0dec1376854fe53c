"""What each way to compute cannot do of a model, in words: the checks that every faster path is chosen by.

Owns the judgements alone; knows values of ModelConfig and no tensor, so that `inspect` can say before anything is loaded which way a
model will take. What a path cannot do falls to the plain decoder, which does everything that a ModelConfig can say.
"""

from __future__ import annotations

from superfluid_core.modelfiles.shape import ModelConfig


def layer_gap(config: ModelConfig) -> str | None:
    """Say what of this model's layers the fused ones (native/, triton/) leave out; None when nothing is."""
    if config.mixture is not None:
        return "it has experts"
    if config.norms != "before":
        return f"it norms {config.norms} its parts"
    if config.activation != "silu":
        return f"its activation is {config.activation}"
    if config.residual_scale != 1.0:
        return "it scales what layers add"
    return None


def compiled_gap(config: ModelConfig) -> str | None:
    """Say why the compiled CPU steps cannot compute this model; None when they can."""
    own = (
        (config.attention_soft_cap > 0 or config.logit_soft_cap > 0, "it caps scores or logits"),
        (bool(config.full_layers), "its layers see differently far"),
        (bool(config.nope_layers or config.local_rope_theta), "its layers turn differently"),
        (config.qk_norm_whole, "it norms queries and keys over all heads"),
        (config.attention_scale is not None, "it scales scores in its own way"),
        (config.embedding_scale != 1.0, "it scales embeddings"),
        (config.logit_divisor != 1.0, "it scales logits"),
    )
    return layer_gap(config) or next((words for holds, words in own if holds), None)


def recorded_gap(config: ModelConfig) -> str | None:
    """Say why decode steps cannot be recorded: the host has to ask which experts are used. None when they can."""
    return None if config.mixture is None else "the host asks which experts are used"


def invariant_gap(config: ModelConfig) -> str | None:
    """Say why no lane can be batch-invariant: how many rows an expert computes depends on the others. None when they can."""
    return None if config.mixture is None else "rows share experts"


def split_gap(config: ModelConfig) -> str | None:
    """Say why the model cannot be cut among ranks; None when it can."""
    if config.qk_norm_whole:
        return "it norms queries and keys over all heads, which no rank has"
    return None
