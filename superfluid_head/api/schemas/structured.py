"""The members that constrain a reply's text, in all their spellings, and the one constraint that they ask for (http_api 3.3, 3.5).

Owns which member is which and that a request has at most one. Shapes are judged here and in `text/constraints.py`, before anything
is compiled; every refusal has the code `invalid_schema` and names its member.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from superfluid_core.grammar.sources import invalid_grammar
from superfluid_head.api.errors import invalid
from superfluid_head.text.constraints import (
    ANY_OBJECT,
    SCHEMA_BYTES_MAX,
    Constraint,
    JsonText,
    judge_choice,
    judge_grammar,
    judge_pattern,
    judge_schema,
)

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
FORMATS = ("text", "json_object", "json_schema")
IGNORED = frozenset(("backend", "disable_fallback", "_backend", "_backend_was_auto"))

MEMBERS = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "grammar", "json_schema"),
)


def constraint_of(members: Mapping[str, Any]) -> Constraint | None:
    """Find the one constraint among `members`. Raises InvalidRequestError(INVALID_GRAMMAR) or ApiError 400."""
    found: dict[str, Constraint] = {}
    for name in MEMBERS:
        value = members.get(name)
        if value is None or value == "" or (value == {} and name == "structured_outputs"):
            continue
        made = _READERS[name](value, name)
        if made is not None:
            found[name] = made
    if len(found) > 1:
        first, second = list(found)[:2]
        raise invalid(f"{first} and {second} exclude each other", second, "unsupported_value")
    return next(iter(found.values()), None)


def _format(value: Any, param: str) -> Constraint | None:
    if not isinstance(value, dict):
        raise invalid_grammar(f"{param}: an object is needed", param)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise invalid_grammar(f"{param}: type is one of {', '.join(FORMATS)}", f"{param}.type")
    inner = value.get("json_schema")
    where = f"{param}.json_schema"
    if not isinstance(inner, dict):
        raise invalid_grammar(f"{where} is missing or no object", where)
    name = inner.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        words = "1 to 64 letters, digits, underscores, dots and dashes"
        raise invalid_grammar(f"{where}.name: {words}", f"{where}.name")
    if not isinstance(inner.get("strict"), bool | None):
        raise invalid_grammar(f"{where}.strict: true or false", f"{where}.strict")
    if "schema" not in inner:
        raise invalid_grammar(f"{where}.schema is missing", f"{where}.schema")
    return _schema(inner["schema"], f"{where}.schema")


def _schema(value: Any, param: str) -> JsonText:
    """Take a schema as a value or as its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise invalid_grammar(f"{param}: not JSON", param) from None
    made = judge_schema(value, param)  # bounds its depth: what follows recurses
    if len(json.dumps(value)) > SCHEMA_BYTES_MAX:
        raise invalid_grammar(f"{param}: larger than {SCHEMA_BYTES_MAX} bytes", param)
    return made


def _pattern(value: Any, param: str) -> Constraint:
    return judge_pattern(_text(value, param), param)


def _grammar(value: Any, param: str) -> Constraint:
    return judge_grammar(_text(value, param), param)


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise invalid_grammar(f"{param}: a string is needed", param)
    return value


def _choice(value: Any, param: str) -> Constraint:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise invalid_grammar(f"{param}: a list of strings is needed", param)
    return judge_choice(value, param)


def _object(value: Any, param: str) -> Constraint | None:
    if not isinstance(value, bool):
        raise invalid_grammar(f"{param}: true or false", param)
    return ANY_OBJECT if value else None


def _structured(value: Any, param: str) -> Constraint | None:
    """Read the object that has exactly one of several members."""
    if not isinstance(value, dict):
        raise invalid_grammar(f"{param}: an object is needed", param)
    given = {
        name: item
        for name, item in value.items()
        if item not in (None, False) and name not in IGNORED
    }
    unknown = [name for name in given if name not in _STRUCTURED]
    if unknown:
        shown = unknown[0][:40]
        raise invalid_grammar(f"{param}.{shown} is not supported", f"{param}.{shown}")
    if len(given) != 1:
        raise invalid_grammar(f"{param}: exactly one of {', '.join(_STRUCTURED)}", param)
    name, item = next(iter(given.items()))
    return _STRUCTURED[name](item, f"{param}.{name}")


_Reader = Callable[[Any, str], Constraint | None]
_STRUCTURED: dict[str, _Reader] = {
    "json": _schema,
    "regex": _pattern,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _object,
}
_READERS: dict[str, _Reader] = {
    "response_format": _format,
    "structured_outputs": _structured,
    "guided_json": _schema,
    "guided_regex": _pattern,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "grammar": _grammar,
    "json_schema": _schema,
}
