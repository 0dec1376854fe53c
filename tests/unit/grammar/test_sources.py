"""The text that the compiler gets: one form of every kind, and complaints in plain words."""

from __future__ import annotations

import json

import pytest

from superfluid_core.errors import ErrorCode, InvalidRequestError
from superfluid_core.grammar.sources import json_rule, plain_words, regex_rule, source_of
from superfluid_core.session import Grammar, GrammarKind


@pytest.mark.parametrize(
    ("pattern", "rule"),
    [
        ("^a+$", "/a+/"),
        ("a/b", r"/a\/b/"),
        (r"a\/b", r"/a\/b/"),
        (r"a\\/b", r"/a\\\/b/"),
        (r"cost \$", r"/cost \$/"),
        (r"\\$", r"/\\/"),
        ("a\nb", r"/a\nb/"),
    ],
)
def test_a_pattern_is_for_the_whole_text_and_keeps_its_slashes(pattern: str, rule: str) -> None:
    assert regex_rule(pattern) == rule


def test_no_schema_can_ask_the_compiler_to_be_lenient() -> None:
    rule = json_rule({"type": "object", "x-guidance": {"lenient": True}})
    options = json.loads(rule.removeprefix("%json "))["x-guidance"]
    assert "lenient" not in options
    assert options["whitespace_pattern"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "[" * 5_000])
def test_a_schema_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        source_of(Grammar(GrammarKind.JSON_SCHEMA, text))
    assert caught.value.code is ErrorCode.INVALID_GRAMMAR


def test_complaints_lose_their_places_and_never_list_the_vocabulary() -> None:
    found = plain_words('at 2(8): unknown special token: "<|x|>"; following special tokens are')
    assert found == 'unknown special token: "<|x|>"'
    assert plain_words("regex parse error:\n  (a\n  ^\nerror: unclosed group") == "unclosed group"
    assert plain_words("NoExtensionBias\n<non-verbose/>") == "it allows no text"
    assert plain_words("") == "it cannot be compiled"
