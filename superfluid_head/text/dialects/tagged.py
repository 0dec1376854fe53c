"""Formats that write each argument between tags: Qwen3-Coder, GLM, MiniMax, DeepSeek's DSML.

A value is raw text; the tool's schema says what it means (http_api C5). Texts stream as JSON strings while they arrive, all
else is converted when its tag closes: JSON where the schema allows it, else text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from superfluid_head.text.dialects.events import Tool, Voice
from superfluid_head.text.dialects.formats import NAME_MAX, object_schema
from superfluid_head.text.dialects.jsontext import strict_json
from superfluid_head.text.dialects.relaxed import to_json
from superfluid_head.text.dialects.shape import (
    NOTHING,
    Free,
    JsonValue,
    Literal,
    Marker,
    OneOf,
    Repeat,
    Row,
    Shape,
    optional,
)
from superfluid_head.text.dialects.tape import MalformedError, Steps

TEXT = frozenset(("string",))
_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"),
)  # fmt: skip


def types_of(schema: Any) -> frozenset[str]:
    """Collect the JSON types that a schema allows; none when it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset((declared,))
    if isinstance(declared, list):
        return frozenset(item for item in declared if isinstance(item, str))
    for key in ("enum", "anyOf", "oneOf"):
        values = schema.get(key)
        if isinstance(values, list) and values:
            kinds = [frozenset((_type(v),)) if key == "enum" else types_of(v) for v in values]
            return frozenset().union(*kinds) if all(kinds) else frozenset()
    return frozenset((_type(schema["const"]),)) if "const" in schema else frozenset()


def _type(value: Any) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "null")


def property_types(tool: Tool, key: str) -> frozenset[str]:
    """Collect what a tool's schema allows for one argument."""
    properties = tool.parameters.get("properties")
    return types_of(properties.get(key)) if isinstance(properties, Mapping) else frozenset()


def convert(text: str, types: frozenset[str]) -> str:
    """Return a whole value as JSON: what it spells if the schema may have that, else the text itself."""
    bare = text.strip()
    for read in (strict_json, to_json):
        try:
            made = read(bare)
        except MalformedError:
            continue
        kind = _type(json.loads(made))
        if not types or kind in types or (kind == "integer" and "number" in types):
            return made
    return json.dumps(text, ensure_ascii=False)


class _Text:
    """Writes a raw text as a JSON string; one line break at either end may be part of the tags."""

    def __init__(self, voice: Voice, *, strips: bool) -> None:
        self._voice = voice
        self._strips = strips
        self._is_first = strips
        self._held = ""

    def take(self, _start: int, text: str) -> None:
        if self._is_first:
            self._is_first = False
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if self._strips and text.endswith("\n") else ""
        if self._held:
            text = text[:-1]
        self._voice.write(json.dumps(text, ensure_ascii=False)[1:-1])

    def break_off(self) -> None:
        """Deliver what was held: no tag came."""
        self._voice.write(json.dumps(self._held)[1:-1])


def tagged_value(
    voice: Voice, close: str, types: frozenset[str], *, strips: bool, lead: str
) -> Steps[None]:
    """Read a value up to its closing tag and write it behind `lead`."""
    if types == TEXT:
        voice.write(lead + '"')
        words = _Text(voice, strips=strips)
        if (yield from voice.tape.flow((close,), words.take)) is None:
            words.break_off()
            raise MalformedError
        voice.write('"')
        return
    text, _ = yield from voice.tape.until((close,))
    if strips:
        text = text.removeprefix("\n").removesuffix("\n")
    voice.write(lead + convert(text, types))


@dataclass(frozen=True, slots=True)
class Tagged:
    """Calls and parameters with their names in the opening tags."""

    blocks: tuple[str, ...]
    block_close: str
    call: tuple[str, str, str]
    """What stands before a call's name, behind it, and at its end."""
    parameter: tuple[str, str, str]
    strips: bool = False
    is_block_optional: bool = False
    typed: str = ""
    """Separates a parameter's name from the word that says whether it is text."""
    id_chars: int = 0

    @property
    def openings(self) -> tuple[str, ...]:
        return (*self.blocks, self.call[0]) if self.is_block_optional else self.blocks

    @property
    def at_start(self) -> tuple[str, ...]:
        return ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.blocks, self.block_close, self.call[2], self.parameter[2])

    def read(self, opening: str, voice: Voice) -> Steps[None]:
        tape = voice.tape
        if opening != self.call[0]:
            yield from tape.space()
            yield from tape.expect(self.call[0])
        while True:
            yield from self._call(voice)
            yield from tape.space()
            if (yield from tape.starts(self.call[0], self.block_close)) != self.call[0]:
                return

    def _call(self, voice: Voice) -> Steps[None]:
        tape = voice.tape
        name, _ = yield from tape.until((self.call[1],), NAME_MAX)
        voice.start(name.strip().strip('"'))
        tool = voice.tools[name.strip().strip('"')]
        lead = "{"
        while True:
            yield from tape.space()
            if (yield from tape.expect(self.parameter[0], self.call[2])) == self.call[2]:
                break
            head, _ = yield from tape.until((self.parameter[1],), NAME_MAX)
            key, types = self._head(head, tool)
            lead += json.dumps(key, ensure_ascii=False) + ": "
            yield from tagged_value(voice, self.parameter[2], types, strips=self.strips, lead=lead)
            lead = ", "
        voice.write("{}" if lead == "{" else "}")
        voice.end()

    def _head(self, head: str, tool: Tool) -> tuple[str, frozenset[str]]:
        if not self.typed:
            key = head.strip().strip('"')
            return key, property_types(tool, key)
        key, _, is_text = head.partition(self.typed)
        return key, TEXT if is_text == "true" else frozenset()

    def shape(self, tools: Sequence[Tool], most: int | None) -> Shape:
        gap = "\n" if self.strips else ""
        calls = OneOf(tuple(self._shape(tool, gap) for tool in tools))
        if self.is_block_optional:
            block = Row(
                (
                    Marker(self.blocks[0]),
                    Literal("\n"),
                    calls,
                    Literal("\n"),
                    Marker(self.block_close),
                )
            )
            return Repeat(block, Literal("\n"), 1, most)
        repeated = Repeat(calls, Literal("\n"), 1, most)
        return Row(
            (
                Marker(self.blocks[0]),
                Literal("\n"),
                repeated,
                Literal("\n"),
                Marker(self.block_close),
            )
        )

    def _shape(self, tool: Tool, gap: str) -> Shape:
        parts: list[Shape] = [Literal(self.call[0] + tool.name + self.call[1] + "\n")]
        for key, schema, is_required in properties_of(tool):
            text = types_of(schema) == TEXT
            word = f"{self.typed}{'true' if text else 'false'}" if self.typed else ""
            head = Literal(self.parameter[0] + key + word + self.parameter[1] + gap)
            value = value_shape(schema, gap + self.parameter[2])
            one = Row((head, value, Literal(gap), Marker(self.parameter[2]), Literal("\n")))
            parts.append(one if is_required else optional(one))
        return Row((*parts, Marker(self.call[2])))


def properties_of(tool: Tool) -> list[tuple[str, Mapping[str, Any], bool]]:
    """List a tool's arguments in order: name, schema with the definitions it may refer to, whether required."""
    schema = object_schema(tool)
    declared = schema.get("properties")
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    needed = {name for name in names if isinstance(name, str)}
    defs = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    if not isinstance(declared, Mapping):
        return []
    return [
        (key, {**(value if isinstance(value, Mapping) else {}), **defs}, key in needed)
        for key, value in declared.items()
    ]


def value_shape(schema: Mapping[str, Any], stop: str) -> Shape:
    """Describe a value between tags: texts are raw, everything else is JSON."""
    if types_of(schema) != TEXT:
        return JsonValue(schema)
    options = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(options, list) and options:
        return OneOf(tuple(Literal(str(option)) for option in options))
    return Free(stop)


@dataclass(frozen=True, slots=True)
class Glm:
    """GLM: the name bare, keys and values in tags of their own."""

    openings: tuple[str, ...] = ("<tool_call>",)
    at_start: tuple[str, ...] = ()
    id_chars: int = 0

    @property
    def markers(self) -> tuple[str, ...]:
        return (
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        )

    def read(self, opening: str, voice: Voice) -> Steps[None]:
        del opening
        tape = voice.tape
        yield from tape.space()
        name, marker = yield from tape.until(("\n", "<arg_key>", "</tool_call>"), NAME_MAX)
        voice.start(name.strip())
        tool = voice.tools[name.strip()]
        lead = "{"
        while True:
            if marker == "\n":
                yield from tape.space()
                marker = yield from tape.expect("<arg_key>", "</tool_call>")
            if marker == "</tool_call>":
                break
            key, _ = yield from tape.until(("</arg_key>",), NAME_MAX)
            yield from tape.space()
            yield from tape.expect("<arg_value>")
            lead += json.dumps(key.strip(), ensure_ascii=False) + ": "
            types = property_types(tool, key.strip())
            yield from tagged_value(voice, "</arg_value>", types, strips=False, lead=lead)
            lead = ", "
            marker = "\n"
        voice.write("{}" if lead == "{" else "}")
        voice.end()

    def shape(self, tools: Sequence[Tool], most: int | None) -> Shape:
        calls = OneOf(tuple(self._shape(tool) for tool in tools))
        return Repeat(calls, NOTHING, 1, most)

    def _shape(self, tool: Tool) -> Shape:
        parts: list[Shape] = [Marker("<tool_call>"), Literal(tool.name + "\n")]
        for key, schema, is_required in properties_of(tool):
            name = (Marker("<arg_key>"), Literal(key), Marker("</arg_key>"), Literal("\n"))
            value = value_shape(schema, "</arg_value>")
            end = (Marker("</arg_value>"), Literal("\n"))
            one = Row((*name, Marker("<arg_value>"), value, *end))
            parts.append(one if is_required else optional(one))
        return Row((*parts, Marker("</tool_call>")))
