"""From a Messages body to a chat body, so that both take one way: roles, blocks, tools, thinking, the prefill. Pure.

Neighbours of one role are one turn. A turn of the user becomes tool results and text in the order of its blocks; one of the assistant,
one message. A last turn of the assistant is continued, which is what a prefill is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from superfluid_head.api.anthropic.schemas import (
    AnyBlock,
    CountRequest,
    Message,
    MessagesRequest,
    TextBlock,
    Thinking,
    Tool,
    ToolResult,
    ToolUse,
    text_of,
)
from superfluid_head.api.errors import invalid

NAMES = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "tools[].function.parameters": "tools[].input_schema",
    "tools[].function": "tools[]",
}
"""What chat's members are called here."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_members(body: CountRequest) -> dict[str, Any]:
    """Say in chat's members what the prompt depends on. Raises ApiError 400."""
    messages = _messages(body)
    members: dict[str, Any] = {"model": body.model, "messages": messages}
    if messages[-1]["role"] == "assistant":
        _judge_prefill(messages[-1])
        members["continue_final_message"] = True
    if body.tools:
        members["tools"] = [_tool(tool) for tool in body.tools]
    choice = body.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        members["tool_choice"] = _CHOICES.get(choice.type, named)
        members["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    thinking = body.thinking
    wanted = {} if thinking is None else {"enable_thinking": thinking.type != "disabled"}
    members |= body.vendor(wanted)
    if body.output_config is not None:
        members["reasoning_effort"] = body.output_config.effort
    if body.format is not None:
        shape = {"name": "output", "schema": body.format.schema_}
        members["response_format"] = {"type": "json_schema", "json_schema": shape}
    return members


def generation_members(body: MessagesRequest) -> dict[str, Any]:
    """Add what only a generation needs."""
    return {
        **chat_members(body),
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
        "stream": body.stream,
    }


def _messages(body: CountRequest) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    system = text_of(body.system)
    if system:
        made.append({"role": "system", "content": system})
    for turn in _turns(body.messages):
        blocks = [block for message in turn for block in message.blocks()]
        made += _asked(blocks) if turn[0].role == "user" else _answered(blocks)
    if not made:
        raise invalid("messages say nothing", param="messages")
    return made


def _turns(messages: Sequence[Message]) -> list[list[Message]]:
    """Join neighbours of one role."""
    turns: list[list[Message]] = []
    for message in messages:
        if turns and turns[-1][0].role == message.role:
            turns[-1].append(message)
        else:
            turns.append([message])
    return turns


def _asked(blocks: Sequence[AnyBlock]) -> list[dict[str, Any]]:
    """Say a turn of the user: results of tools and texts, as they come."""
    made: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case ToolResult():
                words = f"Error: {block.text()}" if block.is_error else block.text()
                made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": words})
            case TextBlock() if made and made[-1]["role"] == "user":
                made[-1]["content"] += "\n" + block.text
            case TextBlock():
                made.append({"role": "user", "content": block.text})
            case _:
                pass  # the other kinds are the assistant's
    return made


def _answered(blocks: Sequence[AnyBlock]) -> list[dict[str, Any]]:
    """Say a turn of the assistant; an empty one is none."""
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, Thinking)]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUse)]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message] if message["content"] or len(message) > 2 else []


def _call(block: ToolUse) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _judge_prefill(message: dict[str, Any]) -> None:
    """Only words can be continued. Raises ApiError 400."""
    if "tool_calls" in message:
        words = "the last message calls tools; their results must follow it"
        raise invalid(words, param="messages")
    if not message["content"]:
        raise invalid("the last message has thoughts and no text to continue", param="messages")


def _tool(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}
