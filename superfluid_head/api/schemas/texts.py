"""A member that holds texts in any of four forms: a text, several, token ids, or several lists of these.

Both routes that take raw texts read it here, in the same words. Knows no model: ids are held against a vocabulary where one is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from superfluid_head.api.errors import ApiError, invalid

Ids = tuple[int, ...]


def texts_of(value: Any, name: str, texts_max: int | None = None) -> list[str | Ids]:
    """Read the member `name`. Raises ApiError 400."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong("a string, an array of strings, of token ids, or of arrays of token ids", name)
    if not value:
        raise wrong("the array is empty", name)
    kinds = set(map(type, value))
    if kinds == {int}:
        return [tuple(value)]
    if texts_max is not None and len(value) > texts_max:
        raise wrong(f"{len(value)} texts; at most {texts_max} are taken at once", name)
    if kinds == {str}:
        return list(value)
    if kinds == {list}:
        return [_ids(item, f"{name}[{index}]") for index, item in enumerate(value)]
    words = "an array holds strings, or token ids, or arrays of token ids, not several kinds"
    raise wrong(words, name)


def _ids(item: list[Any], name: str) -> Ids:
    if set(map(type, item)) != {int}:
        raise wrong("no token ids", name)
    return tuple(item)


def wrong(words: str, name: str) -> ApiError:
    """Make the refusal of a member."""
    return invalid(f"{name}: {words}", param=name, code="invalid_type")


def are_known(ids: Sequence[int], vocabulary: int) -> bool:
    """Whether all ids are of the vocabulary."""
    return not ids or (min(ids) >= 0 and max(ids) < vocabulary)
