"""`functions` and `function_call`, which chat had before it had tools: put into tools on the way in, told in their old shape on the way out.

Owns the names on both sides. One call at most, as it was then. What an earlier turn called and what that gave are tool messages to
the template, which knows no other; their ids are ours, for the old ones had none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from superfluid_head.api.errors import ApiError, invalid
from superfluid_head.api.schemas.chat import ChatMessage, ChatRequest, ToolCall
from superfluid_head.api.schemas.tools import FunctionName, NamedTool, ToolSpec

NAMES = {
    "tools[].function": "functions[]",
    "tools": "functions",
    "tool_choice.function.name": "function_call.name",
    "tool_choice": "function_call",
}
"""The members of tools by their old names, for refusals."""


def modern(body: ChatRequest) -> ChatRequest:
    """Return what the body asks for in terms of tools. Raises ApiError 400."""
    changed: dict[str, Any] = {}
    messages = modern_messages(body.messages)
    if messages is not body.messages:
        changed["messages"] = messages
    if body.functions:
        if body.tools or body.tool_choice is not None:
            raise invalid("functions and tools exclude each other", param="functions")
        changed |= {"tools": _tools(body), "tool_choice": _choice(body)}
        changed["parallel_tool_calls"] = False
    elif body.function_call not in (None, "none", "auto"):
        raise invalid("function_call needs functions", param="function_call")
    return body.model_copy(update=changed) if changed else body


def _tools(body: ChatRequest) -> list[ToolSpec]:
    return [
        ToolSpec.model_construct(
            type="function", function=each, given={"type": "function", "function": each.given}
        )
        for each in body.functions or ()
    ]


def _choice(body: ChatRequest) -> str | NamedTool | None:
    wanted = body.function_call
    if wanted is None or isinstance(wanted, str):
        return wanted
    return NamedTool(type="function", function=FunctionName(name=wanted.name))


def modern_messages(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with calls and results as tools have them. Raises ApiError 400."""
    if any(message.role == "function" or message.function_call for message in messages):
        return list(_modern(messages))
    return messages


def _modern(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    made = "call_0"
    for number, message in enumerate(messages):
        if message.function_call is not None:
            if message.tool_calls:
                raise _both(number)
            made = f"call_{number}"
            call = ToolCall(id=made, function=message.function_call)
            yield message.model_copy(update={"tool_calls": [call]})
        elif message.role == "function":
            yield message.model_copy(update={"role": "tool", "tool_call_id": made})
        else:
            yield message


def _both(number: int) -> ApiError:
    words = "function_call and tool_calls exclude each other"
    return invalid(words, param=f"messages[{number}].function_call")
