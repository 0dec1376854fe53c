"""The matrix's rows: a kind of request each, as data. One line more here is one kind more that must survive every cut.

`pieces` dictate the answer (bytes of UTF-8 leave one token each, so a cut can fall into a character); without them the engine draws
hashed tokens, invalid bytes among them. `members` are the request's. `cuts` are the numbers of delivered tokens at which a node
is lost; None is every one of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PREFILL = -1
EMOJI = "naïve 😀 — 漢字 🙂!"
STOPPED = "ABC DEFGHIJ KLM"


@dataclass(frozen=True)
class Row:
    """One kind of request. `prompt_tokens` pads the prompt, so that its prefill takes several steps."""

    name: str
    members: dict[str, Any] = field(default_factory=dict)
    pieces: tuple[Any, ...] = ()
    cuts: tuple[int, ...] | None = None
    prompt_tokens: int = 0
    is_seeded: bool = True

    def script(self) -> str:
        """The line of the mock script that dictates this row's answer; empty if nothing does."""
        if not self.pieces:
            return ""
        pieces = [*self.pieces, {"eos": True}]
        return json.dumps({"match": f"row {self.name} is asked", "pieces": pieces}) + "\n"

    def body(self, number: int) -> dict[str, Any]:
        """Compose the request; `number` keeps prompts and their tokens apart."""
        padding = "x" * self.prompt_tokens
        content = f"{padding} {number}: row {self.name} is asked"
        return {"model": "m", "messages": [{"role": "user", "content": content}], **self.members}


GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.9, "seed": 77}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
LONG = {"max_completion_tokens": 200, "ignore_eos": True}
SHORT = {"max_completion_tokens": 40, "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 2},
    },
    "required": ["name", "n", "tags"],
    "additionalProperties": False,
}
HELD = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.2}

ROWS = (
    Row("seeded", SEEDED | STREAM | LONG),
    Row("greedy", GREEDY | STREAM | SHORT),
    Row("unseeded", {"temperature": 1.0} | STREAM | SHORT, is_seeded=False),
    Row("stop", GREEDY | STREAM | {"stop": ["DEFGHIJ"]}, tuple(STOPPED)),
    Row("stop kept", GREEDY | STREAM | {"stop": ["HIJ"], "include_stop_str_in_output": True}, tuple(STOPPED)),
    Row("stop that ends as text", GREEDY | STREAM | {"stop": ["KLM\nNEVER"]}, tuple(STOPPED)),
    Row("emoji", GREEDY | STREAM, (EMOJI,)),
    Row("emoji, collected", GREEDY, (EMOJI,)),
    Row("penalties", SEEDED | STREAM | SHORT | PENALTIES),
    Row("logprobs", SEEDED | STREAM | SHORT | {"logprobs": True, "top_logprobs": 3}),
    Row("logprobs of a stop", GREEDY | STREAM | {"stop": ["FGH"], "logprobs": True}, tuple(STOPPED)),
    Row("min tokens", GREEDY | STREAM | {"min_tokens": 24, "max_completion_tokens": 40}, ("short",)),
    Row("max tokens", GREEDY | STREAM | {"max_completion_tokens": 9}, tuple(STOPPED)),
    Row("four choices", SEEDED | STREAM | {"max_completion_tokens": 25, "ignore_eos": True, "n": 4}),
    Row("usage as it grows", GREEDY | {"stream": True, "stream_options": {"continuous_usage_stats": True}} | SHORT),
    Row("collected", SEEDED | SHORT | {"logprobs": True}),
    Row("collected choices", SEEDED | {"max_completion_tokens": 25, "ignore_eos": True, "n": 3}),
    Row("bias", SEEDED | STREAM | SHORT | {"logit_bias": {"65": 100, "66": 100, "67": 100}}),
    Row("schema", SEEDED | STREAM | HELD | {"max_completion_tokens": 200}),
    Row("schema, collected choices", SEEDED | HELD | {"max_completion_tokens": 200, "n": 2}),
    Row("schema of a script", GREEDY | STREAM | HELD, tuple('{"name":"é","n":7,"tags":["bb"]}')),
    Row("pattern", SEEDED | STREAM | {"guided_regex": "[a-c]{4}(-[0-9]{2}){2,4}"}),
    Row("long prompt", SEEDED | STREAM | {"max_completion_tokens": 30, "ignore_eos": True}, prompt_tokens=1_500),
)  # fmt: skip


TOOLS = {
    "tools": [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            },
        }
        for name in ("weather", "time")
    ]
}  # fmt: skip
THOUGHT = "<think>\nHm, Köln?\n</think>\n\n"
HERMES = '<tool_call>\n{{"name": "{}", "arguments": {{"city": "Köln 😀"}}}}\n</tool_call>'
DIALECT_ROWS: dict[str, tuple[Row, ...]] = {
    "qwen3": (
        Row("reasoning", GREEDY | STREAM, tuple(THOUGHT + "So 🙂 it is.")),
        Row("two calls", GREEDY | STREAM | TOOLS,
            tuple(THOUGHT + "Wait.\n" + HERMES.format("weather") + "\n" + HERMES.format("time"))),
    ),
    "llama3": (
        Row("a call as JSON", GREEDY | STREAM | TOOLS, tuple('{"name": "weather", "parameters": {"city": "Köln"}}')),
    ),
}  # fmt: skip


def script() -> str:
    """The mock script of all rows."""
    every = [*ROWS, *(row for rows in DIALECT_ROWS.values() for row in rows)]
    return "".join(row.script() for row in every)


def cuts_of(row: Row, length: int, step: int = 1) -> Sequence[int]:
    """Every place at which a node may be lost: in the prefill, before each token, after the last one."""
    if row.cuts is not None:
        return row.cuts
    return (PREFILL, *range(0, length + 1, step))
