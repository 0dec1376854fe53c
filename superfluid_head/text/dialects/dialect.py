"""A model's dialect: how it writes calls and how it reasons, by name; makes the reader and the shapes of one request.

Owns the tables of names that flags and `detect.py` choose from. A dialect is a value without state; a reader belongs to one
choice of one request (http_api C7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from superfluid_head.text.dialects.events import Event, Tool, Voice
from superfluid_head.text.dialects.formats import Format
from superfluid_head.text.dialects.harmony import Harmony
from superfluid_head.text.dialects.jsoncalls import JsonCalls, Mistral, Section
from superfluid_head.text.dialects.literals import Gemma, Pythonic
from superfluid_head.text.dialects.shape import NOTHING, Row, Shape
from superfluid_head.text.dialects.tagged import Glm, Tagged
from superfluid_head.text.dialects.tape import MalformedError, Steps, Tape
from superfluid_head.text.dialects.thinking import TAGS, Opening

HARMONY = "harmony"
_DSML = "｜DSML｜"


def _dsml(block: str) -> Tagged:
    return Tagged(
        blocks=(f"<{_DSML}{block}>", f"<{_DSML}function_calls>", f"<{_DSML}tool_calls>"),
        block_close=f"</{_DSML}{block}>",
        call=(f'<{_DSML}invoke name="', '">', f"</{_DSML}invoke>"),
        parameter=(f'<{_DSML}parameter name="', '">', f"</{_DSML}parameter>"),
        typed='" string="',
    )


def _deepseek(*, is_fenced: bool) -> Section:
    return Section(
        opening="<｜tool▁calls▁begin｜>",
        closing="<｜tool▁calls▁end｜>",
        begin="<｜tool▁call▁begin｜>",
        separator="<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
        kind="function" if is_fenced else "",
        fence=("```json", "```") if is_fenced else ("", ""),
    )


FORMATS: dict[str, Format] = {
    "hermes": JsonCalls(("<tool_call>",), "</tool_call>"),
    "qwen3_coder": Tagged(
        blocks=("<tool_call>",),
        block_close="</tool_call>",
        call=("<function=", ">", "</function>"),
        parameter=("<parameter=", ">", "</parameter>"),
        strips=True,
        is_block_optional=True,
    ),
    "llama3_json": JsonCalls(at_start=("<|python_tag|>", "{"), key="parameters"),
    "pythonic": Pythonic(),
    "mistral": Mistral(is_list=True),
    "mistral_v11": Mistral(is_list=False),
    "deepseek_v3": _deepseek(is_fenced=True),
    "deepseek_v31": _deepseek(is_fenced=False),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "glm": Glm(),
    "kimi_k2": Section(
        opening="<|tool_calls_section_begin|>",
        closing="<|tool_calls_section_end|>",
        begin="<|tool_call_begin|>",
        separator="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        prefix="functions.",
    ),
    "granite": JsonCalls(("<|tool_call|>", "<tool_call>", "<function_call>"), is_list=True),
    "granite_v31": JsonCalls(("<tool_call>", "<|tool_call|>", "<function_call>"), is_list=True),
    "minimax_m2": Tagged(
        blocks=("<minimax:tool_call>",),
        block_close="</minimax:tool_call>",
        call=('<invoke name="', '">', "</invoke>"),
        parameter=('<parameter name="', '">', "</parameter>"),
    ),
    "gemma4": Gemma(),
}
CALL_PARSERS = (*FORMATS, HARMONY)
REASONING_PARSERS = (*TAGS, HARMONY)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a reader has to know of its request. `calls_max` None: as many as the model likes."""

    tools: Mapping[str, Tool] = field(default_factory=dict)
    calls_max: int | None = None
    opening: Opening = Opening.FRESH
    singles: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Dialect:
    """Names of a tool-call format and of a way to mark reasoning; None: the model has none."""

    calls: str | None = None
    reasoning: str | None = None

    def _harmony(self) -> Harmony | None:
        if HARMONY not in (self.calls, self.reasoning):
            return None
        return Harmony(has_reasoning=self.reasoning == HARMONY)

    @property
    def markers(self) -> tuple[str, ...]:
        """All markup of this dialect, for finding out what of it the vocabulary has as single tokens."""
        harmony = self._harmony()
        found = () if harmony is None else harmony.markers
        if self.calls in FORMATS:
            found += FORMATS[self.calls].markers
        if self.reasoning in TAGS:
            found += TAGS[self.reasoning].markers
        return tuple(marker for marker in dict.fromkeys(found) if marker)

    @property
    def id_chars(self) -> int:
        """Length of call ids that the template prescribes, 0 for none."""
        return FORMATS[self.calls].id_chars if self.calls in FORMATS else 0

    @property
    def looks_back(self) -> bool:
        """Whether `opening` depends on the end of the prompt."""
        return self.reasoning in TAGS or self._harmony() is not None

    def opening(self, tail: str) -> Opening:
        """Judge by the end of the rendered prompt where the answer starts (http_api Q3)."""
        harmony = self._harmony()
        if harmony is not None:
            return harmony.opening(tail)
        return TAGS[self.reasoning].opening(tail) if self.reasoning in TAGS else Opening.BEHIND

    def continued(self, text: str) -> Opening:
        """Judge by the text of the message that is to be continued."""
        if self.reasoning in TAGS:
            return TAGS[self.reasoning].continued(text)
        return Opening.BEHIND

    def reader(self, reading: Reading) -> TextReader | None:
        """Make the reader of one choice; None where there is nothing to look for."""
        if (
            self._harmony() is None
            and not self._may_reason(reading)
            and not self._may_call(reading)
        ):
            return None
        return TextReader(self, reading)

    def _may_reason(self, reading: Reading) -> bool:
        return self.reasoning in TAGS and reading.opening is not Opening.BEHIND

    def _may_call(self, reading: Reading) -> bool:
        return self.calls in FORMATS and bool(reading.tools)

    def before_content(self, opening: Opening) -> Shape:
        """Describe what a constrained answer may or must have before its content."""
        harmony = self._harmony()
        if harmony is not None:
            return harmony.before_content(opening)
        return TAGS[self.reasoning].before_content(opening) if self.reasoning in TAGS else NOTHING

    def call_shape(self, tools: Sequence[Tool], opening: Opening, most: int | None) -> Shape | None:
        """Describe an answer of one to `most` calls, from its first character; None without a format for calls."""
        harmony = self._harmony()
        if harmony is not None:
            return Row((harmony.before_calls(opening), harmony.shape(tools, most)))
        if self.calls not in FORMATS:
            return None
        return Row((self.before_content(opening), FORMATS[self.calls].shape(tools, most)))


class TextReader:
    """Reads one choice: reasoning first, then content and calls. `feed` and `finish` mutate it."""

    def __init__(self, dialect: Dialect, reading: Reading) -> None:
        self._tape = Tape(reading.singles)
        self._voice = Voice(self._tape, reading.tools, reading.calls_max)
        self._steps = _read(dialect, reading, self._voice)

    def feed(self, text: str, *, is_single: bool = False) -> list[Event]:
        """Take more text; `is_single` when it is one token that is a marker."""
        self._tape.push(text, is_single=is_single)
        next(self._steps)
        return self._voice.drain()

    def finish(self) -> list[Event]:
        """End the text: what was held comes out."""
        self._tape.close()
        for _ in self._steps:
            raise AssertionError("a reader asks for more than the whole text")
        return self._voice.drain()


def _read(dialect: Dialect, reading: Reading, voice: Voice) -> Steps[None]:
    if HARMONY in (dialect.calls, dialect.reasoning):
        yield from Harmony(has_reasoning=dialect.reasoning == HARMONY).read(voice, reading.opening)
        return
    if dialect.reasoning in TAGS:
        yield from TAGS[dialect.reasoning].read(voice, reading.opening)
    if dialect.calls in FORMATS and reading.tools:
        yield from _calls(FORMATS[dialect.calls], voice)
    else:
        yield from voice.tape.flow((), voice.content)


def _calls(form: Format, voice: Voice) -> Steps[None]:
    """Read content and the blocks in it. White space behind a block belongs to it."""
    tape = voice.tape
    if form.at_start:
        tape.keep()
        yield from tape.space()
        start = yield from tape.starts(*form.at_start)
        if start is None:
            voice.give_up()
        else:
            yield from _block(form, start, voice)
    while (found := (yield from tape.flow(form.openings, voice.content))) is not None:
        tape.keep(found)
        yield from _block(form, found, voice)


def _block(form: Format, opening: str, voice: Voice) -> Steps[None]:
    try:
        yield from form.read(opening, voice)
    except MalformedError:
        voice.give_up()
    else:
        voice.tape.forget()
        yield from voice.tape.space()
