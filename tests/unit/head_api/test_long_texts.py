"""Long texts that are not plain are read in slices, and no body reads otherwise for it."""

from __future__ import annotations

import json

import pytest

from superfluid_head.api.body import parse_object
from superfluid_head.api.errors import ApiError
from superfluid_head.api.long_texts import LONG_BYTES_MIN, SLICE_BYTES, put_back, set_apart
from superfluid_head.text.pace import Pace, Unpaced

QUOTES = '\\"' * LONG_BYTES_MIN


class Steps(Pace):
    """Counts the pauses that it is offered."""

    count = 0

    def rest(self) -> None:
        self.count += 1


def test_long_texts_leave_the_body_and_come_back_where_they_were() -> None:
    text = f'{{"a":[1,{{"b":"{QUOTES}"}},"c"],"d":"{QUOTES}é","e":"short"}}'
    found = set_apart(text.encode(), Unpaced())
    assert len(found.body) < 200
    assert len(found.whole) == 2
    value = json.loads(found.body)
    put_back(value, found.whole, Unpaced())
    assert value == json.loads(text) == parse_object(text.encode(), 64)


def test_a_long_text_is_read_in_steps() -> None:
    pace = Steps()
    set_apart(f'{{"a":"{QUOTES}"}}'.encode(), pace)
    assert pace.count >= 2 * len(QUOTES) // SLICE_BYTES


@pytest.mark.parametrize("at", [0, SLICE_BYTES - 3, 3 * SLICE_BYTES, len(QUOTES)])
def test_a_lone_surrogate_in_a_long_text_is_named(at: int) -> None:
    at -= at % 2
    for lone in ("\\ud83d", "\\ude00", "\\ude00\\ud83d"):
        body = f'{{"a":["{QUOTES[:at]}{lone}{QUOTES[at:]}"]}}'
        with pytest.raises(ApiError, match="unpaired surrogate") as caught:
            parse_object(body.encode(), 64)
        assert caught.value.param == "a[0]"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (f'{{"{QUOTES}" : 1}}', "the name of a member is too long"),
        (f'{{"a":"{QUOTES}', "not valid JSON"),
        (f'{{"a":"{QUOTES}\\', "not valid JSON"),
        (f'{{"a":"{QUOTES}\\u12"}}', "not valid JSON"),
        (f'{{"a":"{QUOTES}\\x"}}', "not valid JSON"),
        (f'{{"a":"{QUOTES}\n"}}', "not valid JSON"),
        (f'{{"a":"{QUOTES}" 1}}', "not valid JSON"),
        (f'["{QUOTES}"]', "must be a JSON object"),
    ],
)
def test_a_body_with_a_long_text_is_refused_in_words_too(body: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        parse_object(body.encode(), 64)
    assert caught.value.status == 400


def test_bytes_that_are_no_characters_are_refused_in_a_long_text() -> None:
    with pytest.raises(ApiError, match="not valid UTF-8"):
        parse_object(b'{"a":"' + QUOTES.encode() + b'\xff"}', 64)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_surrogates_as_bytes_are_no_utf8_wherever_a_slice_ends(at: int) -> None:
    # found by reading: a pair of them whose halves lay in two slices was read as the character that it stands for
    start = b"\\n" * (SLICE_BYTES // 2 - 2) + b"a" * at
    with pytest.raises(ApiError, match="not valid UTF-8"):
        parse_object(b'{"a":"' + start + b"\xed\xa0\xbd\xed\xb8\x80" + QUOTES.encode() + b'"}', 64)


def test_a_control_character_is_named_also_at_the_start_of_a_long_text() -> None:
    with pytest.raises(ApiError, match="Invalid control character"):
        parse_object(b'{"a":"\x00' + "é".encode() + QUOTES.encode() + b'"}', 64)


def test_a_long_name_is_one_however_far_its_colon_is() -> None:
    with pytest.raises(ApiError, match="the name of a member is too long"):
        parse_object(f'{{"{QUOTES}"{" " * SLICE_BYTES}: 1}}'.encode(), 64)
