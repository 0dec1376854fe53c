"""Long texts of a JSON body, read apart from it and in slices: what a parser does in one go holds the interpreter for as long.

Owns where texts begin and end in bytes that may be no JSON at all, and how they are put back. A body that breaks off or escapes
wrongly is left as it is, for the parser to say what is wrong with it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from superfluid_head.api.errors import invalid, not_json
from superfluid_head.text.pace import Pace

LONG_BYTES_MIN = 1 << 17
SLICE_BYTES = 1 << 16
# plain bytes are looked for after every run of escapes, without trying other ways first: twice as fast where both alternate
_INSIDE = re.compile(rb'[^"\\]*+(?:(?:(?:\\[^u])++|(?:\\u[0-9a-fA-F]{4})++)[^"\\]*+)*+')
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_COLON = re.compile(rb"[ \t\r\n]*+:")
_CONTINUED = range(0x80, 0xC0)
"""Bytes of a character of UTF-8 after its first."""


@dataclass(slots=True)
class LongTexts:
    """A body with a name in the place of each long text; `broken` ones hold unpaired surrogates."""

    body: bytes
    whole: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)


def set_apart(data: bytes, pace: Pace) -> LongTexts:
    """Read the texts of over LONG_BYTES_MIN bytes. Raises ApiError 400 for one that is no JSON, and for a member's name so long."""
    parts: list[bytes] = []
    found = LongTexts(data)
    mark, taken, at = secrets.token_hex(8), 0, 0
    while (quote := data.find(b'"', at)) >= 0:
        cuts = _cuts(data, quote + 1, pace)
        if cuts is None:
            return LongTexts(data)
        at = cuts[-1] + 1
        if cuts[-1] - cuts[0] > LONG_BYTES_MIN:
            if _COLON.match(data, at):
                raise invalid("the name of a member is too long", code="invalid_json")
            name = f"{mark}-{len(parts)}"
            text = "".join(_pieces(data, cuts, pace))
            (found.whole if _is_whole(text, pace) else found.broken)[name] = text
            parts += [data[taken : quote + 1], name.encode("ascii")]
            taken = cuts[-1]
    found.body = b"".join([*parts, data[taken:]])
    return found


def _cuts(data: bytes, start: int, pace: Pace) -> list[int] | None:
    """Find where a text may be cut, its ends included; None where it has no end that is one."""
    cuts = [start]
    while True:
        at, end = cuts[-1], min(len(data), cuts[-1] + SLICE_BYTES)
        stop = _inside(data, at, end)
        if data[stop : stop + 1] == b'"':
            return [*cuts, stop]
        while stop > at and stop < len(data) and data[stop] in _CONTINUED:
            stop -= 1
        if stop == at or stop == len(data):
            return None
        cuts.append(stop)
        pace.rest()


def _inside(data: bytes, at: int, end: int) -> int:
    """Find how far a text goes on, and no escape is cut; `end` at most."""
    if data.find(b'"', at, end) < 0 and data.find(b"\\u", at, end) < 0:
        part = data[at:end]
        return end - (len(part) - len(part.rstrip(b"\\"))) % 2
    match = _INSIDE.match(data, at, end)
    return at if match is None else match.end()


def _pieces(data: bytes, cuts: list[int], pace: Pace) -> Iterator[str]:
    """Read slices; half a pair of surrogates at the end of one is kept for the next."""
    kept = ""
    for start, end in pairwise(cuts):
        try:
            text = kept + json.loads(f'"{data[start:end].decode()}"')
        except ValueError as error:
            raise not_json(error, f"after byte {start}") from None
        if kept:
            text = _PAIR.sub(_joined, text, count=1)
        kept = text[-1:] if "\ud800" <= text[-1:] <= "\udbff" else ""
        yield text.removesuffix(kept)
        pace.rest()
    yield kept


def _joined(pair: re.Match[str]) -> str:
    return pair.group().encode("utf-16-le", "surrogatepass").decode("utf-16-le")


def _is_whole(text: str, pace: Pace) -> bool:
    """Whether no surrogate stands alone."""
    for start in range(0, len(text), SLICE_BYTES):
        try:
            text[start : start + SLICE_BYTES].encode()
        except UnicodeEncodeError:
            return False
        pace.rest()
    return True


def put_back(root: dict[str, Any], texts: Mapping[str, str], pace: Pace) -> None:
    """Put texts where their names stand in a parsed body."""
    left = len(texts)
    stack: list[Any] = [root]
    while stack and left:
        value = stack.pop()
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in list(items):
            if isinstance(item, dict | list):
                stack.append(item)
            elif isinstance(item, str) and item in texts:
                value[key] = texts[item]
                left -= 1
        pace.rest()
