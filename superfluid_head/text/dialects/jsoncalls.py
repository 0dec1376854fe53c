"""Formats that write a call as `{"name": ..., "arguments": {...}}`: Hermes and Qwen, Llama 3, Granite, Mistral up to v10.

One reader for all of them, which takes single objects and lists alike; they differ in the markup around. Mistral's later
form, `[TOOL_CALLS]name[ARGS]{...}`, shares the opening marker and is read here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from superfluid_head.text.dialects.events import Tool, Voice
from superfluid_head.text.dialects.formats import NAME_MAX, call_object, envelopes, object_schema
from superfluid_head.text.dialects.jsontext import Envelope
from superfluid_head.text.dialects.shape import (
    JsonValue,
    Literal,
    Marker,
    OneOf,
    Repeat,
    Row,
    Shape,
)
from superfluid_head.text.dialects.tape import Steps


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Objects in a list, or one after the other, between an opening and an optional closing."""

    openings: tuple[str, ...] = ()
    closing: str = ""
    at_start: tuple[str, ...] = ()
    key: str = "arguments"
    is_list: bool = False
    gap: str = "\n"
    id_chars: int = 0

    @property
    def markers(self) -> tuple[str, ...]:
        found = (*self.openings, *self.at_start, self.closing)
        return tuple(marker for marker in found if len(marker) > 1)

    def read(self, opening: str, voice: Voice) -> Steps[None]:
        tape = voice.tape
        if opening != "{":
            yield from tape.space()
            opening = yield from tape.expect("{", "[")
        if opening == "[":
            yield from self._list(voice)
        else:
            yield from self._row(voice)
        yield from tape.space()
        if self.closing:
            yield from tape.starts(self.closing)

    def _list(self, voice: Voice) -> Steps[None]:
        tape = voice.tape
        while True:
            yield from tape.space()
            yield from tape.expect("{")
            yield from Envelope(voice).read()
            yield from tape.space()
            if (yield from tape.expect(",", "]")) == "]":
                return

    def _row(self, voice: Voice) -> Steps[None]:
        tape = voice.tape
        while True:
            yield from Envelope(voice).read()
            yield from tape.space()
            if (yield from tape.starts(";")) is not None:
                yield from tape.space()
            if (yield from tape.starts("{")) is None:
                return

    def shape(self, tools: Sequence[Tool], most: int | None) -> Shape:
        one = envelopes(tools, self.key)
        if not self.openings:
            return Repeat(one, Literal("; "), 1, most)
        opening = Marker(self.openings[0])
        if self.is_list:
            calls = Repeat(one, Literal(", "), 1, most)
            return Row((opening, Literal("["), calls, Literal("]")))
        closing = Marker(self.closing)
        block = Row((opening, Literal(self.gap), one, Literal(self.gap), closing))
        return Repeat(block, Literal("\n"), 1, most)


MISTRAL_OPENING = "[TOOL_CALLS]"
_LIST = JsonCalls((MISTRAL_OPENING,), is_list=True, id_chars=9)


@dataclass(frozen=True, slots=True)
class Mistral:
    """Both of Mistral's forms; `is_list` says which one a grammar asks for."""

    is_list: bool
    openings: tuple[str, ...] = (MISTRAL_OPENING,)
    at_start: tuple[str, ...] = ()
    markers: tuple[str, ...] = (MISTRAL_OPENING, "[ARGS]", "[CALL_ID]")
    id_chars: int = 9

    def read(self, opening: str, voice: Voice) -> Steps[None]:
        tape = voice.tape
        yield from tape.space()
        if (yield from tape.peek()) in ("[", "{"):
            yield from _LIST.read(opening, voice)
            return
        name, marker = yield from tape.until(("[ARGS]", "[CALL_ID]"), NAME_MAX)
        call_id: str | None = None
        if marker == "[CALL_ID]":
            call_id, _ = yield from tape.until(("[ARGS]",), NAME_MAX)
        yield from tape.space()
        last = yield from call_object(voice, name.strip(), call_id and call_id.strip())
        voice.write(last)
        voice.end()

    def shape(self, tools: Sequence[Tool], most: int | None) -> Shape:
        if self.is_list:
            return _LIST.shape(tools, most)
        calls = tuple(
            Row(
                (
                    Marker(MISTRAL_OPENING),
                    Literal(tool.name),
                    Marker("[ARGS]"),
                    JsonValue(object_schema(tool)),
                )
            )
            for tool in tools
        )
        return Repeat(OneOf(calls), Literal(""), 1, most)


@dataclass(frozen=True, slots=True)
class Section:
    """DeepSeek's and Kimi's sections: calls between begin and end markers, a name and an object each."""

    opening: str
    closing: str
    begin: str
    separator: str
    end: str
    kind: str = ""
    fence: tuple[str, str] = ("", "")
    prefix: str = ""
    id_chars: int = 0

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.opening,)

    @property
    def at_start(self) -> tuple[str, ...]:
        return ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, self.closing, self.begin, self.separator, self.end)

    def read(self, opening: str, voice: Voice) -> Steps[None]:
        del opening
        tape = voice.tape
        yield from tape.space()
        found: str | None = yield from tape.expect(self.begin)
        while found == self.begin:
            yield from self._call(voice)
            yield from tape.space()
            found = yield from tape.starts(self.begin, self.closing)

    def _call(self, voice: Voice) -> Steps[None]:
        tape = voice.tape
        name, _ = yield from tape.until((self.separator,), NAME_MAX)
        if self.kind:
            name, _ = yield from tape.until(("\n",), NAME_MAX)
        name = name.strip()
        call_id = name if self.prefix else None
        if self.prefix:
            name = name.removeprefix(self.prefix).rpartition(":")[0] or name
        yield from tape.space()
        if self.fence[0]:
            yield from tape.expect(self.fence[0])
            yield from tape.space()
        last = yield from call_object(voice, name, call_id)
        yield from tape.space()
        if self.fence[1]:
            yield from tape.expect(self.fence[1])
            yield from tape.space()
        yield from tape.expect(self.end)
        voice.write(last)
        voice.end()

    def shape(self, tools: Sequence[Tool], most: int | None) -> Shape:
        calls = OneOf(tuple(self._shape(tool) for tool in tools))
        repeated = Repeat(calls, Literal("\n" if self.kind else ""), 1, most)
        return Row((Marker(self.opening), repeated, Marker(self.closing)))

    def _shape(self, tool: Tool) -> Shape:
        name: tuple[Shape, ...] = (Literal(tool.name), Marker(self.separator))
        if self.kind:
            name = (Literal(self.kind), Marker(self.separator), Literal(tool.name + "\n"))
        if self.prefix:
            ids = JsonValue({"type": "integer", "minimum": 0, "maximum": 999})
            name = (Literal(self.prefix + tool.name + ":"), ids, Marker(self.separator))
        head = (Literal(self.fence[0] + "\n"),) if self.fence[0] else ()
        tail = (Literal("\n" + self.fence[1]),) if self.fence[1] else ()
        value = JsonValue(object_schema(tool))
        return Row((Marker(self.begin), *name, *head, value, *tail, Marker(self.end)))
