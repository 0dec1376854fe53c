"""From a validated chat body to what the model's template gets to see."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from superfluid_head.api.body import FEW_MAX, LARGE_BYTES_MIN, count_values
from superfluid_head.api.errors import invalid
from superfluid_head.api.schemas.chat import ChatMessage, ChatRequest
from superfluid_head.text.chat import Conversation
from superfluid_head.text.pace import Pace


def conversation(body: ChatRequest) -> Conversation:
    """Collect what the template gets to see. With `tool_choice` none the tools are not shown."""
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    wanted = body.add_generation_prompt
    return Conversation(
        messages=[message_dict(message) for message in body.messages],
        tools=None
        if body.tool_choice == "none"
        else shown_tools(tool.given for tool in body.tools or ()),
        add_generation_prompt=not body.continue_final_message if wanted is None else wanted,
        continue_final_message=body.continue_final_message,
        kwargs=kwargs,
    )


def shown_tools(tools: Iterable[Any]) -> list[dict[str, Any]] | None:
    """Return tools as templates get to see them: as they were sent, null members left out; None for none."""
    shown = [_without_nulls(tool) for tool in tools if isinstance(tool, dict)]
    for tool in shown:
        if isinstance(tool.get("function"), dict):
            tool["function"] = _without_nulls(tool["function"])
    return shown or None


def _without_nulls(members: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}


def message_dict(message: ChatMessage) -> dict[str, Any]:
    """Return a message in the form that templates of the hub expect."""
    made: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text() or "",
    }
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.thoughts:
        made["reasoning_content"] = message.thoughts
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return made


def has_large_calls(body: ChatRequest) -> bool:
    """Whether `conversation` has so much to parse that it is work for a thread."""
    return any(
        len(call.function.arguments) >= LARGE_BYTES_MIN
        for message in body.messages
        for call in message.tool_calls or ()
    )


def _arguments(text: str) -> Any:
    """Templates index into arguments: an object when it is one, else the raw string. Raises ApiError 400 for too many values."""
    if len(text) >= LARGE_BYTES_MIN and count_values(text.encode(), Pace())[0] > FEW_MAX:
        raise invalid("the arguments of a call hold too many values", param="messages")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
