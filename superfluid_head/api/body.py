"""A request's body as a checked JSON object: bounded while it arrives, strict where Python's parser is lax.

Owns the byte limit (judged before and while the body arrives), the deadline, and what JSON may hold: no NaN or
Infinity, no number that overflows, no unpaired surrogate, no deep nesting. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from pydantic_core import from_json
from starlette.requests import Request

from superfluid_core.limits import HttpLimits
from superfluid_head.api.errors import ApiError, invalid, too_large

PATH_CHARS_MAX = 100
VALUES_MAX = 1_000_000
STRINGS_MAX = 200_000
CONTAINERS_MAX = 50_000
COUNTED_BYTES_MIN = 65_536
SCALARS = frozenset((int, float, bool, type(None)))
OVERFLOWN = frozenset((math.inf, -math.inf))


class ClientGoneError(Exception):
    """Raised when the client closed the connection before it was answered."""


async def read_object(request: Request, limits: HttpLimits) -> dict[str, Any]:
    """Read the body of `request`. Raises ApiError (400, 408, 413, 415) or ClientGoneError."""
    data = await read_body(request, limits)
    if len(data) < COUNTED_BYTES_MIN:
        return parse_object(data, limits.json_depth_max)
    # each step of it holds the interpreter for a few milliseconds at most; between them the event loop has its turns
    return await asyncio.to_thread(parse_object, data, limits.json_depth_max)


async def read_body(request: Request, limits: HttpLimits) -> bytes:
    """Read the bytes of the body. Raises ApiError (408, 413, 415) or ClientGoneError."""
    _judge_headers(request.headers, limits)
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


async def _read(request: Request, bytes_max: int) -> bytes:
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
            return b"".join(chunks)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name.lstrip('-')} is not a JSON number")


def parse_object(data: bytes, depth_max: int) -> dict[str, Any]:
    """Parse and check. Raises ApiError 400.

    The quick parser takes a tenth of the time for a large text, and this is the event loop's; what it refuses is parsed again by the
    one that says why.
    """
    if len(data) >= COUNTED_BYTES_MIN:
        _count(data)
    try:
        value = from_json(data.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    except ValueError:
        value = _parse(data)
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    _check_values(value, depth_max)
    return value


def _parse(data: bytes) -> Any:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise invalid("the body is not valid UTF-8", code="invalid_json") from None
    if not text.strip():
        raise invalid("the body is empty; a JSON object is needed", code="invalid_json")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None
    except json.JSONDecodeError as error:
        words = f"the body is not valid JSON: {error.msg} at character {error.pos}"
        raise invalid(words, code="invalid_json") from None
    except ValueError:
        raise invalid(
            "the body holds a number that JSON does not know", code="invalid_json"
        ) from None


def _count(data: bytes) -> None:
    """Refuse what would hold the event loop while it is parsed: counted by plain searches, which do not."""
    if _is_small(data, data):
        return
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    if bare.count(b'"') > 2 * STRINGS_MAX or not _is_small(bare, b"".join(bare.split(b'"')[::2])):
        raise invalid("the body holds too many values", code="invalid_json")


def _is_small(data: bytes, outside: bytes) -> bool:
    """Whether `data`, of which `outside` is what stands outside of strings, is parsed in a moment."""
    return (
        data.count(b'"') <= 2 * STRINGS_MAX
        and outside.count(b"[") + outside.count(b"{") <= CONTAINERS_MAX
        and outside.count(b",") <= VALUES_MAX
    )


def _check_values(root: dict[str, Any], depth_max: int) -> None:
    """Walk the value without recursion and refuse what must not go further, naming where it is."""
    stack: list[tuple[Any, str, int]] = [(root, "", 1)]
    seen = 0
    while stack:
        value, path, depth = stack.pop()
        if depth > depth_max:
            raise invalid(f"the body is nested deeper than {depth_max}", code="invalid_json")
        seen += len(value)
        if seen > VALUES_MAX:
            raise invalid("the body holds too many values", code="invalid_json")
        for item, where in _looked_at(value, path):
            if isinstance(item, dict | list):
                stack.append((item, where[:PATH_CHARS_MAX], depth + 1))
            elif type(item) is not int:
                _check_leaf(item, where)


def _looked_at(value: dict[str, Any] | list[Any], path: str) -> Iterator[tuple[Any, str]]:
    """Yield what needs a look and where it is; names of members are looked at here."""
    if isinstance(value, dict):
        for name, item in value.items():
            _check_text(name, path or None)
            yield item, f"{path}.{name}" if path else name
        return
    are_scalars = set(map(type, value)) <= SCALARS
    if are_scalars and OVERFLOWN.isdisjoint(value):
        return
    for index, item in enumerate(value):
        if not are_scalars or item in OVERFLOWN:
            yield item, f"{path}[{index}]"


def _check_leaf(value: Any, path: str) -> None:
    if isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, float) and not math.isfinite(value):
        raise invalid("the number is too large", param=path[:PATH_CHARS_MAX], code="invalid_type")


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
