"""One grammar for a whole answer: shapes of dialects, constraints, and the processes that judge them and can be killed."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from superfluid_core.engine.sim import NumberedTexts
from superfluid_core.errors import CapacityError, ErrorCode, InvalidRequestError
from superfluid_core.grammar.compiler import Grammars, Vocabulary, vocabulary_of
from superfluid_core.session import Grammar
from superfluid_head.text import grammar_check
from superfluid_head.text.constraints import (
    ANY_OBJECT,
    Choice,
    Constraint,
    JsonText,
    OwnGrammar,
    Pattern,
    judge_schema,
)
from superfluid_head.text.dialects.detect import DIALECTS
from superfluid_head.text.dialects.events import Tool
from superfluid_head.text.dialects.shape import (
    NOTHING,
    Free,
    Literal,
    Marker,
    OneOf,
    Repeat,
    Row,
    Shape,
)
from superfluid_head.text.dialects.thinking import Opening
from superfluid_head.text.grammar import compose
from superfluid_head.text.grammar_check import GrammarChecker

TEXTS = NumberedTexts(300)
SPECIALS = {"<think>": 297, "</think>": 298}
NUMBER = JsonText({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


def collect() -> Vocabulary:
    made = vocabulary_of(TEXTS, 300)
    return Vocabulary(made.tokens, made.eos_ids, frozenset({297, 298, 299}))


GRAMMARS = Grammars(collect)


def plain(text: str) -> int | None:
    return None


def accepts(grammar: Grammar, text: str | list[int]) -> bool:
    matcher = GRAMMARS.matcher(grammar)
    ids = list(text.encode()) if isinstance(text, str) else text
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("opening", "good", "bad"),
    [
        (Opening.FRESH, ['{"a": 1}', '<think>h < /x</think>\n\n{"a":1}'], ["x", "<think>x"]),
        (Opening.INSIDE, ['so</think>\n\n{"a": 1}'], ['{"a": 1}', "so</think>\n\nx"]),
        (Opening.BEHIND, ['{"a": 1}'], ['<think>x</think>\n\n{"a": 1}']),
    ],
)
def test_reasoning_comes_first_where_the_model_reasons(
    opening: Opening, good: list[str], bad: list[str]
) -> None:
    before = DIALECTS["qwen3"].before_content(opening)
    grammar = compose(NUMBER, plain, before=before)
    assert [accepts(grammar, text) for text in good] == [True] * len(good)
    assert [accepts(grammar, text) for text in bad] == [False] * len(bad)


def test_markup_that_is_a_special_token_is_that_id_and_nothing_else() -> None:
    before = DIALECTS["qwen3"].before_content(Opening.FRESH)
    grammar = compose(NUMBER, SPECIALS.get, before=before)
    body = list(b'\n\n{"a":1}')
    assert accepts(grammar, [297, *b"hm", 298, *body])
    assert accepts(grammar, body[2:])
    assert not accepts(grammar, [*b"<think>hm</think>", *body])
    assert not accepts(grammar, [297, *b"hm", *body])


TOOLS = [
    Tool("f", {"type": "object", "properties": {"c": {"enum": ["x"]}}, "required": ["c"]}),
    Tool("g", {"type": "object", "properties": {}}),
]


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_the_call_shapes_of_every_dialect_compile(name: str) -> None:
    for most in (1, 3, None):
        shape = DIALECTS[name].call_shape(TOOLS, Opening.FRESH, most)
        if shape is None:
            assert name == "seed_oss"
            continue
        assert GRAMMARS.refusal(compose(None, plain, instead=shape)) is None


def test_calls_may_stand_in_the_place_of_content_and_are_counted() -> None:
    calls = DIALECTS["hermes"].call_shape(TOOLS, Opening.BEHIND, 2)
    grammar = compose(NUMBER, plain, instead=calls)
    call = '<tool_call>\n{"name": "f", "arguments": {"c": "x"}}\n</tool_call>'
    assert accepts(grammar, '{"a": 1}')
    assert accepts(grammar, call)
    assert accepts(grammar, call + "\n" + call)
    assert not accepts(grammar, "\n".join([call] * 3))
    assert not accepts(grammar, '{"a": 1}' + call)
    assert not accepts(grammar, "hello")


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (Pattern("^[a-z]+/[0-9]$"), "ab/3", "ab"),
        (Choice(("yes", 'n"o\n')), 'n"o\n', "maybe"),
        (OwnGrammar('start: r0 "x"\nr0: /a+/'), "aax", "x"),
        (OwnGrammar('%llguidance {}\nstart: "x"'), "x", "y"),
        (ANY_OBJECT, '{"z": [null]}', "[]"),
    ],
)
def test_every_constraint_stands_alone_and_behind_something(
    constraint: Constraint, good: str, bad: str
) -> None:
    for before, head in ((NOTHING, ""), (Literal("> "), "> ")):
        grammar = compose(constraint, plain, before=before)
        assert accepts(grammar, head + good)
        assert not accepts(grammar, head + bad)


@pytest.mark.parametrize(
    ("shape", "good", "bad"),
    [
        (Row((Free("END"), Literal("END."))), ["END.", "a EN b END."], ["a.", "END"]),
        (Row((Literal("a"), Free("|"))), ["a", "abc"], ["ab|c"]),
        (Row((Free("|"), OneOf((Literal("|x"), Literal("|y"))))), ["|x", "ab|y"], ["a|b|x"]),
        (Repeat(Literal("a"), Literal(","), 0, 2), ["", "a", "a,a"], ["a,", "a,a,a"]),
        (Repeat(Literal("a"), Literal(","), 2), ["a,a", "a,a,a"], ["a", ""]),
        (Repeat(Literal("a"), Literal(","), 1, 1), ["a"], ["a,a"]),
        (Row((Marker("[x]"), Row((Literal("y"), Row(()))))), ["[x]y"], ["[x]"]),
    ],
)
def test_shapes_mean_what_they_say(shape: Shape, good: list[str], bad: list[str]) -> None:
    grammar = compose(None, plain, instead=Row((shape, Literal("!"))))
    ends = "!" if not isinstance(shape, Row) or not isinstance(shape.parts[-1], Free) else ""
    if not ends:
        grammar = compose(None, plain, instead=shape)
    assert [accepts(grammar, text + ends) for text in good] == [True] * len(good)
    assert [accepts(grammar, text + ends) for text in bad] == [False] * len(bad)


def test_a_constraint_that_does_not_fit_the_wire_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compose(Choice(tuple(f"{n:08}" for n in range(9_000))), plain)
    assert caught.value.code is ErrorCode.INVALID_GRAMMAR


def test_a_keyword_that_nobody_would_heed_is_named_and_a_property_of_its_name_is_not() -> None:
    judge_schema({"type": "object", "properties": {"nullable": {"type": "string"}}}, "s")
    judge_schema({"const": {"extends": 1}}, "s")
    wrong: list[Any] = [{"nullable": True}, {"items": {"divisibleBy": 2}}]
    for schema in (*wrong, {"anyOf": [{"extends": {}}]}):
        with pytest.raises(InvalidRequestError) as caught:
            judge_schema(schema, "s")
        assert caught.value.code is ErrorCode.INVALID_GRAMMAR
    deep: Any = {}
    for _ in range(40):
        deep = {"items": deep}
    with pytest.raises(InvalidRequestError):
        judge_schema(deep, "s")


# --- the processes


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(check_ms=400)
    yield made
    made.close()


def source(word: str) -> str:
    return f'%llguidance {{"no_forcing": true}}\nstart: "{word}"\n'


@pytest.mark.slow
def test_a_process_that_hangs_is_killed_and_only_its_request_fails(
    checker: GrammarChecker,
) -> None:
    async def main() -> None:
        await checker.check("k", collect, source("a"))
        (pid,) = checker.pids
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(InvalidRequestError) as caught:
            await checker.check("k", collect, source("b"))
        assert caught.value.code is ErrorCode.INVALID_GRAMMAR
        assert "too long" in caught.value.message
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        await checker.check("k", collect, source("c"))
        (other,) = checker.pids
        assert other != pid
        os.kill(other, signal.SIGKILL)
        with pytest.raises(InvalidRequestError) as caught:
            await checker.check("k", collect, source("d"))
        assert "memory" in caught.value.message
        await checker.check("k", collect, source("a"))
        await asyncio.gather(*(checker.check("k", collect, source(f"w{n}")) for n in range(8)))
        assert 1 <= len(checker.pids) <= grammar_check.CHILDREN_MAX

    asyncio.run(main())


@pytest.mark.slow
def test_what_was_said_is_remembered_and_the_line_is_bounded(checker: GrammarChecker) -> None:
    async def main() -> None:
        for _ in range(2):
            with pytest.raises(InvalidRequestError) as caught:
                await checker.check("k", collect, "start: nobody")
            assert "nobody" in caught.value.message
        checker._waiting = grammar_check.WAITING_MAX
        with pytest.raises(CapacityError):
            await checker.check("k", collect, source("new"))
        with pytest.raises(InvalidRequestError):
            await checker.check("k", collect, "start: nobody")

    asyncio.run(main())


@pytest.mark.slow
def test_a_head_with_thousands_of_connections_still_reaches_its_processes(
    checker: GrammarChecker,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2_048), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1_100)]
    try:
        asyncio.run(checker.check("k", collect, source("a")))
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
