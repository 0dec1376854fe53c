"""Grammars against a vocabulary: what they let through, what they refuse and how soon, what is kept of them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from superfluid_core.engine.sim import NumberedTexts
from superfluid_core.errors import ErrorCode, InvalidRequestError
from superfluid_core.grammar.compiler import KEPT_MAX, Grammars, Vocabulary, vocabulary_of
from superfluid_core.session import Grammar, GrammarKind

TEXTS = NumberedTexts(300)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: vocabulary_of(TEXTS, 304))


def schema(value: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def accepts(grammars: Grammars, grammar: Grammar, text: str) -> bool:
    matcher = grammars.matcher(grammar)
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}  # fmt: skip


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (schema(PERSON), '{"name": "é", "age": 3}', '{"name": "x", "age": -1}'),
        (schema(TREE), '{"v":1,"next":{"v":2,"next":null}}', '{"v":1,"next":{"v":2}}'),
        (Grammar(GrammarKind.JSON_OBJECT, ""), '{"a": [1, {}]}', "[1]"),
        (Grammar(GrammarKind.REGEX, "^[0-9]{2}/x$"), "12/x", "1/x"),
        (Grammar(GrammarKind.LARK, 'start: "a" B\nB: /b+/'), "abb", "a"),
        (schema({"enum": ["x", 1, None]}), "null", "2"),
    ],
)
def test_a_grammar_lets_through_what_it_says_and_nothing_else(
    grammars: Grammars, grammar: Grammar, good: str, bad: str
) -> None:
    assert accepts(grammars, grammar, good)
    assert not accepts(grammars, grammar, bad)


def test_blank_space_in_json_is_bounded(grammars: Grammars) -> None:
    pretty = json.dumps({"name": "x", "age": 3}, indent=4)
    assert accepts(grammars, schema(PERSON), pretty)
    assert not accepts(grammars, schema(PERSON), '{  "name": "x", "age": 3}')
    assert not accepts(grammars, schema(PERSON), '{\n\n"name": "x", "age": 3}')


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (schema({"type": "strin"}), "strin"),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"properties": {"foo": "bar"}}), "schema"),
        (schema({"type": "string", "pattern": "([a-z"}), "unclosed"),
        (schema({"$ref": "#/$defs/none"}), "none"),
        (schema({"$ref": "http://127.0.0.1:1/x"}), "fetch"),
        (schema({"uniqueItems": True, "type": "array"}), "uniqueItems"),
        (schema({"oneOf": [{"type": "string"}, {"maxLength": 3, "type": "string"}]}), "oneOf"),
        (Grammar(GrammarKind.REGEX, "*"), "repetition"),
        (Grammar(GrammarKind.REGEX, r"(a)\1"), "backreferences"),
        (Grammar(GrammarKind.REGEX, "(?=a)b"), "look-around"),
        (Grammar(GrammarKind.LARK, "start: nobody"), "nobody"),
        (Grammar(GrammarKind.LARK, "start: s\ns: s"), "no text"),
        (schema({"$ref": "#"}), "no text"),
        (schema(False), "object"),
    ],
)
def test_a_wrong_grammar_is_refused_with_the_fault_in_its_words(
    grammars: Grammars, grammar: Grammar, words: str
) -> None:
    refusal = grammars.refusal(grammar)
    assert refusal is not None
    assert refusal.code is ErrorCode.INVALID_GRAMMAR
    assert words in refusal.message
    assert len(refusal.message) <= 200
    assert "\n" not in refusal.message


BOMBS = (
    *("(a+)+b", "(a*)*b", "((a{0,1000}){0,1000}){0,1000}", "(.*a){50}", "(x+x+)+y"),
    *("[ab]*a[ab]{300}", "(a?){1000}a{1000}", "(?:a|b|c){1000}.*", r"\p{L}{1,1000}", "(a|aa|aaa)*"),
    *(".*.*.*.*.*.*.*=.*", "(.{0,1000}x){100}", "([a-z]{1,100},?){1,1000}"),
)


@pytest.mark.parametrize("pattern", BOMBS)
def test_a_pattern_made_to_explode_is_judged_in_half_a_second_of_work(
    grammars: Grammars, pattern: str
) -> None:
    before = time.process_time()
    grammars.refusal(Grammar(GrammarKind.REGEX, pattern))
    assert time.process_time() - before < 0.5


def test_a_huge_enum_is_refused_or_compiled_in_a_second_of_work(grammars: Grammars) -> None:
    before = time.process_time()
    assert grammars.refusal(schema({"enum": [f"value {n}" for n in range(10_000)]})) is None
    grammars.refusal(schema({"enum": [f"another {n} value" for n in range(30_000)]}))
    assert time.process_time() - before < 1.5


def test_what_is_kept_is_bounded_by_count_and_size_and_is_compiled_once() -> None:
    few = Grammars(lambda: vocabulary_of(TEXTS, 300), kept_max=3)
    for number in range(8):
        few.matcher(schema({"const": number}))
        few.matcher(schema({"const": number}))
    assert (few.compiled, len(few)) == (8, 3)
    assert few.has(schema({"const": 7}))
    assert not few.has(schema({"const": 0}))
    small = Grammars(lambda: vocabulary_of(TEXTS, 300), kept_bytes_max=100_000)
    for number in range(8):
        small.matcher(schema({"const": number}))
    assert small.kept_bytes <= 100_000
    assert len(small) < KEPT_MAX


def test_ids_without_a_text_and_control_ids_are_never_allowed_as_text(grammars: Grammars) -> None:
    bits = grammars.matcher(Grammar(GrammarKind.REGEX, "(?s:.)*")).compute_bitmask()
    allowed = [token for token in range(304) if bits[token >> 3] >> (token & 7) & 1]
    assert 299 in allowed
    assert all(token < 256 for token in allowed if token != 299)


def test_a_vocabulary_without_an_end_cannot_be_constrained() -> None:
    endless = Grammars(lambda: Vocabulary((b"a", b"b"), (), frozenset()))
    with pytest.raises(InvalidRequestError):
        endless.matcher(Grammar(GrammarKind.REGEX, "a"))


def test_a_long_bounded_text_of_long_tokens_does_not_run_out_of_states() -> None:
    tokens = (*(bytes((byte,)) for byte in range(256)), b"a" * 20, b"")
    long_tokens = Grammars(lambda: Vocabulary(tokens, (257,), frozenset({257})))
    matcher = long_tokens.matcher(schema({"type": "string", "maxLength": 50_000}))
    matcher.consume_token(ord('"'))
    for _ in range(1_500):
        matcher.compute_bitmask()
        assert matcher.consume_token(256), matcher.get_error()
    assert not matcher.is_error()
