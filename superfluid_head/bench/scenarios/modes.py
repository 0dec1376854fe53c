"""The kinds of requests that must survive a move: one line each, mixed over the streams of a scenario.

Owns the bodies and what makes two answers equal: everything of every choice, and the usage. Kinds that a server refuses (an
older head without tools, say) are found by asking once and are left out by name, so that the mix is always said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from superfluid_head.bench.load import Answer, chat_body
from superfluid_head.bench.prose import prose

PREFILL = "prefill"
"""What the assistant has said already; no member of a body."""
DIALECT = ("--tool-call-parser", "hermes", "--reasoning-parser", "think")
"""Flags of a head that make every model one that can call and reason."""

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 77},
    "tools": {
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "look",
                    "parameters": {
                        "type": "object",
                        "properties": {"place": {"type": "string"}},
                        "required": ["place"],
                    },
                },
            }
        ],
        "tool_choice": "required",
        "ignore_eos": False,
    },
    "reasoning": {PREFILL: "<think>", "continue_final_message": True, "temperature": 0.8},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "answer",
                "schema": {
                    "type": "object",
                    "properties": {"words": {"type": "array", "items": {"type": "string"}}},
                    "required": ["words"],
                },
            },
        },
        "ignore_eos": False,
    },
    "two choices": {"n": 2, "temperature": 0.8, "seed": 5},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.4, "temperature": 0.7},
    "stop": {"stop": ["lantern harbour river"], "min_tokens": 4},
}


def body_of(model: str, mode: str, number: int, tokens: int) -> dict[str, Any]:
    """Compose the `number`-th stream in that mode; no two prompts are alike."""
    text = "Tell a story. " + prose(number, 30)
    members = {"ignore_eos": True, **MODES[mode]}
    said = members.pop(PREFILL, None)
    body = chat_body(model, text, tokens, **members)
    if said is not None:
        body["messages"] = [*body["messages"], {"role": "assistant", "content": said}]
    return body


def bodies_of(
    model: str, streams: int, tokens: int, modes: Sequence[str], seed: int
) -> list[dict[str, Any]]:
    """Mix the modes over the streams in turn."""
    return [body_of(model, modes[n % len(modes)], 1000 * seed + n, tokens) for n in range(streams)]


def comparable(answer: Answer) -> tuple[Any, ...]:
    """Everything of an answer that a move may not change."""
    said = sorted(answer.choices.items())
    return answer.usage, [
        (index, each.text, each.reasoning, each.logprobs, each.calls, each.finish_reason)
        for index, each in said
    ]
