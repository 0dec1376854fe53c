"""What a channel says: deltas of content, reasoning and calls, each with the tokens whose text it holds.

Pure values, and the builder that joins what comes in one step: neighbours of one kind are one delta, and a token that holds
a border is two (http_api Q2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from superfluid_core.session import TokenLogprobs


class Sampled(NamedTuple):
    """An id whose text is in a delta, with its log-probabilities when asked for."""

    token: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class CallPart:
    """A piece of a call. The first one of a call has its name, and the id if the model gave one; then come arguments."""

    order: int
    name: str | None = None
    id: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Delta:
    """What may be sent now: one of text, reasoning and call, or neither when tokens are left at the end.

    `stop` names the stop string that ended the output, `count` the ids up to it.
    """

    text: str = ""
    tokens: tuple[Sampled, ...] = ()
    stop: str | None = None
    count: int = 0
    reasoning: str = ""
    call: CallPart | None = None


class Mark(NamedTuple):
    """A token in flight: `known` characters existed after it, `end` are needed for it to be delivered."""

    sampled: Sampled
    ordinal: int
    known: int
    end: int
    is_shown: bool


Drain = Callable[[int], tuple[Sampled, ...]]
"""Hands over the tokens that end at or before a position."""


class _Kind(Enum):
    """What a delta under way holds."""

    NOTHING = 0
    TEXT = 1
    REASONING = 2
    CALL = 3


class DeltaBuilder:
    """The deltas of one step. White space at the end of a text waits, where `trims`: what follows may be markup."""

    def __init__(self, drain: Drain, *, trims: bool) -> None:
        self._drain = drain
        self._trims = trims
        self._made: list[Delta] = []
        self._kind = _Kind.NOTHING
        self._parts: list[str] = []
        self._call = CallPart(0)
        self._tokens: list[Sampled] = []
        self._tail: list[str] = []
        self._tail_kind = _Kind.TEXT

    def text(self, text: str, end: int, *, is_reasoning: bool = False) -> None:
        """Add text that ends at position `end`."""
        kind = _Kind.REASONING if is_reasoning else _Kind.TEXT
        if self._tail_kind is not kind:
            self._tail.clear()
            self._tail_kind = kind
        kept = text.rstrip() if self._trims else text
        if kept:
            self._open(kind)
            self._parts += self._tail
            self._parts.append(kept)
            self._tail.clear()
        if len(kept) < len(text):
            self._tail.append(text[len(kept) :])
        if kept or not self._tail:
            self._tokens += self._drain(end - (len(text) - len(kept)))

    def call(self, part: CallPart, end: int) -> None:
        """Add a piece of a call; white space that waited before it is dropped."""
        self._tail.clear()
        is_more = self._kind is _Kind.CALL and self._call.name is None and part.name is None
        if not is_more:
            self._close()
            self._kind = _Kind.CALL
            self._call = part
        self._parts.append(part.arguments)
        self._tokens += self._drain(end)

    def settle(self) -> None:
        """Deliver white space that waited: no markup follows."""
        if self._tail:
            self._open(self._tail_kind)
            self._parts += self._tail
            self._tail.clear()

    def take(self) -> tuple[Delta, ...]:
        """Return the deltas made so far."""
        self._close()
        made, self._made = tuple(self._made), []
        return made

    def rest(self) -> tuple[Sampled, ...]:
        """Return tokens that no delta took along."""
        rest = tuple(self._tokens)
        self._tokens.clear()
        return rest

    def _open(self, kind: _Kind) -> None:
        if self._kind is not kind:
            self._close()
            self._kind = kind

    def _close(self) -> None:
        if self._kind is _Kind.NOTHING:
            return
        joined, tokens = "".join(self._parts), tuple(self._tokens)
        if self._kind is _Kind.TEXT:
            delta = Delta(joined, tokens)
        elif self._kind is _Kind.REASONING:
            delta = Delta(tokens=tokens, reasoning=joined)
        else:
            part = CallPart(self._call.order, self._call.name, self._call.id, joined)
            delta = Delta(tokens=tokens, call=part)
        self._made.append(delta)
        self._tokens.clear()
        self._parts.clear()
        self._kind = _Kind.NOTHING


class HiddenSpans:
    """Where special tokens stand that readers do not see."""

    def __init__(self) -> None:
        self._spans: deque[tuple[int, int]] = deque()

    def add(self, start: int, end: int) -> None:
        self._spans.append((start, end))

    def without(self, start: int, text: str) -> str:
        """Return what is shown of `text`, which begins at `start`; earlier spans are forgotten."""
        spans = self._spans
        while spans and spans[0][1] <= start:
            spans.popleft()
        if not spans:
            return text
        parts: list[str] = []
        at = start
        for first, last in spans:
            if first >= start + len(text):
                break
            parts.append(text[at - start : max(at, first) - start])
            at = max(at, last)
        parts.append(text[at - start :])
        return "".join(parts)
