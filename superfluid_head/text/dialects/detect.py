"""Which dialect a model speaks, told from the source of its chat template: a table of telltale substrings.

A template writes the calls of earlier turns in the model's own markup, so the markup is in its source. The first row whose
substrings are all there wins; the order matters where one family's markup contains another's.
"""

from __future__ import annotations

from dataclasses import dataclass

from superfluid_head.text.dialects.dialect import HARMONY, Dialect

AUTO = "auto"
NONE = "none"

CALL_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>"), HARMONY),
    (("｜DSML｜", "function_calls"), "deepseek_v32"),
    (("｜DSML｜",), "deepseek_v4"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<|tool_call>",), "gemma4"),
    (("<arg_key>",), "glm"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral_v11"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|start_of_role|>", "<|tool_call|>"), "granite"),
    (("<|start_of_role|>", "<tool_call>["), "granite_v31"),
    (("<tool_call>",), "hermes"),
    (("<|python_start|>",), "pythonic"),
    (("func_name1(params_name1=",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|start_header_id|>", '"parameters":'), "llama3_json"),
)
REASONING_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>"), HARMONY),
    (("[THINK]",), "magistral"),
    (("<seed:think>",), "seed_oss"),
    (("<|channel>",), "gemma4"),
    (("Here is my thought process:",), "granite"),
    (("<think>",), "think"),
    (("</think>",), "think"),
)
DIALECTS: dict[str, Dialect] = {
    "hermes": Dialect("hermes"),
    "qwen2": Dialect("hermes"),
    "qwen3": Dialect("hermes", "think"),
    "qwen3_coder": Dialect("qwen3_coder"),
    "qwen3_5": Dialect("qwen3_coder", "think"),
    "nemotron3": Dialect("qwen3_coder", "think"),
    "llama3": Dialect("llama3_json"),
    "llama3_2": Dialect("pythonic"),
    "llama4": Dialect("pythonic"),
    "mistral": Dialect("mistral"),
    "mistral_v11": Dialect("mistral_v11"),
    "magistral": Dialect("mistral_v11", "magistral"),
    "deepseek_v3": Dialect("deepseek_v3"),
    "deepseek_r1": Dialect("deepseek_v3", "think"),
    "deepseek_v31": Dialect("deepseek_v31", "think"),
    "deepseek_v32": Dialect("deepseek_v32", "think"),
    "deepseek_v4": Dialect("deepseek_v4", "think"),
    "glm": Dialect("glm", "think"),
    "kimi_k2": Dialect("kimi_k2", "think"),
    "gpt_oss": Dialect(HARMONY, HARMONY),
    "granite": Dialect("granite", "granite"),
    "granite4": Dialect("hermes"),
    "minimax_m2": Dialect("minimax_m2", "think"),
    "gemma4": Dialect("gemma4", "gemma4"),
    "seed_oss": Dialect(None, "seed_oss"),
}


def _told(signs: tuple[tuple[tuple[str, ...], str], ...], source: str) -> str | None:
    return next((name for words, name in signs if all(word in source for word in words)), None)


def detect(source: str) -> Dialect:
    """Read the dialect from a template's source."""
    return Dialect(_told(CALL_SIGNS, source), _told(REASONING_SIGNS, source))


@dataclass(frozen=True, slots=True)
class DialectChoice:
    """What a person chose: a dialect, and parsers that go before it; `auto` asks the template."""

    dialect: str = AUTO
    calls: str = AUTO
    reasoning: str = AUTO

    def resolve(self, source: str) -> Dialect:
        """Choose for the model with this template ("" when it has none)."""
        base = detect(source)
        if self.dialect == NONE:
            base = Dialect()
        elif self.dialect != AUTO:
            base = DIALECTS[self.dialect]
        return Dialect(_chosen(self.calls, base.calls), _chosen(self.reasoning, base.reasoning))


def _chosen(name: str, otherwise: str | None) -> str | None:
    if name == AUTO:
        return otherwise
    return None if name == NONE else name
