"""Writes docs/api.md from the table of routes and the models of their bodies: `python -m tests.docs.api_reference`.

Verbs, paths and words are those of the handlers, members and bounds those of what validates them; nothing is written twice. A test
holds the file against this.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from superfluid_head.api.anthropic.schemas import CountRequest, MessagesRequest
from superfluid_head.api.direct import Handler
from superfluid_head.api.fleet import DrainRequest
from superfluid_head.api.ollama.embed import EmbedBody
from superfluid_head.api.ollama.schemas import ChatBody, GenerateBody, ShowBody
from superfluid_head.api.prefixes import PrefixRequest
from superfluid_head.api.responses.schemas import ResponsesRequest
from superfluid_head.api.schemas.chat import ChatRequest
from superfluid_head.api.schemas.common import NEVER, BodyModel
from superfluid_head.api.schemas.completions import CompletionRequest
from superfluid_head.api.schemas.embeddings import EmbeddingsRequest
from superfluid_head.api.schemas.tokens import DetokenizeRequest, TokenizeRequest
from superfluid_head.app import routes
from superfluid_head.dashboard.pages import DashboardEndpoint
from tests.unit.head_api.conftest import Bench

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"

BODIES: dict[str, type[BaseModel] | None] = {
    "/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest, "/v1/embeddings": EmbeddingsRequest,
    "/v1/messages": MessagesRequest, "/v1/messages/count_tokens": CountRequest, "/v1/responses": ResponsesRequest,
    "/v1/responses/{response}/cancel": None, "/api/chat": ChatBody, "/api/generate": GenerateBody, "/api/show": ShowBody,
    "/api/embed": EmbedBody, "/api/embeddings": EmbedBody, "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest,
    "/v1/prefixes": PrefixRequest, "/v1/sessions/{session}/qos": None, "/v1/fleet/nodes/{node}/drain": DrainRequest,
    "/v1/fleet/nodes/{node}/undrain": None,
}  # fmt: skip
"""The model of the body of every route that takes one, or None where it has none of its own."""

INTRO = """# API reference

Made from the code by `python -m tests.docs.api_reference`; do not edit. What the members mean, what streams look like and which
errors there are is told in [HTTP](http.md); this page lists every route and every member that a body is read for.

- Every body is a JSON object. A member that is `null` is absent. A member with a wrong type or outside of its bounds is a 400 that names it.
- **Refused**: known members of the dialect that are not honoured here. A value that changes nothing is taken, any other is a 400 by name.
- **Without effect**: members that change nothing about the answer, taken with any value. Members that nobody knows are ignored and logged once.
"""

_BOUNDS = {"minimum": "≥ {}", "maximum": "≤ {}", "exclusiveMinimum": "> {}", "exclusiveMaximum": "< {}",
           "minLength": "at least {} characters", "maxLength": "at most {} characters",
           "minItems": "at least {} items", "maxItems": "at most {} items"}  # fmt: skip


def shape(part: dict[str, Any], known: dict[str, Any]) -> str:
    """Say in words what a part of a JSON schema takes."""
    if "$ref" in part:
        return shape(known[part["$ref"].rpartition("/")[2]], known)
    if "const" in part:
        return f"`{part['const']}`"
    if "enum" in part:
        return ", ".join(f"`{value}`" for value in part["enum"])
    some = [each for each in part.get("anyOf", part.get("oneOf", ())) if each.get("type") != "null"]
    if some:
        return " or ".join(dict.fromkeys(shape(each, known) for each in some))
    kind = str(part.get("type", "any"))
    if kind == "array":
        kind = f"list of {shape(part.get('items', {}), known)}"
    bounds = [words.format(part[name]) for name, words in _BOUNDS.items() if name in part]
    return ", ".join([kind, *bounds])


def default_of(part: dict[str, Any], *, is_required: bool) -> str:
    if is_required:
        return "required"
    value = part.get("default")
    return "" if value is None or value == [] else f"`{json.dumps(value)}`"


def members(model: type[BaseModel]) -> Iterator[str]:
    """The rows of a body's table, by name."""
    schema = model.model_json_schema(by_alias=True)
    known, required = schema.get("$defs", {}), schema.get("required", ())
    yield from ("", "| member | takes | default |", "|---|---|---|")
    for name, part in sorted(schema.get("properties", {}).items()):
        default = default_of(part, is_required=name in required)
        yield f"| `{name}` | {shape(part, known)} | {default} |"
    if issubclass(model, BodyModel):
        for title, names in (
            ("Refused", {**NEVER, **model.refused}),
            ("Without effect", model.accepted),
        ):
            if names:
                yield from ("", f"{title}: {', '.join(f'`{name}`' for name in sorted(names))}.")


def route(verbs: tuple[str, ...], path: str, handler: Handler) -> Iterator[str]:
    """Everything about one route."""
    path = path.replace(":path", "")
    words = inspect.getdoc(handler)
    assert words, f"{path}: its handler has no words"
    yield from ("", f"## {', '.join(verb for verb in verbs if verb != 'HEAD')} {path}", "", words)
    model = BODIES[path] if "POST" in verbs else None
    if model is not None:
        yield from members(model)


def page() -> str:
    """The whole text."""
    bench = Bench()
    try:
        found = routes(bench.head)
    finally:
        bench.workers.close()
    served = [each for each in found if not isinstance(getattr(each[2], "__self__", 0), DashboardEndpoint)]  # fmt: skip
    return INTRO + "\n".join(line for each in served for line in route(*each)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
