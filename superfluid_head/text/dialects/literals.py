"""Formats whose arguments are literals, not JSON: Llama's pythonic lists of calls, Gemma 4's `call:name{key: value}`.

Arguments are translated one by one, each when its end is seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from superfluid_head.text.dialects.events import Tool, Voice
from superfluid_head.text.dialects.formats import NAME_MAX, object_schema
from superfluid_head.text.dialects.jsontext import json_string
from superfluid_head.text.dialects.relaxed import LONG_QUOTE, relaxed_value, to_json
from superfluid_head.text.dialects.shape import (
    JsonValue,
    Literal,
    Marker,
    OneOf,
    Repeat,
    Row,
    Shape,
    optional,
)
from superfluid_head.text.dialects.tagged import properties_of
from superfluid_head.text.dialects.tape import MalformedError, Steps, Tape

_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"[\w-]*")


def arguments(voice: Voice, name: str, closer: str, joint: str) -> Steps[None]:
    """Read `key joint value, ...` up to `closer` and say the call."""
    tape = voice.tape
    lead = "{"
    while True:
        yield from tape.space()
        if (yield from tape.starts(closer)) is not None:
            break
        key = yield from _key(tape)
        yield from tape.space()
        yield from tape.expect(joint)
        value = to_json((yield from relaxed_value(tape, closer)))
        if lead == "{":
            voice.start(name)
        voice.write(f"{lead}{json.dumps(key, ensure_ascii=False)}: {value}")
        lead = ", "
        if (yield from tape.expect(",", closer)) == closer:
            break
    if lead == "{":
        voice.start(name)
        voice.write("{")
    voice.write("}")
    voice.end()


def _key(tape: Tape) -> Steps[str]:
    if (yield from tape.peek()) == '"':
        return (yield from json_string(tape))
    key = yield from tape.run(_KEY, NAME_MAX)
    if not key:
        raise MalformedError
    return key


@dataclass(frozen=True, slots=True)
class Pythonic:
    """`[f(a=1, b="x"), g()]`, where an answer begins."""

    openings: tuple[str, ...] = ()
    at_start: tuple[str, ...] = ("<|python_start|>", "[")
    markers: tuple[str, ...] = ("<|python_start|>", "<|python_end|>")
    id_chars: int = 0

    def read(self, opening: str, voice: Voice) -> Steps[None]:
        tape = voice.tape
        if opening != "[":
            yield from tape.space()
            yield from tape.expect("[")
        while True:
            yield from tape.space()
            name = yield from tape.run(_NAME, NAME_MAX)
            if name not in voice.tools:
                raise MalformedError
            yield from tape.expect("(")
            yield from arguments(voice, name, ")", "=")
            yield from tape.space()
            if (yield from tape.expect(",", "]")) == "]":
                break
        yield from tape.space()
        yield from tape.starts("<|python_end|>")

    def shape(self, tools: Sequence[Tool], most: int | None) -> Shape:
        calls = OneOf(tuple(self._shape(tool) for tool in tools))
        return Row((Literal("["), Repeat(calls, Literal(", "), 1, most), Literal("]")))

    def _shape(self, tool: Tool) -> Shape:
        """Describe a call: each argument ends with a comma, as Python allows."""
        parts: list[Shape] = [Literal(tool.name + "(")]
        for key, schema, is_required in properties_of(tool):
            one = Row((Literal(key + "="), JsonValue(schema), Literal(", ")))
            parts.append(one if is_required else optional(one))
        return Row((*parts, Literal(")")))


@dataclass(frozen=True, slots=True)
class Gemma:
    """`<|tool_call>call:N{k: v}<tool_call|>`."""

    openings: tuple[str, ...] = ("<|tool_call>",)
    at_start: tuple[str, ...] = ()
    markers: tuple[str, ...] = ("<|tool_call>", "<tool_call|>", LONG_QUOTE)
    id_chars: int = 0

    def read(self, opening: str, voice: Voice) -> Steps[None]:
        del opening
        tape = voice.tape
        yield from tape.space()
        yield from tape.expect("call:")
        name, _ = yield from tape.until(("{",), NAME_MAX)
        if name.strip() not in voice.tools:
            raise MalformedError
        yield from arguments(voice, name.strip(), "}", ":")
        yield from tape.space()
        yield from tape.starts("<tool_call|>")

    def shape(self, tools: Sequence[Tool], most: int | None) -> Shape:
        calls = OneOf(
            tuple(
                Row(
                    (
                        Marker("<|tool_call>"),
                        Literal("call:" + tool.name),
                        JsonValue(object_schema(tool)),
                        Marker("<tool_call|>"),
                    )
                )
                for tool in tools
            )
        )
        return Repeat(calls, Literal(""), 1, most)
