"""Events as bytes: one line of ASCII that every client reads as what was told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluid_head.api.sse import event

TEXTS = st.text(st.characters(exclude_categories=())) | st.text(
    'a\u2028\u2029\x85\x0b\x1c\x7f"\\\n\U0001f600é', max_size=9
)
PAYLOADS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(PAYLOADS)
def test_an_event_is_one_ascii_line_that_reads_back_as_what_was_told(payload: Any) -> None:
    data = event(payload)
    assert data.isascii()
    line, end = data[:-2].decode(), data[-2:]
    assert (line[:6], end, line.splitlines()) == ("data: ", b"\n\n", [line])
    assert json.loads(line[6:]) == payload


@pytest.mark.parametrize("text", ["\u2028", "é", "\ud800", "\U0001f600", "plain", "\x00\x1f"])
def test_characters_are_escaped_as_the_standard_library_does(text: str) -> None:
    assert event({"a": text}) == b"data: " + json.dumps({"a": text}, separators=(",", ":")).encode() + b"\n\n"  # fmt: skip
