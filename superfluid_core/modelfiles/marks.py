"""Telling the words of users from the words of a chat template after the two were mixed.

Owns the mark: a character that occurs nowhere else, put after the first character of whatever in
user data spells a special token. The template may strip, split, compare or join the text; the
spelling stays broken through all of it, so special tokens found in the rendered text are the
template's own. A piece of user data that *ends* like the beginning of a special token is marked
too, else two pieces written side by side could spell one. What it must not know: templates.

Not covered: a template that rewrites the letters of user data (`lower`, `replace`) into a spelling,
or that itself writes one half of a special token around a role; roles are checked by the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from superfluid_core.errors import InvalidRequestError
from superfluid_core.modelfiles.literals import start_pattern_of

DEPTH_MAX = 64
# noncharacters first (no text should hold them), then the last private plane
_CANDIDATES = (
    *range(0xFDD0, 0xFDF0),
    *(plane << 16 | last for plane in range(1, 17) for last in (0xFFFE, 0xFFFF)),
    *range(0x100000, 0x101000),
)


class Marker:
    """Breaks what spells one of `specials` in user data."""

    def __init__(self, specials: Sequence[str]) -> None:
        self._starts = start_pattern_of(specials)
        self._beginnings = frozenset(
            special[:length] for special in specials for length in range(1, len(special))
        )
        self._longest = max(map(len, self._beginnings), default=0)
        self._last = frozenset(beginning[-1] for beginning in self._beginnings)

    def touches(self, text: str) -> bool:
        """Whether `text` spells a special token or ends like the beginning of one."""
        if self._starts is None:
            return False
        return self._starts.search(text) is not None or bool(self._ends(text))

    def broken(self, text: str, mark: str) -> str:
        """Give `text` with `mark` after each character at which a special token might begin."""
        if self._starts is None:
            return text
        for at in self._ends(text):
            text = text[: at + 1] + mark + text[at + 1 :]
        return self._starts.sub(lambda found: found.group() + mark, text)

    def _ends(self, text: str) -> list[int]:
        """Where text's end, blanks after it or not, begins like a special token; last first."""
        found: set[int] = set()
        for end in {len(text), len(text.rstrip())}:
            if text[end - 1 : end] not in self._last:
                continue
            for length in range(1, min(self._longest, end) + 1):
                if text[end - length : end] in self._beginnings:
                    found.add(end - length)
        return sorted(found, reverse=True)


def unused_characters(texts: Iterable[str], count: int) -> list[str]:
    """Find `count` characters that occur in none of `texts`."""
    seen = list(texts)
    if all(map(str.isascii, seen)):  # as most are: none of the candidates is ASCII
        return [chr(candidate) for candidate in _CANDIDATES[:count]]
    free: list[str] = []
    for candidate in _CANDIDATES:
        character = chr(candidate)
        if not any(character in text for text in seen):
            free.append(character)
            if len(free) == count:
                return free
    raise InvalidRequestError("the messages use up the characters that no text should hold")


def strings_of(value: object, depth: int = 0) -> Iterator[str]:
    """Walk all texts within lists and objects, names of members included."""
    if depth > DEPTH_MAX:
        raise InvalidRequestError("the messages are nested too deeply")
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            for each in pair:
                if type(each) is str and depth < DEPTH_MAX:  # as most: no generator for each
                    yield each
                else:
                    yield from strings_of(each, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings_of(inner, depth + 1)


def rewritten(value: object, change: Callable[[str], str]) -> object:
    """Copy lists and objects with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {rewritten(key, change): rewritten(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rewritten(inner, change) for inner in value]
    return value
