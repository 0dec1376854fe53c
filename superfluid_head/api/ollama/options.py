"""`options` and `format` of Ollama's bodies in the members of ours: each one is mapped, without effect here, or refused by name. Pure.

What only steers how a program of another kind loads a model (threads, layers, maps) has no effect on the words and is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from superfluid_head.api.errors import invalid

MAPPED = {
    "num_predict": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}

NAMES = {ours: f"options.{theirs}" for theirs, ours in MAPPED.items()} | {
    "response_format.json_schema": "format",
    "response_format": "format",
}
"""What our members are called here."""

WITHOUT_EFFECT = frozenset(
    (
        *("num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram"),
        *("use_mmap", "use_mlock", "f16_kv", "mirostat_eta", "mirostat_tau"),
    )
)

HARMLESS: dict[str, Callable[[Any], bool]] = {
    "mirostat": lambda value: value == 0,
    "tfs_z": lambda value: value == 1,
    "typical_p": lambda value: value == 1,
    "repeat_last_n": lambda value: value == -1,
    "penalize_newline": lambda value: value is True,
    "vocab_only": lambda value: value is False,
    "embedding_only": lambda value: value is False,
    "logits_all": lambda value: value is False,
}

WINDOW = "num_ctx"
UNBOUNDED = (-1, -2)


def members_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Map what there is. Raises ApiError 400 for what is not known or not honoured."""
    made: dict[str, Any] = {}
    for name, value in options.items():
        if value is None or name in WITHOUT_EFFECT or name == WINDOW:
            continue
        if name in HARMLESS:
            if not HARMLESS[name](value):
                raise _refused(name)
        elif name not in MAPPED:
            raise _refused(name)
        elif not (name == "num_predict" and value in UNBOUNDED):
            made[MAPPED[name]] = value
    return made


def judge_window(options: Mapping[str, Any], window: int) -> None:
    """`num_ctx` is room that is asked for: refuse more than there is. Raises ApiError 400."""
    wanted = options.get(WINDOW)
    if wanted is None:
        return
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise invalid("options.num_ctx: a whole number from 1 on", param="options.num_ctx")
    if wanted > window:
        words = (
            f"options.num_ctx is {wanted}; this model's maximum context length is {window} tokens"
        )
        raise invalid(words, param="options.num_ctx")


def format_of(value: Any) -> dict[str, Any] | None:
    """Map `format`: "json", or a schema."""
    if value is None or value == "":
        return None
    if value == "json":
        return {"type": "json_object"}
    if not isinstance(value, dict):
        raise invalid('format: "json" or a schema', param="format")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": value}}


def _refused(name: str) -> Exception:
    shown = name[:40].encode("ascii", "backslashreplace").decode()
    return invalid(f"options.{shown} is not supported", param=f"options.{shown}")
