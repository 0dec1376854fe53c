"""A `Grammar` as the text that llguidance compiles, and the bounds under which it does. Pure.

Owns the one form of every kind: JSON with bounded blank space between its tokens (a model can otherwise write blanks until its
budget is gone), a regular expression for the whole text, a Lark grammar as it stands. Keywords of JSON Schema that
cannot be enforced are the compiler's to refuse, by name: it is never asked to be lenient, whatever a schema says.
"""

from __future__ import annotations

import json
import re
from typing import Any

from superfluid_core.errors import ErrorCode, InvalidRequestError
from superfluid_core.session import Grammar, GrammarKind

WORDS_MAX = 200
BLANKS = r"( |\n {0,32})?"
"""Between the tokens of JSON: nothing, one space, or one new line with its indentation."""

HEADER = '%llguidance {"no_forcing": true}\n'
"""Begins every grammar: a mask is what the grammar lets through, never one way to spell what must come anyway."""

_OPTIONS = {"whitespace_pattern": BLANKS, "whitespace_flexible": True}
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): ")


def invalid_grammar(words: str, param: str | None = None) -> InvalidRequestError:
    """Make the refusal of a constraint that cannot be compiled."""
    return InvalidRequestError(words[:WORDS_MAX], param=param, code=ErrorCode.INVALID_GRAMMAR)


def json_rule(schema: Any) -> str:
    """Write the right-hand side of a rule whose text is JSON that satisfies `schema`."""
    if schema is True or schema == {}:
        schema = {}
    elif not isinstance(schema, dict):
        raise invalid_grammar("the schema is no object")
    plain = {name: value for name, value in schema.items() if name != "x-guidance"}
    return "%json " + json.dumps({**plain, "x-guidance": _OPTIONS})


def source_of(grammar: Grammar) -> str:
    """Give what the compiler reads. Raises InvalidRequestError(INVALID_GRAMMAR)."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _lark(json_rule({"type": "object"}))
        case GrammarKind.JSON_SCHEMA:
            return _lark(json_rule(_parsed(grammar.text)))
        case GrammarKind.REGEX:
            return _lark(regex_rule(grammar.text))
        case GrammarKind.LARK:
            text = grammar.text
            return (
                text if text.startswith((HEADER, "{")) else beside(f"{HEADER}start: @own\n", text)
            )


def regex_rule(pattern: str) -> str:
    """Write a regular expression as a terminal. It is for the whole text, so anchors at its ends say nothing."""
    if pattern.startswith("^"):
        pattern = pattern[1:]
    if pattern.endswith("$") and (len(pattern) - len(pattern.rstrip("$\\"))) % 2 == 1:
        pattern = pattern[:-1]
    escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", pattern).replace("\n", r"\n")
    return f"/{escaped}/"


def beside(grammar: str, own: str) -> str:
    """Put a grammar that somebody else wrote beside ours, which calls it `@own`: its rules have names of their own."""
    return json.dumps(
        {"grammars": [{"lark_grammar": grammar}, {"name": "own", "lark_grammar": own}]}
    )


def _lark(rule: str) -> str:
    return f"{HEADER}start: {rule}\n"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise invalid_grammar("the schema is not JSON") from None


def plain_words(error: str) -> str:
    """Cut a compiler's complaint to its first line, without places in a text that nobody wrote."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    words = lines[0] if lines else "it cannot be compiled"
    for line in lines[1:]:
        if line.startswith("error: "):
            words = line.removeprefix("error: ")
    words = _PLACE.sub("", words).partition("; following")[0]
    if words.startswith("NoExtension"):
        words = "it allows no text"
    return words.replace("<non-verbose/>", "").strip()[:WORDS_MAX]
