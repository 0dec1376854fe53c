"""An assistant's message in the API's shape, whole and in deltas, made from the same deltas of a channel.

Owns the ids of calls, which are the model's where its format has some, and the names of the reasoning member. A call's id,
name and type are told exactly once (http_api S7).
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from typing import Any

from superfluid_head.text.delta import CallPart, Delta

ID_CHARS = string.ascii_letters + string.digits
REASONING_FIELDS = ("reasoning_content", "both")


def new_call_id(chars: int) -> str:
    """Make an id; `chars` is the length that a model's template prescribes, 0 for none."""
    if chars:
        return "".join(secrets.choice(ID_CHARS) for _ in range(chars))
    return "call_" + secrets.token_hex(12)


@dataclass(frozen=True, slots=True)
class Wording:
    """How messages are put: whether reasoning is told, under which names, and how long call ids are."""

    has_reasoning: bool = True
    is_reasoning_doubled: bool = False
    id_chars: int = 0

    def reasoning(self, text: str) -> dict[str, Any]:
        if not text or not self.has_reasoning:
            return {}
        members = {"reasoning_content": text}
        return {**members, "reasoning": text} if self.is_reasoning_doubled else members

    def delta(self, delta: Delta) -> dict[str, Any]:
        """Return the members of a chunk's delta; none for what is not told."""
        if delta.call is not None:
            return {"tool_calls": [self._call(delta.call)]}
        if delta.reasoning:
            return self.reasoning(delta.reasoning)
        return {"content": delta.text} if delta.text else {}

    def _call(self, part: CallPart) -> dict[str, Any]:
        if part.name is None:
            return {"index": part.order, "function": {"arguments": part.arguments}}
        return {
            "index": part.order,
            "id": part.id or new_call_id(self.id_chars),
            "type": "function",
            "function": {"name": part.name, "arguments": part.arguments},
        }


@dataclass(slots=True)
class MessageBuilder:
    """A whole message of one choice, put together from its deltas."""

    wording: Wording
    content: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """Take a delta; a call's first one has its name."""
        self.content.append(delta.text)
        self.thoughts.append(delta.reasoning)
        part = delta.call
        if part is None:
            return
        if part.name is not None:
            made = self.wording.delta(delta)["tool_calls"][0]
            del made["index"]
            self.calls.append(made)
            self.arguments.append([])
        self.arguments[part.order].append(part.arguments)

    def message(self) -> dict[str, Any]:
        """Return the message. Its content is null only beside calls."""
        content = "".join(self.content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= self.wording.reasoning("".join(self.thoughts))
        for call, arguments in zip(self.calls, self.arguments, strict=True):
            call["function"]["arguments"] = "".join(arguments)
        if self.calls:
            message["content"] = content or None
            message["tool_calls"] = self.calls
        return message
