"""An answer as blocks: what is streamed, and the message that the same events add up to. Pure.

Owns the order of the events (http_api.md 8): one block at a time, indexes from 0 without gaps, a thinking block signed at its end. The
whole message is folded from the very events that a stream would send, so the two modes cannot disagree.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

from superfluid_head.api.choices import Ended
from superfluid_head.api.message import arguments_so_far, new_call_id
from superfluid_head.text.delta import CallPart, Delta

Event = dict[str, Any]

STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
SIGNATURE_CHARS = 64


class Blocks:
    """The blocks of one answer. `take` and `end` return the events to send and fold them into `content`."""

    def __init__(self, id_chars: int = 0) -> None:
        self.content: list[dict[str, Any]] = []
        self._id_chars = id_chars
        self._open: str | None = None
        self._order = -1
        self._parts: list[str] = []

    def take(self, delta: Delta) -> list[Event]:
        if delta.call is not None:
            return self._call(delta.call)
        if delta.reasoning:
            events = self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return [*events, self._add("thinking_delta", "thinking", delta.reasoning)]
        if delta.text:
            events = self._enter("text", {"type": "text", "text": ""})
            return [*events, self._add("text_delta", "text", delta.text)]
        return []

    def end(self) -> list[Event]:
        """Close the block that is open."""
        kind, self._open = self._open, None
        if kind is None:
            return []
        block, said = self.content[-1], "".join(self._parts)
        self._parts.clear()
        events: list[Event] = []
        match kind:
            case "thinking":
                block["thinking"] = said
                block["signature"] = _signature(said)
                delta = {"type": "signature_delta", "signature": block["signature"]}
                events.append(self._delta(delta))
            case "text":
                block["text"] = said
            case _:
                block["input"] = arguments_so_far(said)
        return [*events, {"type": "content_block_stop", "index": len(self.content) - 1}]

    def _call(self, part: CallPart) -> list[Event]:
        events: list[Event] = []
        if part.name is not None:
            events += self.end()
            self._order = part.order
            made = part.id or (new_call_id(self._id_chars) if self._id_chars else _tool_id())
            block = {"type": "tool_use", "id": made, "name": part.name, "input": {}}
            events += self._enter("tool_use", block)
        if part.arguments:
            events.append(self._add("input_json_delta", "partial_json", part.arguments))
        return events

    def _enter(self, kind: str, block: dict[str, Any]) -> list[Event]:
        if self._open == kind:
            return []
        events = self.end()
        self._open = kind
        self.content.append(block)
        start = {"type": "content_block_start", "index": len(self.content) - 1}
        return [*events, {**start, "content_block": dict(block)}]

    def _add(self, kind: str, member: str, words: str) -> Event:
        self._parts.append(words)
        return self._delta({"type": kind, member: words})

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


def stop_of(end: Ended, budget: int) -> dict[str, Any]:
    """Say why an answer ended. `budget` is what it might have had: one cut earlier met the end of a window."""
    reason, matched = STOPS.get(end.finish, "end_turn"), None
    if end.finish == "stop" and isinstance(end.stop_reason, str):
        reason, matched = "stop_sequence", end.stop_reason
    if end.finish == "length" and end.count < budget:
        reason = "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": matched}


def _signature(thoughts: str) -> str:
    """Mark thoughts as whole; it is no secret's, for nothing here trusts it."""
    return hashlib.sha256(thoughts.encode()).hexdigest()[:SIGNATURE_CHARS]


def _tool_id() -> str:
    return "toolu_" + secrets.token_hex(12)
