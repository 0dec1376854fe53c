"""Calls that are required, from an engine that draws noise and has only its grammar to go by (O-07 c): whatever the dialect,
what comes out is a call of the offered functions with arguments that fit, and nothing beside it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from superfluid_head.text.dialects.detect import DialectChoice
from tests.cases.fleet import asking
from tests.cases.talk import Message, add, whole_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"on": {"type": "boolean"}, "mode": {"enum": ["a", "b c", 3]}},
                "required": ["on", "mode"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("f", "g")
]
NAMED = {"type": "function", "function": {"name": "g"}}
MEMBERS: dict[str, Any] = {
    "tools": TOOLS, "parallel_tool_calls": False, "temperature": 1, "max_tokens": 600,
}  # fmt: skip


def judge(message: Message, names: set[str]) -> None:
    (call,) = message.calls
    assert call["function"]["name"] in names
    value = json.loads(call["function"]["arguments"])
    assert set(value) == {"on", "mode"}
    assert type(value["on"]) is bool
    assert value["mode"] in ("a", "b c", 3)
    assert message.content.strip() == ""
    assert message.finish == "tool_calls"


def streamed(text: str) -> Message:
    message = Message()
    for line in text.split("\n"):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                add(message, choice)
    return message


@pytest.mark.slow
@pytest.mark.parametrize(
    "dialect", ["hermes", "qwen3_coder", "llama4", "mistral_v11", "deepseek_v3", "glm", "gemma4"]
)
def test_o07_noise_under_a_required_call_is_a_call(dialect: str) -> None:
    async def run() -> None:
        choice = DialectChoice(dialect, reasoning="none")  # noise would never end a thought
        async with asking(head={"dialects": choice}) as asked:
            for seed, wanted in enumerate(("required", NAMED)):
                names = {"g"} if wanted is NAMED else {"f", "g"}
                members = {**MEMBERS, "tool_choice": wanted, "seed": seed}
                whole = await asked.chat(**members)
                assert whole.status_code == 200, whole.text
                (answer,) = whole.json()["choices"]
                judge(whole_of(answer), names)
                stream = await asked.chat(**members, stream=True)
                assert streamed(stream.text).bare() == whole_of(answer).bare()

    asyncio.run(run())
