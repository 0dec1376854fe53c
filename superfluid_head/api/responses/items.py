"""An answer as items: what is streamed, and the output that the same events add up to. Pure.

Owns the order of the events (http_api.md 7) and the ids: those of the events are those of the final response. An item that is done
is, word for word, the one in the final output; the whole reply of a request that is not streamed is folded the same way.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from superfluid_head.api.message import new_call_id
from superfluid_head.text.delta import CallPart, Delta

Event = dict[str, Any]
Entries = Callable[[Delta], list[dict[str, Any]]]

_MESSAGE, _CALL, _THOUGHT = "message", "function_call", "reasoning"
_PREFIXES = {_MESSAGE: "msg_", _CALL: "fc_", _THOUGHT: "rs_"}


class Items:
    """The items of one answer. `take` and `end` return the events to send (their numbers come later) and fold them into `output`.

    `entries` makes the log-probabilities of a delta, none where nobody asked.
    """

    def __init__(self, id_chars: int, entries: Entries) -> None:
        self.output: list[dict[str, Any]] = []
        self._id_chars = id_chars
        self._entries = entries
        self._open: str | None = None
        self._parts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def take(self, delta: Delta) -> list[Event]:
        if delta.call is not None:
            return self._call(delta.call)
        if delta.reasoning:
            events = self._enter(_THOUGHT, {"summary": [], "content": []})
            return [*events, self._said("response.reasoning_text.delta", delta.reasoning)]
        if not delta.text and not (delta.tokens and self._open == _MESSAGE):
            return []
        events = self._message()
        entries = self._entries(delta)
        self._logprobs += entries
        if delta.text:
            told = self._said("response.output_text.delta", delta.text)
            events.append({**told, "logprobs": entries})
        return events

    def end(self, *, is_whole: bool) -> list[Event]:
        """End the answer; one that said nothing at all is an empty message, unless it was cut off."""
        events = self._message() if is_whole and not self.output else []
        return events + self._done("completed" if is_whole else "incomplete")

    def _message(self) -> list[Event]:
        events = self._enter(_MESSAGE, {"role": "assistant", "content": []})
        if events:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events.append(self._event("response.content_part.added", content_index=0, part=part))
        return events

    def _call(self, part: CallPart) -> list[Event]:
        events: list[Event] = []
        if part.name is not None:
            events += self._done("completed")
            made = part.id or new_call_id(self._id_chars)
            events += self._enter(_CALL, {"call_id": made, "name": part.name, "arguments": ""})
        if part.arguments:
            self._parts.append(part.arguments)
            kind = "response.function_call_arguments.delta"
            events.append(self._event(kind, delta=part.arguments))
        return events

    def _enter(self, kind: str, members: dict[str, Any]) -> list[Event]:
        if self._open == kind:
            return []
        events = self._done("completed")
        self._open = kind
        made = _PREFIXES[kind] + secrets.token_hex(12)
        item = {"id": made, "type": kind, "status": "in_progress", **members}
        self.output.append(item)
        index = len(self.output) - 1
        added = {"type": "response.output_item.added", "output_index": index, "item": item.copy()}
        return [*events, added]

    def _said(self, kind: str, words: str) -> Event:
        self._parts.append(words)
        return self._event(kind, content_index=0, delta=words)

    def _done(self, status: str) -> list[Event]:
        """Close the item that is open."""
        kind, self._open = self._open, None
        if kind is None:
            return []
        item, said = self.output[-1], "".join(self._parts)
        self._parts.clear()
        item["status"] = status
        if kind == _CALL:
            item["arguments"] = said
            name = "response.function_call_arguments.done"
            events = [self._event(name, name=item["name"], arguments=said)]
        elif kind == _THOUGHT:
            item["content"] = [{"type": "reasoning_text", "text": said}]
            events = [self._event("response.reasoning_text.done", content_index=0, text=said)]
        else:
            events = self._message_done(item, said)
        index = len(self.output) - 1
        done = {"type": "response.output_item.done", "output_index": index, "item": item.copy()}
        return [*events, done]

    def _message_done(self, item: dict[str, Any], said: str) -> list[Event]:
        logprobs, self._logprobs = self._logprobs, []
        part = {"type": "output_text", "text": said, "annotations": [], "logprobs": logprobs}
        item["content"] = [part]
        kind = "response.output_text.done"
        return [
            self._event(kind, content_index=0, text=said, logprobs=logprobs),
            self._event("response.content_part.done", content_index=0, part=part),
        ]

    def _event(self, kind: str, **members: Any) -> Event:
        index = len(self.output) - 1
        return {"type": kind, "item_id": self.output[-1]["id"], "output_index": index, **members}
