"""A stream folds to exactly the whole answer, however the engine cuts its text: content, reasoning, calls, finish, usage, logprobs.

Random texts of every dialect in random tokens, with random stops, budgets and choices, are asked for in both modes at the bodies of
the API. `SUPERFLUID_TEST_MODES=10000` is the long version.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from superfluid_head.text.dialects.detect import DialectChoice
from tests.cases.talk import both
from tests.unit.head_api.conftest import SEPARATOR, Bench
from tests.unit.head_api.test_messages import both as both_messages
from tests.unit.head_api.test_responses import both as both_responses
from tests.unit.head_text.dialect_samples import SAMPLES
from tests.unit.head_text.dialect_samples import TOOLS as SAMPLE_TOOLS

EXAMPLES = int(os.environ.get("SUPERFLUID_TEST_MODES", "60"))
PARSERS = sorted({(s.dialect.calls or "none", s.dialect.reasoning or "none") for s in SAMPLES})
# A sample of each that makes calls or has reasoning, where there is one.
SPOKEN = {
    (s.dialect.calls or "none", s.dialect.reasoning or "none"): s.text
    for s in SAMPLES
    if s.calls or s.reasoning
}
TOOLS = [
    {"type": "function", "function": {"name": tool.name, "parameters": {"type": "object"}}}
    for tool in SAMPLE_TOOLS.values()
]
FILLING = (
    "word",
    " ",
    "\\n",
    "é",
    "😀",
    "{",
    "}",
    '"',
    "STOP",
    "ST",
    "<",
    "</",
    "0",
    "\u00df",
    "日本",
)


@contextmanager
def opened(dialects: DialectChoice) -> Iterator[Bench]:
    bench = Bench(dialects=dialects)
    try:
        yield bench
    finally:
        bench.workers.close()


def tokens(draw: random.Random, text: str) -> list[str | bytes | int]:
    """Cut the bytes of a text anywhere, with a hidden control token here and there."""
    data, at, cut = text.encode(), 0, []
    largest = draw.choice((1, 2, 4, 9, 40))
    pieces: list[str | bytes | int] = []
    while at < len(data):
        size = draw.randint(1, largest)
        cut.append(data[at : at + size])
        at += size
    for piece in cut:
        pieces.append(piece)
        if draw.random() < 0.01:
            pieces.append(SEPARATOR)
    return pieces


def text_of(draw: random.Random, parsers: tuple[str, str], *, may_tear: bool = True) -> str:
    """A sample of the dialect, whole or torn, with other words before and behind it."""
    samples = [
        s.text
        for s in SAMPLES
        if (s.dialect.calls or "none", s.dialect.reasoning or "none") == parsers
    ]
    words = "".join(draw.choices(FILLING, k=draw.randint(0, 8)))
    text = draw.choice(samples)
    if may_tear and draw.random() < 0.3:
        text = text[: draw.randint(0, len(text))]
    if draw.random() < 0.2:
        text += draw.choice(samples)
    return draw.choice((text, words + text, text + words, words))


def limits(draw: random.Random, size: int) -> dict[str, Any]:
    members: dict[str, Any] = {}
    if draw.random() < 0.3:
        members["stop"] = draw.choice(
            (["STOP"], ["</"], ["STOP", "word"], ["\n\n"], [" "], ["日本x"])
        )
        members["include_stop_str_in_output"] = draw.random() < 0.3
    if draw.random() < 0.4:
        members["max_tokens"] = draw.randint(1, size + 1)
    if draw.random() < 0.3:
        members |= {"logprobs": True, "top_logprobs": draw.choice((0, 2))}
    if draw.random() < 0.2:
        members["n"] = 2
    if draw.random() < 0.1:
        members["skip_special_tokens"] = False
    return members


@pytest.mark.slow
@pytest.mark.parametrize("parsers", PARSERS, ids="+".join)
def test_a_streamed_chat_is_the_whole_one_however_tokens_are_cut(parsers: tuple[str, str]) -> None:
    draw = random.Random(f"{parsers} {EXAMPLES}")
    calls, reasoning = parsers
    heard = 0
    with opened(DialectChoice("none", calls, reasoning)) as bench:
        for number in range(max(1, EXAMPLES // len(PARSERS))):
            text = SPOKEN[parsers] if number == 0 else text_of(draw, parsers)
            pieces = tokens(draw, text)
            if number == 0:
                pieces = [piece for piece in pieces if piece != SEPARATOR]
            members = limits(draw, len(pieces)) if number else {}
            bench.fleet.say(*pieces)
            answers = both(bench, tools=TOOLS if calls != "none" else [], **members)
            chunks = [c for chunk in answers.chunks for c in chunk["choices"]]
            finishes = [c for c in chunks if c["finish_reason"] is not None]
            assert len(finishes) == members.get("n", 1)
            heard += sum(bool(m.calls or m.reasoning) for m in answers.messages)
    assert heard > 0


def lists_of(logprobs: dict[str, Any] | None) -> dict[str, Any]:
    """The lists that hold something: a stream without a token has none."""
    return {name: values for name, values in (logprobs or {}).items() if values}


def folded(bench: Bench, **members: Any) -> list[Any]:
    """The choices of a streamed completion, put together, and its usage."""
    response = bench.complete(**members, stream=True, stream_options={"include_usage": True})
    assert response.status_code == 200, response.text
    frames = response.content.split(b"\n\n")
    assert frames[-2:] == [b"data: [DONE]", b""]
    chunks = [json.loads(frame[6:]) for frame in frames[:-2]]
    found: dict[int, list[Any]] = {}
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            mine = found.setdefault(choice["index"], ["", None, {}])
            assert mine[1] is None
            mine[0] += choice["text"]
            mine[1] = choice["finish_reason"]
            for name, values in lists_of(choice["logprobs"]).items():
                mine[2].setdefault(name, []).extend(values)
    return [[found[index] for index in sorted(found)], chunks[-1]["usage"]]


@pytest.mark.slow
def test_a_streamed_completion_is_the_whole_one_however_tokens_are_cut() -> None:
    draw = random.Random(EXAMPLES)
    with opened(DialectChoice("none")) as bench:
        for _ in range(EXAMPLES // 4):
            pieces = tokens(draw, "".join(draw.choices(FILLING, k=draw.randint(0, 20))))
            members = limits(draw, len(pieces))
            members.pop("top_logprobs", None)
            if members.pop("logprobs", None):
                members["logprobs"] = draw.choice((0, 2))
            members["echo"] = "logprobs" not in members and draw.random() < 0.2
            bench.fleet.say(*pieces)
            response = bench.complete(**members)
            assert response.status_code == 200, response.text
            whole = response.json()
            choices = [
                [c["text"], c["finish_reason"], lists_of(c["logprobs"])] for c in whole["choices"]
            ]
            assert folded(bench, **members) == [choices, whole["usage"]]


# Dialects whose calls have the ids that the model wrote are left to chat: the folds here want ids that are drawn.
DRAWN_IDS = [parsers for parsers in PARSERS if not parsers[0].startswith(("kimi", "mistral"))]


@pytest.mark.slow
@pytest.mark.parametrize("parsers", DRAWN_IDS, ids="+".join)
def test_streamed_messages_and_responses_are_the_whole_ones(parsers: tuple[str, str]) -> None:
    draw = random.Random(f"{parsers} {EXAMPLES}")
    has_tools = parsers[0] != "none"
    functions: list[Any] = [tool["function"] for tool in TOOLS] if has_tools else []
    flat = [{"type": "function", "strict": False, **each} for each in functions]
    named = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
    with opened(DialectChoice("none", *parsers)) as bench:
        for _ in range(max(1, EXAMPLES // (3 * len(DRAWN_IDS)))):
            pieces = tokens(draw, text_of(draw, parsers))
            is_cut = draw.random() < 0.4
            budget = draw.randint(1, len(pieces) + 1) if is_cut else 4_000
            stops = ["STOP"] if draw.random() < 0.3 else []
            bench.fleet.say(*pieces)
            both_messages(bench, tools=named, max_tokens=budget, stop_sequences=stops)
            both_responses(bench, tools=flat, max_output_tokens=max(16, budget))
