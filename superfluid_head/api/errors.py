"""The one place where error codes become HTTP statuses and OpenAI-shaped bodies, and back into events of a stream.

Everything that can go wrong is either a `SuperfluidError` (the product's vocabulary) or an `ApiError` (HTTP's own:
routes, verbs, media types, keys). Words in bodies are ours; nothing of a node's address, a path or a class name gets in.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from superfluid_core.errors import ErrorCode, InvalidRequestError, SuperfluidError
from superfluid_head.access.keys import Principal

RETRY_AFTER_S_MAX = 120
MESSAGE_CHARS_MAX = 600
LINGER_BYTES_MAX = 32 * 1024 * 1024
LINGER_S = 2.0

INVALID = "invalid_request_error"
SERVER = "server_error"
FORBIDDEN = "permission_error"

# code -> (status, type); codes that are missing here are our own failures: 500.
STATUSES: dict[ErrorCode, tuple[int, str]] = {
    ErrorCode.INVALID_REQUEST: (400, INVALID),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: (400, INVALID),
    ErrorCode.UNSUPPORTED: (400, INVALID),
    ErrorCode.INVALID_GRAMMAR: (400, INVALID),
    ErrorCode.TEMPLATE_ERROR: (400, INVALID),
    ErrorCode.MODEL_NOT_FOUND: (404, INVALID),
    ErrorCode.QUEUE_FULL: (429, "rate_limit_error"),
    ErrorCode.SLO_UNATTAINABLE: (429, "rate_limit_error"),
    ErrorCode.RATE_LIMIT_EXCEEDED: (429, "rate_limit_error"),
    ErrorCode.CONCURRENCY_LIMIT_EXCEEDED: (429, "rate_limit_error"),
    ErrorCode.SESSION_LIMIT: (503, SERVER),
    ErrorCode.NO_WORKER: (503, SERVER),
    ErrorCode.MODEL_LOADING: (503, SERVER),
    ErrorCode.DRAINING: (503, SERVER),
    ErrorCode.OVERLOADED: (503, SERVER),
    ErrorCode.DEADLINE_EXCEEDED: (408, INVALID),
    ErrorCode.CANCELLED: (499, INVALID),
    ErrorCode.TIMEOUT: (504, SERVER),
    ErrorCode.NODE_LOST: (503, SERVER),
    ErrorCode.FENCED: (503, SERVER),
    ErrorCode.PREEMPT_FAILED: (503, SERVER),
    ErrorCode.MOVES_EXHAUSTED: (503, SERVER),
    ErrorCode.PROTOCOL_ERROR: (503, SERVER),
    ErrorCode.UNAUTHORIZED: (503, SERVER),
    ErrorCode.FINGERPRINT_MISMATCH: (503, SERVER),
}

# What a stranger is told about failures whose own words name nodes, addresses or files.
PUBLIC_WORDS: dict[ErrorCode, str] = {
    ErrorCode.NODE_LOST: "the node that served this request was lost",
    ErrorCode.FENCED: "the node that served this request was lost",
    ErrorCode.MOVES_EXHAUSTED: "the request was moved too often",
    ErrorCode.PROTOCOL_ERROR: "a node failed",
    ErrorCode.UNAUTHORIZED: "no node accepts this head",
    ErrorCode.FINGERPRINT_MISMATCH: "no node serves this build of the model",
    ErrorCode.LANE_FAULT: "the model failed on this request",
    ErrorCode.NAN_LOGITS: "the model produced numbers that are not finite",
    ErrorCode.CONFIG: "internal error",
    ErrorCode.MODEL_FILES: "internal error",
    ErrorCode.INTERNAL: "internal error",
}


@dataclass
class ApiError(Exception):
    """An answer that is not a success. Raised anywhere before the first byte of the response."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    type: str = INVALID
    headers: Mapping[str, str] = field(default_factory=dict)
    is_body_unread: bool = False
    """The request's body is still arriving: the reply closes the connection."""

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message[:MESSAGE_CHARS_MAX] or "error",
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, body: Mapping[str, Any] | None = None) -> Response:
        """Return the answer; `body` is that of a dialect with a shape of its own."""
        content = json.dumps(self.body() if body is None else body, allow_nan=False).encode()
        kind = _ClosingResponse if self.is_body_unread else Response
        return kind(content, self.status, dict(self.headers), "application/json")


class _ClosingResponse(Response):
    """Swallows a bounded rest of the request's body behind the reply, so that the reply is not lost to a reset."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        headers = [*self.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        left = LINGER_BYTES_MAX
        try:
            async with asyncio.timeout(LINGER_S):
                while left > 0:
                    message = await receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        break
                    left -= len(message.get("body", b""))
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Refuse a request that can never succeed as it stands."""
    return ApiError(400, message, code=code, param=param)


def not_json(error: ValueError, place: str = "") -> ApiError:
    """Refuse a body that its parser refused; `place` says in words where that was."""
    if isinstance(error, UnicodeDecodeError):
        return invalid("the body is not valid UTF-8", code="invalid_json")
    cause = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    words = f"the body is not valid JSON: {cause} {place}".rstrip()
    return invalid(words, code="invalid_json")


def from_error(error: SuperfluidError) -> ApiError:
    """Return the HTTP form of a failure."""
    status, kind = STATUSES.get(error.code, (500, SERVER))
    code = None if error.code is ErrorCode.INVALID_REQUEST else error.code.value
    headers: dict[str, str] = {}
    if status in (429, 503, 504):
        headers["Retry-After"] = str(retry_after_s(error.retry_after_ms))
    if error.code is ErrorCode.DRAINING:
        headers["Connection"] = "close"
    is_hopeless = error.code is ErrorCode.CONCURRENCY_LIMIT_EXCEEDED or status >= 500
    if error.code is ErrorCode.DEADLINE_EXCEEDED or (is_hopeless and not error.retryable):
        headers["x-should-retry"] = "false"
    return ApiError(
        status,
        PUBLIC_WORDS.get(error.code, error.message),
        code=code,
        param=error.param if isinstance(error, InvalidRequestError) else None,
        type=kind,
        headers=headers,
    )


def retry_after_s(hint_ms: int | None) -> int:
    """Whole seconds within what clients heed: 0 is ignored and more than 120 makes them give up."""
    if hint_ms is None:
        return 1
    return min(RETRY_AFTER_S_MAX, max(1, -(-hint_ms // 1000)))


def require_admin(principal: Principal) -> None:
    """Raise ApiError 403 unless the caller may use admin routes."""
    if not principal.admin:
        raise ApiError(403, "this needs an admin key", code="admin_required", type=FORBIDDEN)


def internal() -> ApiError:
    """Our bug: says nothing but its request id."""
    return ApiError(500, "internal error", code="internal_error", type=SERVER)


def not_found() -> ApiError:
    return ApiError(404, "no such route", code="unknown_url")


def model_not_found(name: str) -> ApiError:
    shown = name[:100].encode("ascii", "backslashreplace").decode()
    return ApiError(
        404, f"The model '{shown}' does not exist.", code="model_not_found", param="model"
    )


def model_not_allowed(name: str) -> ApiError:
    """Refuse a model that is there, but not for this key."""
    shown = name[:100].encode("ascii", "backslashreplace").decode()
    return ApiError(
        403,
        f"This key may not use the model '{shown}'.",
        code="model_not_allowed",
        param="model",
        type=FORBIDDEN,
    )


def wrong_verb(headers: Mapping[str, str]) -> ApiError:
    return ApiError(405, "this route knows other verbs", code="method_not_allowed", headers=headers)


def unauthorized() -> ApiError:
    return ApiError(
        401,
        "Missing or wrong API key.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {limit_bytes} bytes",
        code="request_too_large",
        is_body_unread=True,
    )
