"""The text of one choice while it is being read: a few pending characters, and the questions that readers ask of them.

Readers are generators: they `yield` when the answer depends on text that has not come yet, so what they decide depends on
the text alone and never on how it was cut (http_api C1). Only what may still begin a marker stays pending (C2), so the
work is linear in the text. A marker that the vocabulary has as one token counts only when it was written by that token:
the same characters spelled with ordinary tokens are text.

    base ........ at ............ end
    consumed      pending
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[int, str], None]
"""Takes text and the position of its first character."""

_SPACE = re.compile(r"\s*")


class MalformedError(Exception):
    """Raised by readers when the text is not, or can no longer become, what they read."""


class Marks:
    """A set of markers to look for. `singles` of them are tokens of their own and never spelled."""

    def __init__(self, markers: Iterable[str], singles: frozenset[str]) -> None:
        ordered = sorted(set(markers), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self.singles = singles
        self.longest = max(map(len, ordered), default=0)
        spelled = [marker for marker in ordered if marker not in singles]
        self._prefixes = frozenset(
            marker[:size] for marker in spelled for size in range(1, len(marker))
        )
        self._longest = max(map(len, self._prefixes), default=0)

    def held(self, text: str, at: int) -> int:
        """How many last characters of `text` may still become a marker; none before `at`."""
        for size in range(min(self._longest, len(text) - at), 0, -1):
            if text[len(text) - size :] in self._prefixes:
                return size
        return 0


@functools.lru_cache(maxsize=512)
def _marks(markers: tuple[str, ...], singles: frozenset[str]) -> Marks:
    return Marks(markers, singles)


class Tape:
    """Pending text. `push` and `close` feed it; everything else consumes, or looks."""

    def __init__(self, singles: frozenset[str] = frozenset()) -> None:
        self._text = ""
        self._at = 0
        self._base = 0
        self._singles = singles
        self._single_at: set[int] = set()
        self._kept: list[str] | None = None
        self._kept_from = 0
        self.is_closed = False

    # what feeds

    def push(self, text: str, *, is_single: bool = False) -> None:
        """Append text; `is_single` when it is one token that is a marker."""
        rest = self._text[self._at :]
        self._base += self._at
        self._at = 0
        self._text = rest + text
        if is_single:
            self._single_at.add(self._base + len(rest))

    def close(self) -> None:
        self.is_closed = True

    # what looks and takes

    @property
    def position(self) -> int:
        return self._base + self._at

    def view(self) -> tuple[str, int]:
        """Return the pending text and where in it reading goes on."""
        return self._text, self._at

    def take(self, count: int) -> str:
        """Consume `count` pending characters."""
        taken = self._text[self._at : self._at + count]
        self._at += count
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def keep(self, text: str = "") -> None:
        """Remember what is consumed from here on; `text` was consumed just before and is remembered too."""
        self._kept = [text]
        self._kept_from = self.position - len(text)

    def forget(self) -> None:
        self._kept = None

    def kept(self) -> tuple[int, str]:
        """Return where the remembered text began, and the text; forgets it."""
        text = "".join(self._kept or ())
        self._kept = None
        return self._kept_from, text

    def _is_single(self, at: int) -> bool:
        return self._base + at in self._single_at

    def _search(self, marks: Marks, last: int | None) -> re.Match[str] | None:
        """Find the first marker; one that stands behind `last` need not be found.

        Who looks for the name of a call must not go through all that is pending for each of a thousand openings.
        """
        end = len(self._text) if last is None else last - self._base + marks.longest
        for found in marks.pattern.finditer(self._text, self._at, end):
            if found.group() not in marks.singles or self._is_single(found.start()):
                return found
        return None

    def _begins(self, marker: str) -> bool | None:
        """Whether the pending text begins with `marker`; None while that is open."""
        has = len(self._text) - self._at
        if has == 0 and not self.is_closed:
            return None
        if marker in self._singles:
            return self._is_single(self._at) and self._text.startswith(marker, self._at)
        if has >= len(marker):
            return self._text.startswith(marker, self._at)
        return None if not self.is_closed and marker.startswith(self._text[self._at :]) else False

    # what readers ask

    def flow(
        self, markers: tuple[str, ...], sink: Sink, limit: int | None = None
    ) -> Steps[str | None]:
        """Hand all text before the first marker to `sink`; returns the marker, consumed, or None at the end.

        Raises MalformedError when more than `limit` characters stand before it, `limit` of them consumed.
        """
        marks = _marks(markers, self._singles.intersection(markers))
        last = None if limit is None else self.position + limit
        while True:
            found = self._search(marks, last)
            if found is not None:
                self._hand(found.start(), sink, last)
                return self.take(len(found.group()))
            end = len(self._text)
            held = 0 if self.is_closed else marks.held(self._text, self._at)
            self._hand(end - held, sink, last)
            if self.is_closed:
                return None
            yield

    def _hand(self, end: int, sink: Sink, last: int | None) -> None:
        room = end if last is None else last - self._base
        start = self.position
        if end > self._at and room > self._at:
            sink(start, self.take(min(end, room) - self._at))
        if end > room:
            raise MalformedError

    def peek(self) -> Steps[str]:
        """Return the next character, "" at the end."""
        while self._at >= len(self._text):
            if self.is_closed:
                return ""
            yield
        return self._text[self._at]

    def need(self) -> Steps[str]:
        """Return the next character. Raises MalformedError at the end."""
        character = yield from self.peek()
        if not character:
            raise MalformedError
        return character

    def starts(self, *markers: str) -> Steps[str | None]:
        """Consume the first of `markers` that the text begins with; None when it begins with none."""
        while True:
            is_open = False
            for marker in markers:
                begins = self._begins(marker)
                if begins:
                    return self.take(len(marker))
                is_open = is_open or begins is None
            if not is_open:
                return None
            yield

    def expect(self, *markers: str) -> Steps[str]:
        """Consume one of `markers`. Raises MalformedError when none stands here."""
        found = yield from self.starts(*markers)
        if found is None:
            raise MalformedError
        return found

    def space(self) -> Steps[None]:
        """Consume white space."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self.take(found.end() - self._at)
            if self._at < len(self._text) or self.is_closed:
                return
            yield

    def run(self, pattern: re.Pattern[str], limit: int) -> Steps[str]:
        """Consume the longest run of `pattern` (one character class, repeated).

        Raises MalformedError above `limit`, that many characters consumed.
        """
        parts: list[str] = []
        size = 0
        while True:
            found = pattern.match(self._text, self._at)
            count = 0 if found is None else found.end() - self._at
            parts.append(self.take(min(count, limit - size)))
            size += count
            if size > limit:
                raise MalformedError
            if self._at < len(self._text) or self.is_closed:
                return "".join(parts)
            yield

    def until(self, markers: tuple[str, ...], limit: int | None = None) -> Steps[tuple[str, str]]:
        """Consume text and the marker behind it. Raises MalformedError at the end, or above `limit` characters."""
        parts: list[str] = []
        marker = yield from self.flow(markers, lambda _start, text: parts.append(text), limit)
        if marker is None:
            raise MalformedError
        return "".join(parts), marker
