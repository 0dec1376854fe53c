"""The span of a request at the head's door: begun with what the client's `traceparent` says, ended with what was answered.

Only requests that make something are traced; reads of health, metrics and state are not. Ids, codes and route templates, never a
path, a query or a body.
"""

from __future__ import annotations

from starlette.types import Scope

from superfluid_core.tracing.context import Field, Span, Tracer, parse_traceparent
from superfluid_head.access.keys import Principal

SERVER_ERROR = 500


def begin_request(tracer: Tracer | None, scope: Scope, began_ns: int) -> Span | None:
    """Begin the span of a POST; None when it is not traced."""
    if tracer is None or scope["method"] != "POST":
        return None
    given = [value for name, value in scope["headers"] if name == b"traceparent"]
    parent = parse_traceparent(given[0].decode("latin-1")) if len(given) == 1 else None
    fields: dict[str, Field] = {
        "http.request.method": "POST",
        "superfluid.request_id": scope["state"]["request_id"],
    }
    return tracer.root("POST", parent, fields, began_ns)


def end_request(span: Span | None, scope: Scope, route: str, status: int) -> None:
    """End it. `status` is 0 when the client left before there was one."""
    if span is None:
        return
    principal: Principal | None = scope["state"].get("principal")
    fields: dict[str, Field] = {
        "http.route": route,
        "http.response.status_code": status or 499,
        "superfluid.tenant": "" if principal is None else principal.name,
    }
    span.rename(f"POST {route}")
    span.note(fields)
    span.end(str(status) if status >= SERVER_ERROR else "")


def trace_id(span: Span | None) -> str | None:
    """Name the trace for a line in the log."""
    return None if span is None else f"{span.context.trace_id:032x}"
