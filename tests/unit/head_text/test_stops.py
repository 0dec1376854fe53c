"""Stop strings: the result depends on the text alone, and nothing of a stop string ever gets out early."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_head.text.stops import Match, StopMatcher


def whole(text: str, stops: tuple[str, ...]) -> Match | None:
    """The definition: earliest start, then first listed."""
    found = [
        Match(text.find(stop), text.find(stop) + len(stop), index)
        for index, stop in enumerate(stops)
        if stop in text
    ]
    return min(found, key=lambda match: (match.start, match.order), default=None)


def in_pieces(text: str, stops: tuple[str, ...], cuts: list[int]) -> Match | None:
    matcher = StopMatcher(stops)
    borders = sorted({0, len(text), *[min(cut, len(text)) for cut in cuts]})
    for start, end in itertools.pairwise(borders):
        match = matcher.push(text[start:end])
        expected = whole(text, stops)
        assert matcher.released <= (len(text) if expected is None else expected.start)
        if match is not None:
            return match
    return matcher.finish()


letters = st.text("ab", max_size=14)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple)


@settings(max_examples=300, deadline=None)
@given(letters, stop_lists, st.lists(st.integers(0, 14), max_size=6))
def test_every_split_finds_what_the_whole_text_holds(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    assert in_pieces(text, stops, cuts) == whole(text, stops)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (("DEFGHIJ",), "ABCDEFGHIJK", Match(3, 10, 0)),
        (("cd", "abcdef"), "abcdef", Match(0, 6, 1)),
        (("cd", "abcdef"), "abcdX", Match(2, 4, 0)),
        (("cd", "abcdef"), "abcd", Match(2, 4, 0)),
        (("ab", "abc"), "abc", Match(0, 2, 0)),
        (("abc", "ab"), "abc", Match(0, 3, 0)),
        (("abc", "ab"), "abx", Match(0, 2, 1)),
        (("aab",), "aaab", Match(1, 4, 0)),
        (("x",), "", None),
    ],
)
def test_the_earliest_start_wins_and_ties_go_to_the_first_listed(
    stops: tuple[str, ...], text: str, expected: Match | None
) -> None:
    assert in_pieces(text, stops, list(range(len(text)))) == expected
    assert in_pieces(text, stops, []) == expected


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.push("the E") is None
    assert matcher.released == 4
    assert matcher.push("xE") is None
    assert matcher.released == 6
    assert matcher.push("N") is None
    assert matcher.released == 6
    assert matcher.finish() is None
    assert matcher.released == 8


def test_a_match_that_ends_before_the_minimum_does_not_count_but_one_that_reaches_over_it_does() -> (
    None
):
    matcher = StopMatcher(("ab",))
    assert matcher.push("ab", armed=False) is None
    assert matcher.push("a", armed=False) is None
    assert matcher.released == 2
    assert matcher.push("b") == Match(2, 4, 0)
