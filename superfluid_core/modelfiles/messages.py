"""Conversations as chat templates expect them, from conversations as the API has them.

Owns the differences between the two: null members are absent ones, a missing answer is an empty
one, tool arguments are objects, lists of text parts are joined where a template knows only texts.
It must not know the API's errors nor special tokens. The idea: what means the same in the API must
render the same (case O-14), so it is made the same before any template sees it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, nodes

PART_SEPARATOR = "\n"


@dataclass(frozen=True, slots=True)
class ContentShape:
    """What a template does with content: walks over parts, and whether it takes texts as well."""

    walks_parts: bool = False
    takes_texts: bool = True


def content_shape(environment: Environment, source: str) -> ContentShape:
    """Read a template's tree: a loop over `content` means parts, a test `is string` texts too."""
    tree = environment.parse(source)
    walks = any(_names_content(loop.iter) for loop in tree.find_all(nodes.For))
    tests = any(test.name in ("string", "iterable") for test in tree.find_all(nodes.Test))
    return ContentShape(walks_parts=walks, takes_texts=tests or not walks)


def _names_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False


def prepared(messages: Sequence[Mapping[str, Any]], shape: ContentShape) -> list[dict[str, Any]]:
    """Copy messages into the one form that templates see."""
    return [_message(message, shape) for message in messages]


def _message(message: Mapping[str, Any], shape: ContentShape) -> dict[str, Any]:
    made = {key: value for key, value in message.items() if value is not None}
    made["content"] = _content(made.get("content", ""), shape)
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [_call(call) if isinstance(call, Mapping) else call for call in calls]
    else:
        made.pop("tool_calls", None)
    return made


def _content(content: Any, shape: ContentShape) -> Any:
    if isinstance(content, str):
        return content if shape.takes_texts else [{"type": "text", "text": content}]
    if not isinstance(content, list | tuple) or shape.walks_parts:
        return content
    texts = [
        part.get("text") or part.get("refusal") or "" if isinstance(part, Mapping) else part
        for part in content
    ]
    if all(isinstance(text, str) for text in texts):
        return PART_SEPARATOR.join(texts)
    return content


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Turn arguments from text, as the API has them, into the object that templates walk over."""
    made = {key: value for key, value in call.items() if value is not None}
    function = made.get("function")
    if isinstance(function, Mapping):
        function = {key: value for key, value in function.items() if value is not None}
        function["arguments"] = _arguments(function.get("arguments", {}))
        made["function"] = function
    return made


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
