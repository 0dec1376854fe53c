"""A request's body as a checked JSON object: bounded while it arrives, strict where Python's parser is lax.

Owns the byte limit (judged before and while the body arrives), the deadline, and what JSON may hold: no NaN or
Infinity, no number that overflows, no unpaired surrogate, no deep nesting. Knows no endpoint. A large body is parsed, checked and
made a value in a thread, in steps that hold the interpreter for a few milliseconds each: between them the event loop has its turns.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from pydantic_core import from_json
from starlette.requests import Request

from superfluid_core.limits import HttpLimits
from superfluid_head.api.errors import ApiError, invalid, not_json, too_large
from superfluid_head.api.long_texts import LongTexts, put_back, set_apart
from superfluid_head.text.pace import Pace, Unpaced

ARRIVED = "superfluid.arrived"
"""Where a scope says whether the whole body is here (a function): who reads it does not wait then."""
PATH_CHARS_MAX = 100
VALUES_MAX = 500_000
STRINGS_MAX = 65_536
CONTAINERS_MAX = 20_000
FEW_MAX = 50_000
"""Values that the slower parser reads in a moment."""
LARGE_BYTES_MIN = 65_536
SLICE_BYTES = 1 << 18
SCALARS = frozenset((int, float, bool, type(None)))
OVERFLOWN = frozenset((math.inf, -math.inf))

T = TypeVar("T")


class ClientGoneError(Exception):
    """Raised when the client closed the connection before it was answered."""


async def read_object(request: Request, limits: HttpLimits) -> dict[str, Any]:
    """Read the body of `request`. Raises ApiError (400, 408, 413, 415) or ClientGoneError."""
    return await read_as(request, limits, lambda value: value)


async def read_as(request: Request, limits: HttpLimits, read: Callable[[dict[str, Any]], T]) -> T:
    """Read the body of `request` and make a value of it with `read`, which may raise ApiError and must not touch the event loop.

    Raises ApiError (400, 408, 413, 415) or ClientGoneError.
    """
    parts, size = await _read_parts(request, limits)
    if size < LARGE_BYTES_MIN:
        return read(parse_object(b"".join(parts), limits.json_depth_max))

    def work() -> T:
        pace = Pace()
        data = b"".join(parts)  # new pages for 16 MiB take up to 20 ms; here nobody waits for them
        parts.clear()
        value = parse_object(data, limits.json_depth_max, pace)
        pace.rest()
        return read(value)

    return await asyncio.to_thread(work)


async def read_body(request: Request, limits: HttpLimits) -> bytes:
    """Read the bytes of the body. Raises ApiError (408, 413, 415) or ClientGoneError."""
    parts, size = await _read_parts(request, limits)
    if size < LARGE_BYTES_MIN:
        return b"".join(parts)
    return await asyncio.to_thread(b"".join, parts)


async def _read_parts(request: Request, limits: HttpLimits) -> tuple[list[bytes], int]:
    """Read the body as it comes, and count its bytes. Raises ApiError (408, 413, 415) or ClientGoneError."""
    _judge_headers(request.headers, limits)
    has_arrived = request.scope.get(ARRIVED)
    if has_arrived is not None and has_arrived():
        return await _read(request, limits.body_bytes_max)
    try:
        async with asyncio.timeout(limits.body_ms / 1000):
            return await _read(request, limits.body_bytes_max)
    except TimeoutError:
        raise ApiError(
            408,
            "the body did not arrive in time",
            code="request_timeout",
            is_body_unread=True,
        ) from None


def _judge_headers(headers: Mapping[str, str], limits: HttpLimits) -> None:
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise ApiError(415, "compressed bodies are not accepted", code="unsupported_media_type")
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media and media != "application/json" and not media.endswith("+json"):
        raise ApiError(415, "the body must be application/json", code="unsupported_media_type")
    length = headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > limits.body_bytes_max:
        raise too_large(limits.body_bytes_max)


async def _read(request: Request, bytes_max: int) -> tuple[list[bytes], int]:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > bytes_max:
            raise too_large(bytes_max)
        if chunk:
            chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks, size


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name.lstrip('-')} is not a JSON number")


def parse_object(data: bytes, depth_max: int, pace: Pace | None = None) -> dict[str, Any]:
    """Parse and check. Raises ApiError 400.

    There are two parsers. The quick one takes a tenth of the time for plain text, and lets no unpaired surrogate through; what it
    refuses is parsed again by the other one, which says why, and is itself the quicker one where text is not plain. Long texts that are
    not plain are read apart, in slices.
    """
    pace = pace or Unpaced()
    values, escapes = (0, 0) if len(data) < LARGE_BYTES_MIN else count_values(data, pace)
    holds_few = values <= FEW_MAX
    is_plain = len(data) < LARGE_BYTES_MIN or (escapes <= FEW_MAX and data.isascii())
    texts = LongTexts(data) if is_plain else set_apart(data, pace)
    data = texts.body
    has_checked_texts = is_plain or not holds_few
    try:
        if has_checked_texts:
            value = from_json(data.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
        else:
            value = _parse(data)
    except ValueError as error:
        if not holds_few:
            raise not_json(error) from None
        pace.rest()
        value, has_checked_texts = _parse(data), False
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    pace.rest()
    put_back(value, texts.broken, pace)
    _check_values(value, depth_max, pace, has_checked_texts=has_checked_texts and not texts.broken)
    put_back(value, texts.whole, pace)
    return value


def _parse(data: bytes) -> Any:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_json(error) from None
    if not text.strip():
        raise invalid("the body is empty; a JSON object is needed", code="invalid_json")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None
    except json.JSONDecodeError as error:
        raise not_json(error, f"at character {error.pos}") from None
    except ValueError:
        raise invalid(
            "the body holds a number that JSON does not know", code="invalid_json"
        ) from None


def count_values(data: bytes, pace: Pace) -> tuple[int, int]:
    """Count about how many values and escapes there are. Raises ApiError 400 for too many, before they are made."""
    quotes = containers = values = escapes = 0
    is_inside = False
    for part in _slices(data):
        escapes += part.count(b"\\")
        bare = part.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in part else part
        here = bare.count(b'"')
        quotes += here
        _judge_counts(quotes // 2, containers, values)
        outside = b"".join(bare.split(b'"')[is_inside::2])
        is_inside ^= bool(here % 2)
        containers += outside.count(b"[") + outside.count(b"{")
        values += outside.count(b",")
        _judge_counts(quotes // 2, containers, values)
        pace.rest()
    return values, escapes


def _judge_counts(strings: int, containers: int, values: int) -> None:
    if strings > STRINGS_MAX or containers > CONTAINERS_MAX or values > VALUES_MAX:
        raise invalid("the body holds too many values", code="invalid_json")


def _slices(data: bytes) -> Iterator[bytes]:
    """Cut a body where no escape is cut."""
    at = 0
    while at < len(data):
        part = data[at : at + SLICE_BYTES]
        part = part.rstrip(b"\\") or part
        at += len(part)
        yield part


def _check_values(
    root: dict[str, Any], depth_max: int, pace: Pace, *, has_checked_texts: bool
) -> None:
    """Walk the value without recursion and refuse what must not go further, naming where it is."""
    stack: list[tuple[Any, str, int]] = [(root, "", 1)]
    seen = 0
    while stack:
        value, path, depth = stack.pop()
        if depth > depth_max:
            raise invalid(f"the body is nested deeper than {depth_max}", code="invalid_json")
        seen += len(value)
        _judge_counts(0, 0, seen)
        pace.rest()
        for item, where in _looked_at(value, path):
            if isinstance(item, dict | list):
                stack.append((item, where[:PATH_CHARS_MAX], depth + 1))
            elif isinstance(item, str):
                if not has_checked_texts:
                    _check_text(item, where)
            elif isinstance(item, float) and not math.isfinite(item):
                words = "the number is too large"
                raise invalid(words, param=where[:PATH_CHARS_MAX], code="invalid_type")


def _looked_at(value: dict[str, Any] | list[Any], path: str) -> Iterator[tuple[Any, str]]:
    """Yield what needs a look and where it is; names of members are looked at here."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not name.isascii():
                _check_text(name, path or None)
            yield item, f"{path}.{name}" if path else name
        return
    are_scalars = set(map(type, value)) <= SCALARS
    if are_scalars and OVERFLOWN.isdisjoint(value):
        return
    for index, item in enumerate(value):
        if not are_scalars or item in OVERFLOWN:
            yield item, f"{path}[{index}]"


def _check_text(text: str, path: str | None) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = None if path is None else path[:PATH_CHARS_MAX].encode("ascii", "replace").decode()
        raise invalid(
            "the text holds an unpaired surrogate", param=shown, code="invalid_type"
        ) from None
