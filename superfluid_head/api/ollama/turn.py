"""An answer as lines: what of it is told when, and the whole that the same lines add up to. Pure.

Text and thoughts go out as they come; a call goes out whole, for its arguments are an object. One that was cut off is none.
"""

from __future__ import annotations

from typing import Any

from superfluid_head.api.message import new_call_id, read_arguments
from superfluid_head.text.delta import CallPart, Delta


class Turn:
    """The answer under way. `take` and `end` return the messages to tell and fold them into `whole`."""

    def __init__(self, id_chars: int = 0) -> None:
        self.whole: dict[str, Any] = {"role": "assistant", "content": ""}
        self._id_chars = id_chars
        self._call: CallPart | None = None
        self._arguments: list[str] = []
        self._calls = 0

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        part = delta.call
        if part is not None and part.name is None:
            self._arguments.append(part.arguments)
            return []
        told = self.end()
        if part is not None:
            self._call = part
            self._arguments = [part.arguments]
        elif delta.reasoning:
            told.append(self._say(thinking=delta.reasoning))
        elif delta.text:
            told.append(self._say(content=delta.text))
        return told

    def end(self) -> list[dict[str, Any]]:
        """Tell the call that is whole now, if one was under way."""
        part, self._call = self._call, None
        if part is None:
            return []
        try:
            arguments = read_arguments("".join(self._arguments))
        except ValueError:
            return []
        function = {"index": self._calls, "name": part.name, "arguments": arguments}
        self._calls += 1
        call = {"id": part.id or new_call_id(self._id_chars), "function": function}
        return [self._say(tool_calls=[call])]

    def _say(self, **members: Any) -> dict[str, Any]:
        for name, value in members.items():
            self.whole[name] = self.whole[name] + value if name in self.whole else value
        return {"role": "assistant", "content": "", **members}
