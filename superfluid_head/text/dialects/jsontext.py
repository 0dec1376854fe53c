"""JSON read as it arrives: where a value ends, what of it is certain, and the `{"name": ..., "arguments": {...}}` envelope.

Text passes through as the model wrote it, never re-serialised (http_api C3): a slice ends neither inside an escape nor
between surrogate halves (C4). The one repair: a raw control character in a string, which models write and JSON forbids,
becomes its escape. Anything else that is not JSON raises MalformedError at the first character that shows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NoReturn

from superfluid_head.text.dialects.events import Voice
from superfluid_head.text.dialects.tape import MalformedError, Steps, Tape

SCALAR_CHARS_MAX = 400
DEPTH_MAX = 64
NAME_CHARS_MAX = 256
ARGUMENT_KEYS = ("arguments", "parameters")
KEYS = frozenset(("name", "id", "type", *ARGUMENT_KEYS))

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_IS_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_HIGH = re.compile(r"[dD][89abAB]")
_LOW = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SURROGATE = re.compile(r"[dD][89a-fA-F]")
_CONTROLS = {chr(code): json.dumps(chr(code))[1:-1] for code in range(0x20)}

Write = Callable[[str], None]


def ignore(_text: str) -> None:
    """Drop text."""


class JsonScanner:
    """Follows one JSON value. `scan` consumes what is certain; `is_done` once the value is complete."""

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._state = "value"
        self._is_in_string = False
        self.is_done = False
        self.is_bad = False

    def scan(self, text: str, at: int, *, is_last: bool) -> tuple[int, str]:
        """Read on at `at`; returns where reading stopped and the value's text up to there.

        `is_last`: no more text will come. Afterwards `is_bad` says that what stands there can be no JSON.
        """
        parts: list[str] = []
        begin = at
        while at < len(text) and not self.is_done:
            if self._is_in_string and text[at] in _CONTROLS:
                parts += (text[begin:at], _CONTROLS[text[at]])
                at += 1
                begin = at
                continue
            try:
                end = self._step(text, at, is_last=is_last)
            except MalformedError:
                self.is_bad = True
                break
            if end == at:
                break
            at = end
        parts.append(text[begin:at])
        return at, "".join(parts)

    def _step(self, text: str, at: int, *, is_last: bool) -> int:
        """Return the end of what is certain at `at`; `at` itself while that is nothing."""
        if self._is_in_string:
            return self._string(text, at)
        return self._structure(text, at, is_last=is_last)

    def _string(self, text: str, at: int) -> int:
        found = _PLAIN.match(text, at)
        assert found is not None
        if found.end() > at:
            return found.end()
        if text[at] == '"':
            self._is_in_string = False
            self._after_string()
            return at + 1
        return at + _escape_chars(text, at)

    def _after_string(self) -> None:
        if self._state == "key":
            self._state = "colon"
        else:
            self._after_value()

    def _after_value(self) -> None:
        self._state = "comma"
        self.is_done = not self._closers

    def _structure(self, text: str, at: int, *, is_last: bool) -> int:
        found = _SPACE.match(text, at)
        assert found is not None
        if found.end() > at:
            return found.end()
        character = text[at]
        if self._closers and character == self._closers[-1] and self._may_close():
            self._closers.pop()
            self._after_value()
            return at + 1
        if self._state in ("colon", "comma"):
            return self._separator(character, at)
        if character == '"':
            self._is_in_string = True
            self._state = "key" if self._state in ("key", "first key") else "value"
            return at + 1
        if self._state in ("key", "first key"):
            raise MalformedError
        if character in "{[":
            return self._open(character, at)
        return self._scalar(text, at, is_last=is_last)

    def _may_close(self) -> bool:
        return self._state in ("comma", "first key", "first value")

    def _separator(self, character: str, at: int) -> int:
        if character != ("," if self._state == "comma" else ":"):
            raise MalformedError
        is_key = self._state == "comma" and self._closers[-1] == "}"
        self._state = "key" if is_key else "value"
        return at + 1

    def _open(self, character: str, at: int) -> int:
        if len(self._closers) >= DEPTH_MAX:
            raise MalformedError
        self._closers.append("}" if character == "{" else "]")
        self._state = "first key" if character == "{" else "first value"
        return at + 1

    def _scalar(self, text: str, at: int, *, is_last: bool) -> int:
        """Consume a number or word, whole: before what follows it is seen it may still grow."""
        found = _SCALAR.match(text, at)
        assert found is not None
        size = found.end() - at
        if size == 0 or size > SCALAR_CHARS_MAX:
            raise MalformedError
        if found.end() == len(text) and not is_last:
            return at
        if not _IS_SCALAR.fullmatch(found.group()):
            raise MalformedError
        self._after_value()
        return found.end()


def _escape_chars(text: str, at: int) -> int:
    """Count the characters of the escape at `at`, both halves of a pair; 0 while it is not complete."""
    if at + 1 >= len(text):
        return 0
    if text[at + 1] != "u":
        if text[at + 1] not in '"\\/bfnrt':
            raise MalformedError
        return 2
    if len(text) < at + 6:
        return 0
    if not _HEX.match(text, at + 2):
        raise MalformedError
    if not _SURROGATE.match(text, at + 2):
        return 6
    if not _HIGH.match(text, at + 2):
        raise MalformedError
    if len(text) < at + 12:
        return 0
    if not _LOW.match(text, at + 6):
        raise MalformedError
    return 12


def json_value(tape: Tape, write: Write, limit: int | None = None) -> Steps[str]:
    """Read one value; its text goes to `write` as it becomes certain but for the last character, which is returned.

    Raises MalformedError, also for a value of more than `limit` characters.
    """
    scanner = JsonScanner()
    begin = tape.position
    while True:
        text, at = tape.view()
        room = len(text) - at if limit is None else begin + limit - tape.position
        is_cut = room < len(text) - at
        if is_cut:
            text, at = text[at : at + room], 0
        end, part = scanner.scan(text, at, is_last=tape.is_closed)
        tape.take(end - at - scanner.is_done)
        if scanner.is_done:
            write(part[:-1])
            tape.take(1)
            return part[-1:]
        if part:
            write(part)
        if scanner.is_bad or is_cut or tape.is_closed:
            raise MalformedError
        yield


def json_string(tape: Tape, limit: int = NAME_CHARS_MAX) -> Steps[str]:
    """Read a string and return what it means. Raises MalformedError when it is none, or longer than `limit`."""
    if (yield from tape.need()) != '"':
        raise MalformedError
    parts: list[str] = []
    parts.append((yield from json_value(tape, parts.append, limit)))
    value = json.loads("".join(parts))
    assert isinstance(value, str)
    return value


class Envelope:
    """One call as an object with a name and arguments, in either order."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._name: str | None = None
        self._id: str | None = None
        self._early: list[str] = []
        self._last: str | None = None

    def read(self) -> Steps[None]:
        """Read the object behind its first brace and say its call. Raises MalformedError, also for an unknown name."""
        tape = self._voice.tape
        yield from tape.space()
        while True:
            key = yield from json_string(tape)
            if key not in KEYS:
                raise MalformedError
            yield from tape.space()
            yield from tape.expect(":")
            yield from tape.space()
            yield from self._member(key)
            yield from tape.space()
            if (yield from tape.expect(",", "}")) == "}":
                break
            yield from tape.space()
        if self._name is None:
            raise MalformedError
        self._begin()
        self._voice.write("{}" if self._last is None else self._last)
        self._voice.end()

    def _member(self, key: str) -> Steps[None]:
        tape = self._voice.tape
        if key == "name":
            if self._name is not None:
                raise MalformedError
            self._name = yield from json_string(tape)
            if self._name not in self._voice.tools:
                raise MalformedError
        elif key in ARGUMENT_KEYS:
            if self._last is not None:
                raise MalformedError
            self._last = yield from self._arguments()
        elif key == "id" and (yield from tape.peek()) == '"':
            self._id = yield from json_string(tape)
        else:
            yield from json_value(tape, ignore)

    def _arguments(self) -> Steps[str]:
        """Read the arguments; their last brace waits until the envelope is closed."""
        tape = self._voice.tape
        first = yield from tape.need()
        if first == "{":
            return (yield from json_value(tape, self._write))
        if first == "n":
            yield from tape.expect("null")
            return "{}"
        text = yield from json_string(tape, limit=1 << 24)
        return _object_text(text)

    def _write(self, text: str) -> None:
        """Pass arguments on once the name is known."""
        if self._name is None:
            self._early.append(text)
        else:
            self._begin()
            self._voice.write(text)

    def _begin(self) -> None:
        assert self._name is not None
        if not self._voice.is_open:
            self._voice.start(self._name, self._id)
        early, self._early = self._early, []
        self._voice.write("".join(early))


def _refuse(_word: str) -> NoReturn:
    raise ValueError


def _object_text(text: str) -> str:
    """Arguments that came as a string: the object's text in it. Raises MalformedError when there is none."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise MalformedError from None
    if not isinstance(value, dict):
        raise MalformedError
    return text


def strict_json(text: str) -> str:
    """Return `text` if it is one JSON value, white space around it aside. Raises MalformedError."""
    scanner = JsonScanner()
    end, value = scanner.scan(text, 0, is_last=True)
    if scanner.is_bad or not scanner.is_done or text[end:].strip():
        raise MalformedError
    return value
