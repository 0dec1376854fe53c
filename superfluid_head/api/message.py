"""An assistant's message in the API's shape, whole and in deltas, made from the same deltas of a channel.

Owns the ids of calls, which are the model's where its format has some, and the names of the reasoning member. A call's id,
name and type are told exactly once (http_api S7).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import string
import sys
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from superfluid_head.text.delta import CallPart, Delta

ID_CHARS = string.ascii_letters + string.digits
REASONING_FIELDS = ("reasoning_content", "both")


def new_call_id(chars: int) -> str:
    """Make an id; `chars` is the length that a model's template prescribes, 0 for none."""
    if chars:
        return "".join(secrets.choice(ID_CHARS) for _ in range(chars))
    return "call_" + secrets.token_hex(12)


def read_arguments(text: str) -> Any:
    """Read what a call was given, for dialects that tell it as a value. Raises ValueError for JSON that broke off.

    A number that overflows becomes the largest there is: it would be none in JSON.
    """
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("the arguments are nested too deeply") from None


def arguments_so_far(text: str) -> dict[str, Any]:
    """Read an object of which the end may be missing, as Anthropic's client reads the same stream: a text that broke off is left out."""
    with contextlib.suppress(ValueError):
        value = read_arguments(text)
        return value if isinstance(value, dict) else {}
    with contextlib.suppress(ValueError):
        value = read_arguments(json.dumps(from_json(text, allow_partial=True)))
        return value if isinstance(value, dict) else {}
    return {}


def _finite(text: str) -> float:
    return max(-sys.float_info.max, min(float(text), sys.float_info.max))


@dataclass(frozen=True, slots=True)
class Wording:
    """How messages are put: whether reasoning is told, under which names, and how long call ids are."""

    has_reasoning: bool = True
    is_reasoning_doubled: bool = False
    id_chars: int = 0
    is_legacy: bool = False
    """Whether a call is told as `function_call`."""

    def finish(self, finish: str) -> str:
        return "function_call" if self.is_legacy and finish == "tool_calls" else finish

    def reasoning(self, text: str) -> dict[str, Any]:
        if not text or not self.has_reasoning:
            return {}
        members = {"reasoning_content": text}
        return {**members, "reasoning": text} if self.is_reasoning_doubled else members

    def delta(self, delta: Delta) -> dict[str, Any]:
        """Return the members of a chunk's delta; none for what is not told."""
        if delta.call is not None and self.is_legacy:
            name = {} if delta.call.name is None else {"name": delta.call.name}
            return {"function_call": {**name, "arguments": delta.call.arguments}}
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
            told = self.wording.delta(delta)
            if self.wording.is_legacy:
                self.calls.append({"function": told["function_call"]})
            else:
                (made,) = told["tool_calls"]
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
        if self.calls and self.wording.is_legacy:
            message["function_call"] = self.calls[0]["function"]
        elif self.calls:
            message["tool_calls"] = self.calls
        return message
