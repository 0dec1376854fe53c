"""What a request may ask its text to be: JSON, a pattern, one of some texts, a grammar of its own. Pure values.

A `Constraint` is about the content alone; what precedes it (reasoning) or stands in its place (calls) is put around it by
`grammar.py`. Bounds are reliability.md's; what cannot be enforced is refused by name here or by the compiler, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from superfluid_core.grammar.sources import invalid_grammar

SCHEMA_BYTES_MAX = 64 * 1024
GRAMMAR_BYTES_MAX = 64 * 1024
PATTERN_BYTES_MAX = 4 * 1024
CHOICES_MAX = 4_096
DEPTH_MAX = 32

# What the compiler would take for a mere remark, although it changes what is valid.
UNHEARD = ("nullable", "extends", "disallow", "divisibleBy")


@dataclass(frozen=True, slots=True)
class JsonText:
    """JSON that satisfies `schema`."""

    schema: Mapping[str, Any] | bool


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that a regular expression matches as a whole."""

    regex: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Exactly one of these texts."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OwnGrammar:
    """A grammar as the caller wrote it: Lark, or GBNF (told by its `::=`)."""

    text: str

    @property
    def is_gbnf(self) -> bool:
        return "::=" in self.text


Constraint = JsonText | Pattern | Choice | OwnGrammar

ANY_OBJECT = JsonText({"type": "object"})


def judge_schema(schema: Any, param: str) -> JsonText:
    """Check what can be without compiling. Raises InvalidRequestError(INVALID_GRAMMAR) that names the fault."""
    if not isinstance(schema, dict | bool):
        raise invalid_grammar(f"{param}: a schema is an object", param)
    stack: list[tuple[Any, str, int]] = [(schema, "", 1)]
    while stack:
        value, path, depth = stack.pop()
        if depth > DEPTH_MAX:
            raise invalid_grammar(f"{param}: the schema is nested deeper than {DEPTH_MAX}", param)
        if isinstance(value, dict):
            _judge_keywords(value, path, param)
            stack += [(item, f"{path}/{name}", depth + 1) for name, item in value.items()]
        elif isinstance(value, list):
            stack += [(item, path, depth + 1) for item in value]
    return JsonText(schema)


def _judge_keywords(value: Mapping[str, Any], path: str, param: str) -> None:
    """Refuse keywords that would be passed over. Names of properties are no keywords."""
    if path.endswith(("/properties", "/$defs", "/definitions", "/patternProperties")):
        return
    if path.rpartition("/")[2] in ("const", "enum", "default", "examples", "example"):
        return
    for name in UNHEARD:
        if name in value and value[name] is not False:
            where = f" at {path[:80]}" if path else ""
            raise invalid_grammar(f"{param}: the keyword {name!r}{where} is not supported", param)


def judge_pattern(regex: str, param: str) -> Pattern:
    if not regex:
        raise invalid_grammar(f"{param}: the pattern is empty", param)
    if len(regex.encode()) > PATTERN_BYTES_MAX:
        raise invalid_grammar(f"{param}: longer than {PATTERN_BYTES_MAX} bytes", param)
    return Pattern(regex)


def judge_choice(texts: list[str], param: str) -> Choice:
    if not texts or len(texts) > CHOICES_MAX or not all(texts):
        raise invalid_grammar(f"{param}: 1 to {CHOICES_MAX} texts, none of them empty", param)
    if sum(len(text.encode()) for text in texts) > GRAMMAR_BYTES_MAX:
        raise invalid_grammar(f"{param}: larger than {GRAMMAR_BYTES_MAX} bytes", param)
    return Choice(tuple(dict.fromkeys(texts)))


def judge_grammar(text: str, param: str) -> OwnGrammar:
    if not text.strip():
        raise invalid_grammar(f"{param}: the grammar is empty", param)
    if len(text.encode()) > GRAMMAR_BYTES_MAX:
        raise invalid_grammar(f"{param}: larger than {GRAMMAR_BYTES_MAX} bytes", param)
    return OwnGrammar(text)
