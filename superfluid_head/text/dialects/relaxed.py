"""Values that are nearly JSON, to JSON: Python literals (Llama's pythonic calls) and Gemma's bare keys and long quotes.

Two halves. `relaxed_value` finds the end of a value as it arrives; `to_json` turns a whole one into JSON text by a small
recursive reader of literals, nothing of it is ever evaluated. JSON itself is read too, so a grammar may ask for it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from superfluid_head.text.dialects.tape import MalformedError, Steps, Tape

DEPTH_MAX = 64
LONG_QUOTE = '<|"|>'

_QUIET = re.compile(r"""[^\[\](){}"'<,]*""")
_INSIDE = re.compile(r"""[^"'\\<]*""")
_WORDS: dict[str, Any] = {
    "true": True, "false": False, "null": None, "True": True, "False": False, "None": None,
}  # fmt: skip
_NUMBER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?(?![\w.])")
_WORD = re.compile(r"[A-Za-z_][\w.-]*")
_SPACE = re.compile(r"\s*")
_TOKEN = re.compile(r"""[^"'\\]+""")
_SIMPLE = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "\n": "",
    "a": "\a",
    "v": "\v",
    "0": "\0",
}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


def relaxed_value(tape: Tape, closer: str) -> Steps[str]:
    """Consume the text of one value up to a top-level comma or `closer`, neither included."""
    parts: list[str] = []
    open_: list[str] = []
    while True:
        parts.append((yield from tape.run(_QUIET, 1 << 24)))
        character = yield from tape.need()
        if not open_ and character in (",", closer):
            return "".join(parts)
        if character in "\"'":
            yield from _quoted(tape, parts)
        elif character == "<":
            yield from _long_quoted(tape, parts)
        else:
            if character in _CLOSERS:
                open_.append(_CLOSERS[character])
            elif character != "," and (not open_ or open_.pop() != character):
                raise MalformedError
            if len(open_) > DEPTH_MAX:
                raise MalformedError
            parts.append(tape.take(1))


def _quoted(tape: Tape, parts: list[str]) -> Steps[None]:
    quote = tape.take(1)
    parts.append(quote)
    while True:
        parts.append((yield from tape.run(_INSIDE, 1 << 24)))
        character = yield from tape.need()
        parts.append(tape.take(1))
        if character == "\\":
            yield from tape.need()
            parts.append(tape.take(1))
        elif character == quote:
            return


def _long_quoted(tape: Tape, parts: list[str]) -> Steps[None]:
    """Consume a string between long quotes; it is written down as a JSON string."""
    if (yield from tape.starts(LONG_QUOTE)) is None:
        parts.append(tape.take(1))
        return
    text, _ = yield from tape.until((LONG_QUOTE,))
    parts.append(json.dumps(text, ensure_ascii=False))


def to_json(text: str) -> str:
    """Translate one value. Raises MalformedError."""
    reader = _Literals(text)
    value = reader.value(0)
    if not reader.is_at_end():
        raise MalformedError
    made = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        made.encode()
    except UnicodeEncodeError:
        raise MalformedError from None
    return made


class _Literals:
    """A recursive reader over a whole text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def is_at_end(self) -> bool:
        self._skip()
        return self._at == len(self._text)

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _peek(self) -> str:
        self._skip()
        return self._text[self._at : self._at + 1]

    def _eat(self, character: str) -> bool:
        if self._peek() == character:
            self._at += 1
            return True
        return False

    def value(self, depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise MalformedError
        first = self._peek()
        if first == "{":
            return self._table(depth)
        if first and first in "[(":
            return self._list(depth)
        if first and first in "\"'":
            return self._strings()
        number = _NUMBER.match(self._text, self._at)
        if number is not None:
            self._at = number.end()
            return _number(number.group())
        word = self._word()
        if word not in _WORDS:
            raise MalformedError
        return _WORDS[word]

    def _word(self) -> str:
        found = _WORD.match(self._text, self._at)
        if found is None:
            raise MalformedError
        self._at = found.end()
        return found.group()

    def _list(self, depth: int) -> list[Any]:
        closer = _CLOSERS[self._text[self._at]]
        self._at += 1
        items: list[Any] = []
        while not self._eat(closer):
            items.append(self.value(depth + 1))
            if not self._eat(",") and self._peek() != closer:
                raise MalformedError
        return items

    def _table(self, depth: int) -> dict[str, Any]:
        self._at += 1
        items: dict[str, Any] = {}
        while not self._eat("}"):
            first = self._peek()
            key = self._strings() if first and first in "\"'" else self._word()
            if not self._eat(":"):
                raise MalformedError
            items[key] = self.value(depth + 1)
            if not self._eat(",") and self._peek() != "}":
                raise MalformedError
        return items

    def _strings(self) -> str:
        """Read a string, and those that stand right behind it."""
        parts: list[str] = []
        while (quote := self._peek()) and quote in "\"'":
            self._at += 1
            self._string(quote, parts)
        return "".join(parts)

    def _string(self, quote: str, parts: list[str]) -> None:
        while True:
            found = _TOKEN.match(self._text, self._at)
            if found is not None:
                parts.append(found.group())
                self._at = found.end()
            character = self._text[self._at : self._at + 1]
            self._at += 1
            if character == quote:
                return
            if not character:
                raise MalformedError
            parts.append(self._escape() if character == "\\" else character)

    def _escape(self) -> str:
        character = self._text[self._at : self._at + 1]
        self._at += 1
        sizes = {"x": 2, "u": 4, "U": 8}
        if character in sizes:
            digits = self._text[self._at : self._at + sizes[character]]
            self._at += sizes[character]
            return self._paired(character, digits)
        return _SIMPLE.get(character, character if character in "\"'\\/" else "\\" + character)

    def _paired(self, kind: str, digits: str) -> str:
        """Make a character of its code; the halves of a pair become one."""
        code = _code(digits)
        if kind == "u" and 0xD800 <= code < 0xDC00 and self._text.startswith("\\u", self._at):
            low = _code(self._text[self._at + 2 : self._at + 6])
            if 0xDC00 <= low < 0xE000:
                self._at += 6
                return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
        return chr(code)


def _code(digits: str) -> int:
    try:
        code = int(digits, 16)
    except ValueError:
        raise MalformedError from None
    if not 0 <= code <= 0x10FFFF:
        raise MalformedError
    return code


def _number(text: str) -> int | float:
    if len(text) > 300:
        raise MalformedError
    if text.lstrip("+-").isdigit():
        return int(text)
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise MalformedError
    return value
