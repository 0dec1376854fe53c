"""From a Responses body to a chat body, so that both take one way: items, instructions, flat tools and formats. Pure.

What the assistant said, thought and called between two turns of others is one message of chat, as chat itself would have returned it.
"""

from __future__ import annotations

from typing import Any

from superfluid_head.api.errors import invalid
from superfluid_head.api.responses.schemas import (
    AllowedTools,
    AnyItem,
    CallItem,
    Format,
    MessageItem,
    NamedTool,
    OutputItem,
    ReasoningItem,
    ResponsesRequest,
    Tool,
    plain,
)

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tools[].function": "tools[]",
    "tool_choice.function.name": "tool_choice.name",
    "tool_choice.allowed_tools.tools": "tool_choice.tools",
}
"""What chat's members are called here."""


def chat_members(body: ResponsesRequest) -> dict[str, Any]:
    """Say the body in chat's members. Raises ApiError 400."""
    members: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body),
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "reasoning_effort": body.reasoning.effort,
        "parallel_tool_calls": body.parallel_tool_calls,
        "stream": body.stream,
        "logprobs": body.has_logprobs,
        "top_logprobs": body.top_logprobs,
        **body.vendor(),
    }
    if body.tools:
        members["tools"] = [_tool(tool) for tool in body.tools]
    if body.tools or body.tool_choice != "auto":
        members["tool_choice"] = _choice(body.tool_choice)
    if body.text.format is not None:
        members["response_format"] = _format(body.text.format)
    return members


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    if body.instructions:
        made.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*made, {"role": "user", "content": body.input}]
    for item in body.input:
        _add(made, item)
    if not made:
        raise invalid("input says nothing", param="input")
    return made


def _add(made: list[dict[str, Any]], item: AnyItem) -> None:
    match item:
        case MessageItem() if item.role == "assistant":
            _join(_turn(made), "content", plain(item.content))
        case MessageItem():
            made.append({"role": item.role, "content": plain(item.content)})
        case CallItem():
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            _turn(made).setdefault("tool_calls", []).append(call)
        case OutputItem():
            words = plain(item.output)
            made.append({"role": "tool", "tool_call_id": item.call_id, "content": words})
        case ReasoningItem():
            if item.text():
                _join(_turn(made), "reasoning_content", item.text())


def _turn(made: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message that is under way, or begin one."""
    if not made or made[-1]["role"] != "assistant":
        made.append({"role": "assistant", "content": ""})
    return made[-1]


def _join(message: dict[str, Any], member: str, words: str) -> None:
    said = message.get(member)
    message[member] = f"{said}\n{words}" if said else words


def _tool(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _choice(choice: str | NamedTool | AllowedTools) -> Any:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, NamedTool):
        return {"type": "function", "function": {"name": choice.name}}
    names = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": names}}


def _format(given: Format) -> dict[str, Any]:
    if given.type != "json_schema":
        return {"type": given.type}
    shape = {"name": given.name, "strict": given.strict}
    if given.schema_ is not None:
        shape["schema"] = given.schema_
    return {"type": "json_schema", "json_schema": shape}
