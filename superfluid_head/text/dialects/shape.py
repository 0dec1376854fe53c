"""What a constrained answer looks like, as plain data: the dialects describe it, the grammar composer translates it.

Owns six kinds of part and nothing else: no grammar language, no tokenizer. A dialect says what may stand before content
(`Dialect.before_content`) and how calls are written (`Dialect.call_shape`); a composer puts its own part behind or turns
the whole into one grammar. A `Marker` is markup of the model: the composer writes it as the one id of that text where the
vocabulary has such a token (special or not), else as ordinary text. Everything that a shape allows, the reader of the same
dialect reads back as the calls and content that were meant (tests hold the two together).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this ordinary text."""

    text: str


@dataclass(frozen=True, slots=True)
class Marker:
    """Exactly this markup: one id where the vocabulary has it as one token, else its text."""

    text: str


@dataclass(frozen=True, slots=True)
class JsonValue:
    """A JSON value that satisfies `schema` ({} allows any)."""

    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Free:
    """Any text, also none, in which `stop` does not occur. `stop` itself is the next part, not a piece of this one."""

    stop: str


@dataclass(frozen=True, slots=True)
class Row:
    """These parts, one after the other. An empty row is the empty text."""

    parts: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """Exactly one of these."""

    options: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`part` at least `least` times, at most `most` (None: no end), `separator` between two."""

    part: Shape
    separator: Shape
    least: int = 1
    most: int | None = None


Shape = Literal | Marker | JsonValue | Free | Row | OneOf | Repeat

NOTHING = Row(())


def optional(part: Shape) -> Shape:
    """`part` or nothing."""
    return OneOf((NOTHING, part))
