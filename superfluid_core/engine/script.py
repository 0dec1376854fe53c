"""Reads `--mock-script` files: dictated answers for the simulated engine.

A JSON object a line, the first whose `match` is found in the decoded prompt wins. Pieces become token ids here, once: a piece
that is one token is that token; any other piece is spelled with several ids which leave one per step, the delay standing
before the first of them and none before the rest, so that a reader sees the piece arrive as one. Token i of an answer
depends on i alone, so a moved session continues at its index. The file is the operator's own; the prompt is not, and
only its last `PROMPT_CHARS_MAX` characters are searched, with patterns that cannot nest repetition.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeVar

from superfluid_core.errors import ConfigError

PROMPT_CHARS_MAX = 16_384
PATTERN_CHARS_MAX = 1_000
ENTRIES_MAX = 4_096
PIECES_MAX = 65_536
REPEAT_MAX = 1_000_000
DELAY_MS_MAX = 600_000

_MEMBERS = {
    "match",
    "pieces",
    "delay_ms",
    "prefill_ms",
    "repeat",
    "logprobs",
    "fault",
    "fault_at",
}
T = TypeVar("T")

_NESTED_REPEAT = re.compile(r"[+*}][^()]*\)(?:[+*]|\{\d*,)")


class TokenTexts(Protocol):
    """What the simulated engine needs of a tokenizer."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def ordinary_ids(self) -> Sequence[int]: ...

    def token_bytes(self, token: int, /) -> bytes: ...

    def spell(self, data: bytes, /) -> list[int]: ...


class Fault(StrEnum):
    """What goes wrong at `fault_at`: the process exits, the thread stops, or one lane fails."""

    CRASH = "crash"
    HANG = "hang"
    ERROR = "error"
    NAN = "nan"


class ScriptToken(NamedTuple):
    """One dictated id; `delay_ms` None means the engine's own pace."""

    token: int
    delay_ms: float | None


@dataclass(frozen=True, slots=True)
class Answer:
    """One line of the script. `fault_at` is the output index whose step fails."""

    tokens: tuple[ScriptToken, ...]
    prefill_ms: float | None
    repeat: int
    logprob: float | None
    fault: Fault | None
    fault_at: int

    def token(self, index: int) -> ScriptToken | None:
        """Return the id dictated for output `index`, or None behind the end."""
        if index >= len(self.tokens) * self.repeat:
            return None
        return self.tokens[index % len(self.tokens)]


class Script:
    """Ordered pairs of pattern and answer."""

    def __init__(self, entries: Sequence[tuple[re.Pattern[str], Answer]]) -> None:
        self._entries = tuple(entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, prompt: str) -> Answer | None:
        """Return the first answer whose pattern is found in the end of `prompt`."""
        tail = prompt[-PROMPT_CHARS_MAX:]
        for pattern, answer in self._entries:
            if pattern.search(tail):
                return answer
        return None


class _Vocabulary:
    """Maps bytes to the one token that stands for them; control tokens are named by id only."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._single: dict[bytes, int] = {}
        excluded = {*texts.special_ids, *texts.eos_ids}
        for token in range(texts.vocabulary):
            if token in excluded:
                continue
            self._single.setdefault(texts.token_bytes(token), token)

    def ids(self, data: bytes) -> list[int]:
        single = self._single.get(data)
        return self._texts.spell(data) if single is None else [single]

    def check_id(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError("an id is a whole number")
        if not 0 <= value < self._texts.vocabulary:
            raise ConfigError(f"id {value} is outside the vocabulary of {self._texts.vocabulary}")
        return value

    def eos(self) -> int:
        if not self._texts.eos_ids:
            raise ConfigError("the model has no end-of-text id")
        return self._texts.eos_ids[0]


def load_script(text: str, texts: TokenTexts) -> Script:
    """Parse a whole script file. Raises ConfigError that names the line."""
    vocabulary = _Vocabulary(texts)
    entries: list[tuple[re.Pattern[str], Answer]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        if len(entries) >= ENTRIES_MAX:
            raise ConfigError(f"mock script: more than {ENTRIES_MAX} lines")
        try:
            entries.append(_entry(json.loads(line), vocabulary))
        except (ValueError, RecursionError):
            raise ConfigError(f"mock script, line {number}: not JSON") from None
        except ConfigError as error:
            raise ConfigError(f"mock script, line {number}: {error.message}") from None
    return Script(entries)


def _entry(raw: Any, vocabulary: _Vocabulary) -> tuple[re.Pattern[str], Answer]:
    if not isinstance(raw, dict):
        raise ConfigError("expected an object")
    unknown = sorted(set(raw) - _MEMBERS)
    if unknown:
        raise ConfigError(f"unknown member(s): {', '.join(name[:40] for name in unknown)}")
    pattern = _pattern(raw.get("match", ""))
    delay_ms = _optional(raw, "delay_ms", _duration)
    fault = _optional(raw, "fault", _fault)
    if fault is None and "fault_at" in raw:
        raise ConfigError("fault_at without fault")
    answer = Answer(
        tokens=_tokens(raw.get("pieces", []), delay_ms, vocabulary),
        prefill_ms=_optional(raw, "prefill_ms", _duration),
        repeat=_count(raw.get("repeat", 1), "repeat", 1, REPEAT_MAX),
        logprob=_optional(raw, "logprobs", _logprob),
        fault=fault,
        fault_at=_count(raw.get("fault_at", 0), "fault_at", 0, 1 << 31),
    )
    return pattern, answer


def _optional(raw: Mapping[str, Any], name: str, parse: Callable[[Any, str], T]) -> T | None:
    return parse(raw[name], name) if name in raw else None


def _pattern(raw: Any) -> re.Pattern[str]:
    if not isinstance(raw, str) or len(raw) > PATTERN_CHARS_MAX:
        raise ConfigError(f"match is a pattern of at most {PATTERN_CHARS_MAX} characters")
    if _NESTED_REPEAT.search(raw):
        raise ConfigError("match repeats a group that repeats: a prompt could hold it for hours")
    try:
        return re.compile(raw, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"match is not a pattern: {error}") from None


def _tokens(raw: Any, delay_ms: float | None, vocabulary: _Vocabulary) -> tuple[ScriptToken, ...]:
    if not isinstance(raw, list) or len(raw) > PIECES_MAX:
        raise ConfigError(f"pieces is a list of at most {PIECES_MAX}")
    tokens: list[ScriptToken] = []
    for piece in raw:
        ids = _piece_ids(piece, vocabulary)
        tokens.append(ScriptToken(ids[0], delay_ms))
        tokens.extend(ScriptToken(token, 0.0) for token in ids[1:])
    return tuple(tokens)


def _piece_ids(piece: Any, vocabulary: _Vocabulary) -> list[int]:
    if isinstance(piece, str) and piece:
        try:
            return vocabulary.ids(piece.encode())
        except UnicodeEncodeError:
            raise ConfigError("a text piece holds half a surrogate pair; use hex") from None
    match piece:
        case {"hex": str(digits), **rest} if digits and not rest:
            try:
                data = bytes.fromhex(digits)
            except ValueError:
                raise ConfigError(f"not hexadecimal: {digits[:40]!r}") from None
            return vocabulary.ids(data)
        case {"id": value, **rest} if not rest:
            return [vocabulary.check_id(value)]
        case {"eos": True, **rest} if not rest:
            return [vocabulary.eos()]
        case _:
            raise ConfigError('a piece is a text, {"hex": ..}, {"id": ..} or {"eos": true}')


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} is a number")
    return float(value)


def _duration(value: Any, name: str) -> float:
    number = _number(value, name)
    if not 0 <= number <= DELAY_MS_MAX:
        raise ConfigError(f"{name} is outside 0..{DELAY_MS_MAX}")
    return number


def _logprob(value: Any, name: str) -> float:
    number = _number(value, name)
    if not -1e4 <= number <= 0:
        raise ConfigError(f"{name} is outside -10000..0")
    return number


def _count(value: Any, name: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is a whole number in {low}..{high}")
    return value


def _fault(value: Any, name: str) -> Fault:
    try:
        return Fault(value)
    except ValueError:
        raise ConfigError(f"{name} is one of {', '.join(Fault)}") from None
