"""A request's body as a checked JSON object: bounded while it arrives, strict where Python's parser is lax.

Owns the byte limit (judged before and while the body arrives), the deadline, and what JSON may hold: no NaN or
Infinity, no number that overflows, no unpaired surrogate, no deep nesting. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from starlette.requests import Request

from superfluid_core.limits import HttpLimits
from superfluid_head.api.errors import ApiError, invalid, too_large

PATH_CHARS_MAX = 100
VALUES_MAX = 1_000_000


class ClientGoneError(Exception):
    """Raised when the client closed the connection before it was answered."""


async def read_object(request: Request, limits: HttpLimits) -> dict[str, Any]:
    """Read the body of `request`. Raises ApiError (400, 408, 413, 415) or ClientGoneError."""
    _judge_headers(request.headers, limits)
    try:
        async with asyncio.timeout(limits.body_ms / 1000):
            data = await _read(request, limits.body_bytes_max)
    except TimeoutError:
        raise ApiError(
            408,
            "the body did not arrive in time",
            code="request_timeout",
            is_body_unread=True,
        ) from None
    return parse_object(data, limits.json_depth_max)


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
    """Parse and check. Raises ApiError 400."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise invalid("the body is not valid UTF-8", code="invalid_json") from None
    if not text.strip():
        raise invalid("the body is empty; a JSON object is needed", code="invalid_json")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None
    except json.JSONDecodeError as error:
        words = f"the body is not valid JSON: {error.msg} at character {error.pos}"
        raise invalid(words, code="invalid_json") from None
    except ValueError:
        raise invalid(
            "the body holds a number that JSON does not know", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    _check_values(value, depth_max)
    return value


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
        if isinstance(value, dict):
            for name, item in value.items():
                where = f"{path}.{name}" if path else name
                _check_text(name, path or None)
                if isinstance(item, dict | list):
                    stack.append((item, where[:PATH_CHARS_MAX], depth + 1))
                else:
                    _check_leaf(item, where)
        else:
            for index, item in enumerate(value):
                if isinstance(item, dict | list):
                    stack.append((item, f"{path}[{index}]"[:PATH_CHARS_MAX], depth + 1))
                elif type(item) is not int:
                    _check_leaf(item, f"{path}[{index}]")


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
