"""A model's chat template: conversations to the text, and then to the ids, of a prompt.

Owns the sandbox in which a template runs and the promise that only the template's own words become
control tokens (case O-05; how is told in marks.py). It must not know the API nor which model it
serves. The idea: a template is a stranger's program run on other strangers' data, so what it cannot
do is an `InvalidRequestError` with its own words, never a failure of the server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from superfluid_core.clock import SystemClock
from superfluid_core.errors import ErrorCode, InvalidRequestError, ModelFilesError
from superfluid_core.modelfiles.marks import Marker, rewritten, strings_of, unused_characters
from superfluid_core.modelfiles.messages import content_shape, prepared
from superfluid_core.modelfiles.template_bounds import (
    BoundedEnvironment,
    Budget,
    TemplateTooBusyError,
    budgeted,
)
from superfluid_core.modelfiles.tokenizer import Tokenizer

SOURCE_CHARS_MAX = 1 << 20
WORDS_MAX = 500
PROBE = "Qzxvj"
"""Stands in for what users say: no template says it."""
PROBES = (("user",), ("system", "user", "assistant", "user"), ("user", "assistant", "user"))
PROBE_STEPS_MAX = 10_000
PROBE_CHARS_MAX = 1 << 18
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
)
_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text in which user data is still marked."""

    marked: str
    mark: str

    @property
    def text(self) -> str:
        return self.marked.replace(self.mark, "")

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Encode: the template's special tokens as ids, everything else as ordinary text."""
        pieces = [
            (piece if special is not None else piece.replace(self.mark, ""), special)
            for piece, special in tokenizer.split(self.marked)
        ]
        kept = [(piece, special) for piece, special in pieces if piece]
        return tokenizer.encode_pieces([kept])[0]


@dataclass(frozen=True, slots=True)
class TemplateSources:
    """A chat template, and the one to use instead when tools are given (some models have it)."""

    plain: str
    with_tools: str | None = None


class ChatTemplate:
    """A compiled template. Safe to share between threads.

    `specials` are the special tokens of the vocabulary: without them user data is not guarded.
    """

    def __init__(
        self,
        source: str | TemplateSources,
        *,
        bos: str,
        eos: str,
        specials: Sequence[str] = (),
        wall_s: Callable[[], int] | None = None,
    ) -> None:
        sources = TemplateSources(source) if isinstance(source, str) else source
        self.source = sources.plain
        self.tools_source = sources.with_tools or sources.plain
        self._words = {"bos_token": bos, "eos_token": eos}
        self._marker = Marker(specials)
        environment = _environment(wall_s or SystemClock().wall_s)
        self._plain = _compiled(environment, sources.plain)
        self._with_tools = (
            self._plain
            if sources.with_tools is None
            else _compiled(environment, sources.with_tools)
        )
        self._shape = content_shape(environment, sources.plain)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        budget: Budget | None = None,
    ) -> Rendered:
        """Render a conversation; raises InvalidRequestError with the template's own words.

        Where a `budget` is given and does not suffice, TemplateTooBusyError is raised instead: with the usual one it might.
        `continue_final_message`: the prompt ends within the last message, right after its content.
        """
        given: dict[str, Any] = {
            "messages": prepared(messages, self._shape),
            "tools": list(tools) if tools else None,
            "kwargs": dict(kwargs or {}),
        }
        _refuse_reserved(given["kwargs"])
        texts = list(strings_of(given))
        mark, end = unused_characters([self.source, *texts], 2)
        if any(map(self._marker.touches, texts)):
            given = {
                key: rewritten(value, lambda text: self._marker.broken(text, mark))
                for key, value in given.items()
            }
        if continue_final_message:
            _append_to_last(given["messages"], end)
        template = self._with_tools if tools else self._plain
        text = self._run(
            template,
            given,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            budget=budget,
        )
        return Rendered(_cut(text, end) if continue_final_message else text, mark)

    def own_pieces(self, tokenizer: Tokenizer) -> list[str]:
        """Find what stands between special tokens in conversations about anything: the template's own words."""
        found: dict[str, None] = {}
        for roles in PROBES:
            messages = [{"role": role, "content": PROBE} for role in roles]
            with suppress(InvalidRequestError, TemplateTooBusyError):
                rendered = self.render(messages, budget=Budget(PROBE_STEPS_MAX, PROBE_CHARS_MAX))
                pieces = [
                    piece for piece, special in tokenizer.split(rendered.text) if special is None
                ]
                found |= dict.fromkeys(piece for piece in pieces if PROBE not in piece)
        return list(found)

    def _run(
        self,
        template: jinja2.Template,
        given: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        budget: Budget | None,
    ) -> str:
        try:
            with budgeted(budget):
                return template.render(
                    **given["kwargs"],
                    **self._words,
                    messages=given["messages"],
                    tools=given["tools"],
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                )
        except _REFUSALS as cause:
            if budget is not None and isinstance(cause, TemplateTooBusyError):
                raise
            words = str(cause)[:WORDS_MAX] or type(cause).__name__
            raise _refusal(words) from cause


def _refusal(words: str) -> InvalidRequestError:
    return InvalidRequestError(words, param="messages", code=ErrorCode.TEMPLATE_ERROR)


def _refuse_reserved(kwargs: Mapping[str, Any]) -> None:
    for name in kwargs:
        if name in RESERVED or not name.isidentifier():
            raise InvalidRequestError(
                f"chat_template_kwargs may not set {name[:60]!r}", param="chat_template_kwargs"
            )


def _append_to_last(messages: list[dict[str, Any]], end: str) -> None:
    """Write `end` after the last message's content, to find the place again when rendered."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, str) and content:
        last["content"] = content + end
    elif isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        last["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + end}]
    else:
        raise _refusal("continue_final_message needs a last message with text content")


def _cut(text: str, end: str) -> str:
    at = text.rfind(end)
    if at < 0:
        raise _refusal("this chat template does not show the last message, so it cannot continue")
    return text[:at].replace(end, "")


def _compiled(environment: BoundedEnvironment, source: str) -> jinja2.Template:
    if len(source) > SOURCE_CHARS_MAX:
        raise ModelFilesError("the chat template is too long")
    try:
        with budgeted():
            return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as cause:
        raise ModelFilesError(f"the chat template is not usable: {str(cause)[:200]}") from cause


def _environment(wall_s: Callable[[], int]) -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )

    def strftime_now(pattern: str) -> str:
        return datetime.fromtimestamp(wall_s(), UTC).astimezone().strftime(pattern)

    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.add_filter("tojson", _to_json)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass it by place
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - templates pass it by place
) -> str:
    """Write JSON without HTML escapes; a mark stays the one character that it is."""
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return _unescape_marks(text) if ensure_ascii else text


def _unescape_marks(text: str) -> str:
    for code in range(0xFDD0, 0xFDF0):
        text = text.replace(f"\\u{code:04x}", chr(code))
    return text


class _GenerationTag(Extension):
    """`{% generation %}` marks answers for training; here it is a block like any text."""

    tags = {"generation"}  # noqa: RUF012 - the library declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
