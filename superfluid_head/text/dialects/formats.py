"""What every tool-call format answers, and the pieces that several of them share.

A format is a value without state: it says which markers open its blocks, reads one block as a generator, and describes the
same block as a shape for grammars.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from superfluid_head.text.dialects.events import Tool, Voice
from superfluid_head.text.dialects.jsontext import json_value
from superfluid_head.text.dialects.shape import JsonValue, Literal, OneOf, Row, Shape
from superfluid_head.text.dialects.tape import MalformedError, Steps

NAME_MAX = 256


class Format(Protocol):
    """One way to write calls."""

    @property
    def openings(self) -> tuple[str, ...]:
        """Markers that open a block, wherever they stand in content."""
        ...

    @property
    def at_start(self) -> tuple[str, ...]:
        """Texts that open a block where content begins, and only there."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """All markup that a vocabulary may have as single tokens."""
        ...

    @property
    def id_chars(self) -> int:
        """Length of ids that the model's template prescribes; 0: `call_` and a random rest."""
        ...

    def read(self, opening: str, voice: Voice) -> Steps[None]:
        """Read a block behind its opening. Raises MalformedError where it is none."""
        ...

    def shape(self, tools: Sequence[Tool], most: int | None) -> Shape:
        """Describe one to `most` calls of `tools`."""
        ...


def object_schema(tool: Tool) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments: always an object, an empty one where nothing is declared."""
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **tool.parameters}


def envelopes(tools: Sequence[Tool], key: str) -> Shape:
    """Describe one `{"name": ..., KEY: {...}}`."""
    return OneOf(
        tuple(
            Row(
                (
                    Literal(f'{{"name": {json.dumps(tool.name)}, "{key}": '),
                    JsonValue(object_schema(tool)),
                    Literal("}"),
                )
            )
            for tool in tools
        )
    )


def call_object(voice: Voice, name: str, call_id: str | None = None) -> Steps[str]:
    """Begin a call whose arguments stand here as an object; its last brace is returned, not written."""
    if (yield from voice.tape.need()) != "{":
        raise MalformedError
    voice.start(name, call_id)
    return (yield from json_value(voice.tape, voice.write))
