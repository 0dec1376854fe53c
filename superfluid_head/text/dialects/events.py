"""What readers say about a text: pieces of content and of reasoning, verbatim, and calls made out of markup.

Positions are characters of the whole un-skipped text of one choice. Content and reasoning are slices of it in order, so
whoever listens can go on matching stop strings and counting tokens; the text between two slices is markup.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from superfluid_head.text.dialects.tape import MalformedError, Tape


class Content(NamedTuple):
    """Text for the reader."""

    start: int
    text: str


class Reasoning(NamedTuple):
    """Text that the model wrote for itself."""

    start: int
    text: str


class CallStart(NamedTuple):
    """A call began; `id` is the model's own where its format has one."""

    end: int
    name: str
    id: str | None


class CallText(NamedTuple):
    """More of the arguments of the open call, JSON text."""

    end: int
    text: str


class CallEnd(NamedTuple):
    """The open call is complete, or broken off for good: then it must not be flagged as one."""

    end: int
    is_complete: bool


Event = Content | Reasoning | CallStart | CallText | CallEnd


class Reader(Protocol):
    """Reads the text of one choice. `feed` and `finish` mutate it."""

    def feed(self, text: str, *, is_single: bool = False) -> list[Event]:
        """Take more text; `is_single` when it is one token that is a marker."""
        ...

    def finish(self) -> list[Event]:
        """End the text: what was held comes out."""
        ...


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called, and the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


class Voice:
    """Where readers say things: events, calls checked against the tools of the request."""

    def __init__(self, tape: Tape, tools: Mapping[str, Tool], calls_max: int | None) -> None:
        self.tape = tape
        self.tools = tools
        self._calls_max = calls_max
        self._calls = 0
        self._events: list[Event] = []
        self.is_open = False

    def drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def content(self, start: int, text: str) -> None:
        self._events.append(Content(start, text))

    def reasoning(self, start: int, text: str) -> None:
        self._events.append(Reasoning(start, text))

    def start(self, name: str, call_id: str | None = None) -> None:
        """Begin a call. Raises MalformedError for a function that was not offered."""
        if name not in self.tools:
            raise MalformedError
        self._calls += 1
        self.is_open = True
        self._say(CallStart(self.tape.position, name, call_id))
        self.tape.keep()

    def write(self, text: str) -> None:
        """Deliver more of the arguments; what follows is kept in case it turns out to be text."""
        if text:
            self._say(CallText(self.tape.position, text))
            self.tape.keep()

    def end(self) -> None:
        """Complete the call."""
        self.is_open = False
        self._say(CallEnd(self.tape.position, True))
        self.tape.keep()

    def give_up(self) -> None:
        """Take back what was no markup: an open call breaks off, and what is kept of it is content."""
        if self.is_open:
            self.is_open = False
            self._say(CallEnd(self.tape.position, False))
        start, text = self.tape.kept()
        if text:
            self.content(start, text)

    def _say(self, event: CallStart | CallText | CallEnd) -> None:
        """Deliver, but for calls beyond the allowed number: they are read and dropped."""
        if self._calls_max is None or self._calls <= self._calls_max:
            self._events.append(event)
