"""gpt-oss: an answer is a row of messages, each with a header that names its channel and whom it is for.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>

Analysis is reasoning, final and commentary for nobody are content, what is for `functions.N` is a call. What follows
no such rule is text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from superfluid_head.text.dialects.events import Tool, Voice
from superfluid_head.text.dialects.formats import call_object, object_schema
from superfluid_head.text.dialects.shape import (
    NOTHING,
    Free,
    JsonValue,
    Literal,
    Marker,
    OneOf,
    Row,
    Shape,
    optional,
)
from superfluid_head.text.dialects.tape import MalformedError, Sink, Steps
from superfluid_head.text.dialects.thinking import Opening

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
HEADER_MAX = 512
ROLE = "assistant"
RECIPIENT = "functions."

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"\bto=([^\s<]+)")
_BORDERS = (END, CALL, RETURN, START, CHANNEL)


@dataclass(frozen=True, slots=True)
class Harmony:
    """Reader and shapes; `has_reasoning` false shows the analysis as content."""

    has_reasoning: bool = True
    markers: tuple[str, ...] = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

    def opening(self, tail: str) -> Opening:
        """Judge by the end of the rendered prompt."""
        last = tail[tail.rfind(START) :] if START in tail else tail
        if MESSAGE not in last:
            return Opening.FRESH
        return Opening.INSIDE if _channel(last) == "analysis" else Opening.BEHIND

    def read(self, voice: Voice, opening: Opening) -> Steps[None]:
        """Read a whole answer."""
        tape = voice.tape
        found: str | None
        if opening is Opening.FRESH:
            tape.keep()
            yield from tape.space()
            found = yield from tape.starts(CHANNEL, START, "to=")
            if found is None:
                voice.give_up()
                found = yield from tape.flow(_BORDERS, voice.content)
        else:
            sink = self._thoughts(voice) if opening is Opening.INSIDE else voice.content
            found = yield from tape.flow(_BORDERS, sink)
        while found is not None:
            if found in (END, CALL, RETURN):
                found = yield from tape.flow(_BORDERS, voice.content)
            else:
                found = yield from self._message(found, voice)

    def _thoughts(self, voice: Voice) -> Sink:
        return voice.reasoning if self.has_reasoning else voice.content

    def _message(self, opening: str, voice: Voice) -> Steps[str | None]:
        """Read a message; returns the marker behind it."""
        tape = voice.tape
        tape.keep(opening)
        sink: Sink = voice.content
        try:
            text, _ = yield from tape.until((MESSAGE,), HEADER_MAX)
            header = opening + text
            to = _TO.search(header)
            if to is not None and to.group(1).startswith(RECIPIENT):
                yield from tape.space()
                last = yield from call_object(voice, to.group(1).removeprefix(RECIPIENT))
                voice.write(last)
                voice.end()
                yield from tape.space()
            elif _channel(header) == "analysis":
                sink = self._thoughts(voice)
            tape.forget()
        except MalformedError:
            voice.give_up()
        return (yield from tape.flow(_BORDERS, sink))

    def before_content(self, opening: Opening) -> Shape:
        final = Row((Marker(CHANNEL), Literal("final"), Marker(MESSAGE)))
        return NOTHING if opening is Opening.BEHIND else Row((_analysis(opening), final))

    def before_calls(self, opening: Opening) -> Shape:
        if opening is not Opening.BEHIND:
            return _analysis(opening)
        return Row((Marker(END), Marker(START), Literal(ROLE)))

    def shape(self, tools: Sequence[Tool], most: int | None) -> Shape:
        """Describe one call: the format has one a turn, whatever `most` allows."""
        del most
        return OneOf(tuple(_call_shape(tool) for tool in tools))


def _channel(header: str) -> str:
    found = _CHANNEL.search(header)
    return "" if found is None else found.group(1)


def _analysis(opening: Opening) -> Shape:
    rest = Row((Free(END), Marker(END), Marker(START), Literal(ROLE)))
    if opening is Opening.INSIDE:
        return rest
    return optional(Row((Marker(CHANNEL), Literal("analysis"), Marker(MESSAGE), rest)))


def _call_shape(tool: Tool) -> Shape:
    return Row(
        (
            Marker(CHANNEL),
            Literal(f"commentary to={RECIPIENT}{tool.name} "),
            Marker(CONSTRAIN),
            Literal("json"),
            Marker(MESSAGE),
            JsonValue(object_schema(tool)),
        )
    )
