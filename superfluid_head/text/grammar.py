"""One grammar for a whole answer: what precedes the content, then the constraint, or calls in its place.

Translates the shapes of the dialects and the constraints of requests to the Lark form that nodes compile. Pure. Markup that is one
token of the vocabulary becomes that id where only the id can stand for it (special tokens have no text of their own in a
grammar), and its text elsewhere, which every spelling of it satisfies. JSON gets bounded blank space (core/grammar/sources.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import assert_never

from superfluid_core.grammar.sources import HEADER, beside, invalid_grammar, json_rule, regex_rule
from superfluid_core.limits import WireLimits
from superfluid_core.session import Grammar, GrammarKind
from superfluid_head.text.constraints import Choice, Constraint, JsonText, OwnGrammar, Pattern
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
)

ANY_TEXT = r"/(?s:.*)/"

SpecialId = Callable[[str], int | None]
"""The id of a special token by its text; None for everything that is ordinary text."""


def compose(
    constraint: Constraint | None,
    special_id: SpecialId,
    *,
    before: Shape = NOTHING,
    instead: Shape | None = None,
) -> Grammar:
    """Build the grammar of an answer: `before` and then `constraint`, or `instead` of both. Raises InvalidRequestError."""
    writer = _Writer(special_id)
    options: list[str] = []
    if constraint is not None:
        options.append(writer.rule(f"{writer.expression(before)} {writer.constraint(constraint)}"))
    if instead is not None:
        options.append(writer.rule(writer.expression(instead)))
    grammar = Grammar(GrammarKind.LARK, writer.finish(" | ".join(options)))
    if len(grammar.text.encode()) > WireLimits().grammar_bytes_max:
        raise invalid_grammar("the constraint is too large")
    return grammar


class _Writer:
    """Rules under way. A caller's own grammar stands beside them, under a name, for its rules have names of their own."""

    def __init__(self, special_id: SpecialId) -> None:
        self._special_id = special_id
        self._rules: list[str] = []
        self._own: str | None = None

    def finish(self, start: str) -> str:
        text = HEADER + f"start: {start}\n" + "".join(self._rules)
        return text if self._own is None else beside(text, self._own)

    def rule(self, expression: str, mark: str = "", name: str = "r") -> str:
        """Add a rule; returns its name. Names in capitals are terminals."""
        made = f"{name}{len(self._rules)}"
        self._rules.append(f"{made}{mark}: {expression}\n")
        return made

    def constraint(self, constraint: Constraint) -> str:
        match constraint:
            case JsonText(schema=schema):
                return self.rule(json_rule(schema))
            case Pattern(regex=regex):
                return self.rule(regex_rule(regex), name="T")
            case Choice(texts=texts):
                return self.rule(" | ".join(_quoted(text) for text in texts))
            case OwnGrammar(text=text):
                self._own = text
                return "@own"
        assert_never(constraint)

    def expression(self, shape: Shape) -> str:
        match shape:
            case Literal(text=text):
                return _quoted(text)
            case Marker(text=text):
                return self._marker(text)
            case JsonValue(schema=schema):
                return self.rule(json_rule(dict(schema)))
            case Free(stop=stop):
                return self._free(stop)
            case Row():
                return self._row(_flat(shape))
            case OneOf(options=options):
                return self.rule(" | ".join(self.rule(self.expression(each)) for each in options))
            case Repeat():
                return self._repeat(shape)
        assert_never(shape)

    def _marker(self, text: str) -> str:
        token = self._special_id(text)
        return _quoted(text) if token is None else f"<[{token}]>"

    def _row(self, parts: Sequence[Shape]) -> str:
        """Write parts in turn; a free text takes the ordinary text that ends it along."""
        written: list[str] = []
        at = 0
        while at < len(parts):
            part = parts[at]
            behind = parts[at + 1] if at + 1 < len(parts) else None
            rest = None if behind is None else self._ordinary(behind)
            if isinstance(part, Free) and rest is not None and rest.startswith(part.stop):
                mark = f"[suffix={_quoted(part.stop)}]"
                written.append(self.rule(ANY_TEXT, mark))
                if len(rest) > len(part.stop):
                    written.append(_quoted(rest[len(part.stop) :]))
                at += 2
                continue
            written.append(self.expression(part))
            at += 1
        return " ".join(written) or _quoted("")

    def _ordinary(self, part: Shape) -> str | None:
        """Give the text of a part that is ordinary text."""
        if isinstance(part, Literal):
            return part.text
        if isinstance(part, Marker) and self._special_id(part.text) is None:
            return part.text
        return None

    def _free(self, stop: str) -> str:
        """Write text without `stop`; a special token cannot occur in text anyway."""
        if self._special_id(stop) is not None:
            return self.rule(ANY_TEXT, name="T")
        found = regex_rule("(?s:.*)" + _escaped(stop) + "(?s:.*)")
        return self.rule(f"{ANY_TEXT} & ~{found}", name="T")

    def _repeat(self, repeat: Repeat) -> str:
        part = self.rule(self.expression(repeat.part))
        more = self.rule(f"{self.expression(repeat.separator)} {part}")
        least = max(0, repeat.least - 1)
        most = "" if repeat.most is None else str(max(0, repeat.most - 1))
        whole = part if most == "0" else f"{part} {more}{{{least},{most}}}"
        if most == "0" or repeat.least > 0:
            return self.rule(whole if repeat.least > 0 else f"({whole})?")
        return self.rule(f"({whole})?")


def _flat(row: Row) -> list[Shape]:
    parts: list[Shape] = []
    for part in row.parts:
        parts += _flat(part) if isinstance(part, Row) else [part]
    return parts


def _quoted(text: str) -> str:
    return json.dumps(text)


def _escaped(text: str) -> str:
    """Escape for a regular expression: every character by its number, whatever it means."""
    return "".join(f"\\x{{{ord(each):X}}}" for each in text)
