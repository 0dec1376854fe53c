"""In which shape an error is told: each dialect's clients read their own, chosen by the route that was asked (http_api 1.1, 8, decisions 32).

Owns the bodies of errors of the dialects and which paths are theirs; status and headers are `errors.py`'s, and the same everywhere.
It knows paths and no endpoint, so it also serves what never reaches one: a missing key, an unknown route, a wrong verb.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from superfluid_head.api.errors import MESSAGE_CHARS_MAX, ApiError

ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PATH = "/api"
REQUEST_HEADER = "request-id"
"""Where Anthropic's clients look for the id of a request."""

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def reply(error: ApiError, scope: Scope) -> Response:
    """Return the answer in the shape of the route that was asked."""
    path = scope["path"]
    if is_under(path, ANTHROPIC_PATH):
        request = scope.get("state", {}).get("request_id")
        made = error.response(anthropic_body(error, request))
        if request:
            made.headers[REQUEST_HEADER] = request
        return made
    if is_under(path, OLLAMA_PATH):
        return error.response(ollama_body(error))
    return error.response()


def is_under(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")


def anthropic_body(error: ApiError, request: str | None) -> dict[str, Any]:
    """Make the body that the Anthropic clients read."""
    kind = ANTHROPIC_TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
    return {
        "type": "error",
        "error": {"type": kind, "message": words_of(error)},
        "request_id": request,
    }


def ollama_body(error: ApiError) -> dict[str, Any]:
    """Make the body that Ollama's clients read."""
    return {"error": words_of(error)}


def words_of(error: ApiError) -> str:
    return error.message[:MESSAGE_CHARS_MAX] or "error"
