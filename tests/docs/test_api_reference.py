"""The reference of the API is the routes' own."""

from __future__ import annotations

from tests.docs.api_reference import PAGE, page


def test_the_reference_of_the_api_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.docs.api_reference"
