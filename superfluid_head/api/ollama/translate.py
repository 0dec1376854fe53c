"""From Ollama's bodies to ours, so that all take one way: a chat body, or a raw completion where no template is wanted. Pure.

Results of tools name their tool here and not their call; the calls of the turn before lend them their ids, in order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from superfluid_head.api.errors import invalid
from superfluid_head.api.ollama.options import format_of, members_of
from superfluid_head.api.ollama.schemas import Asking, ChatBody, GenerateBody, Message


def chat_members(body: ChatBody) -> dict[str, Any]:
    """Say a chat in our members. Raises ApiError 400."""
    return {
        **_shared(body),
        **_thinking(body),
        "messages": _messages(body.messages),
        "tools": body.tools,
    }


def prompt_members(body: GenerateBody) -> dict[str, Any]:
    """Say a prompt as a conversation of one turn."""
    messages = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": body.prompt})
    return {**_shared(body), **_thinking(body), "messages": messages}


def raw_members(body: GenerateBody) -> dict[str, Any]:
    """Say a prompt that no template is to be around of. Raises ApiError 400."""
    if body.system:
        words = "system and raw or suffix exclude each other: there is no template to put it"
        raise invalid(words, param="system")
    if body.chat_template_kwargs is not None:
        words = "chat_template_kwargs and raw or suffix exclude each other"
        raise invalid(words, param="chat_template_kwargs")
    if body.think:
        raise invalid("think and raw or suffix exclude each other", param="think")
    members = {**_shared(body), "prompt": body.prompt, "suffix": body.suffix or None}
    if members.pop("logprobs"):
        members["logprobs"] = body.top_logprobs
    del members["top_logprobs"]
    return members


def _shared(body: Asking) -> dict[str, Any]:
    members = members_of(body.options)
    return {
        "seed": body.seed,
        **members,
        "cache_salt": body.cache_salt,
        "model": body.model,
        "stream": body.stream,
        "response_format": format_of(body.format),
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
    }


def _thinking(body: Asking) -> dict[str, Any]:
    """Say to a template whether, and how hard, to think; nothing where the body says nothing."""
    kwargs = {} if body.think is None else {"enable_thinking": bool(body.think)}
    told = {"chat_template_kwargs": body.vendor(kwargs)["chat_template_kwargs"]}
    return {**told, "reasoning_effort": body.think} if isinstance(body.think, str) else told


def _messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        said: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            said["reasoning_content"] = message.thinking
        if message.role == "tool":
            said["tool_call_id"] = message.tool_call_id or _claimed(open_calls, message.tool_name)
            said["name"] = message.tool_name
        elif message.tool_calls:
            calls = [
                (call.id or f"call_{index}_{place}", call.function)
                for place, call in enumerate(message.tool_calls)
            ]
            open_calls = [(made_id, function.name) for made_id, function in calls]
            said["tool_calls"] = [
                {
                    "id": made_id,
                    "type": "function",
                    "function": {
                        "name": function.name,
                        "arguments": json.dumps(function.arguments, ensure_ascii=False),
                    },
                }
                for made_id, function in calls
            ]
        made.append(said)
    return made


def _claimed(open_calls: list[tuple[str, str]], name: str | None) -> str:
    """Take the first call without a result, of that name if one is told."""
    for at, (made_id, called) in enumerate(open_calls):
        if name is None or called == name:
            del open_calls[at]
            return made_id
    return "call_unknown"
