"""The 25 schemas of `superfluid bench structured`, what the model is asked for each, and a judge of its answers. Pure.

The judge reads JSON Schema by itself, for the keywords that the schemas use: what the compiler of grammars thinks of an answer proves
nothing about that compiler. Every schema is bounded, so that an answer that runs to its budget is a fault and not a long text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]


def _object(**properties: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(most: int = 24, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def _list(items: Any, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


_CITY = _object(name=_text(), inhabitants=_whole(0, 50_000_000), capital={"type": "boolean"})
_TREE: Schema = {
    "$defs": {
        "leaf": _object(value=_whole(0, 9)),
        "branch": _object(
            left={"$ref": "#/$defs/leaf"}, right={"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]}
        ),
    },
    "$ref": "#/$defs/branch",
}  # fmt: skip

SCHEMAS: tuple[tuple[str, str, Schema], ...] = (
    ("person", "Describe a person.", _object(name=_text(), age=_whole(0, 120))),
    ("city", "Describe Paris.", _CITY),
    ("cities", "Name two cities.", _list(_CITY, 2, 1)),
    ("colour", "Which colour has the sky?", {"enum": ["red", "green", "blue"]}),
    ("yes or no", "Is water wet?", _object(answer={"enum": ["yes", "no"]})),
    ("constant", "Say the version.", _object(version={"const": "1.0"}, ok={"const": True})),
    ("numbers", "Give three primes.", _list(_whole(2, 97), 3, 3)),
    ("point", "Give a point.", _object(x={"type": "number", "minimum": -10, "maximum": 10}, y=_whole(-5, 5))),
    ("null or text", "A nickname, if any.", _object(nick={"anyOf": [_text(12), {"type": "null"}]})),
    ("types", "Anything short.", _object(a={"type": ["integer", "null"], "minimum": 0, "maximum": 9})),
    ("pattern", "A licence plate.", _object(plate={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"})),
    ("date", "When was the moon landing?", _object(date={"type": "string", "format": "date"})),
    ("optional", "A book.", {"type": "object", "properties": {"title": _text(), "year": _whole(0, 2100)}, "required": ["title"], "additionalProperties": False}),
    ("nested", "An order.", _object(customer=_object(name=_text(), vip={"type": "boolean"}), items=_list(_object(sku=_text(8), count=_whole(1, 9)), 2, 1))),
    ("tree", "A small tree.", _TREE),
    ("tags", "Tags for a song.", _object(tags=_list({"enum": ["pop", "rock", "jazz", "folk"]}, 3))),
    ("tuple", "A pair.", {"type": "array", "prefixItems": [_text(8), _whole(0, 9)], "items": False, "minItems": 2}),
    ("either", "A cat or a dog.", {"anyOf": [_object(kind={"const": "cat"}, lives=_whole(1, 9)), _object(kind={"const": "dog"}, tricks=_list(_text(8), 2))]}),
    ("both", "A thing with a price.", {"allOf": [_object(name=_text(), price=_whole(0, 999))]}),
    ("empty", "Nothing.", _object()),
    ("unicode", "Greet in French.", _object(greeting=_text(20, minLength=2), emoji={"enum": ["😀", "é", "漢"]})),
    ("escapes", "Quote somebody.", _object(quote=_text(30, minLength=5))),
    ("multiples", "A multiple of five.", _object(n={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100})),
    ("boolean", "True or false?", {"type": "boolean"}),
    ("matrix", "A 2 by 2 matrix.", _list(_list(_whole(-9, 9), 2, 2), 2, 2)),
)  # fmt: skip


def judge(value: Any, schema: Any, root: Schema | None = None, path: str = "$") -> str | None:
    """Say where `value` breaks `schema`; None when it does not."""
    if isinstance(schema, bool):
        return None if schema else f"{path}: nothing is allowed here"
    whole = schema if root is None else root
    for name, wanted in schema.items():
        rule = _RULES.get(name)
        found = None if rule is None else rule(value, wanted, schema, (whole, path))
        if found is not None:
            return found
    return None


_Place = tuple[Schema, str]
_Rule = Callable[[Any, Any, Schema, _Place], str | None]


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case _:
            return isinstance(value, int | float) and not isinstance(value, bool)


def _type(value: Any, wanted: Any, _schema: Schema, place: _Place) -> str | None:
    kinds = wanted if isinstance(wanted, list) else [wanted]
    return None if any(_is(value, kind) for kind in kinds) else f"{place[1]}: not {wanted}"


def _equal(left: Any, right: Any) -> bool:
    return type(left) is type(right) and bool(left == right)


def _enum(value: Any, wanted: Any, _schema: Schema, place: _Place) -> str | None:
    return None if any(_equal(value, each) for each in wanted) else f"{place[1]}: not in the enum"


def _const(value: Any, wanted: Any, _schema: Schema, place: _Place) -> str | None:
    return None if _equal(value, wanted) else f"{place[1]}: not the constant"


def _reference(value: Any, wanted: Any, _schema: Schema, place: _Place) -> str | None:
    found: Any = place[0]
    for part in wanted.removeprefix("#/").split("/"):
        found = found[part]
    return judge(value, found, *place)


def _any_of(value: Any, wanted: Any, _schema: Schema, place: _Place) -> str | None:
    if any(judge(value, each, *place) is None for each in wanted):
        return None
    return f"{place[1]}: none of the alternatives"


def _all_of(value: Any, wanted: Any, _schema: Schema, place: _Place) -> str | None:
    return next((found for each in wanted if (found := judge(value, each, *place))), None)


def _members(value: Any, wanted: Any, schema: Schema, place: _Place) -> str | None:
    if not isinstance(value, dict):
        return None
    root, path = place
    for name, item in value.items():
        known = wanted.get(name, schema.get("additionalProperties", True))
        found = judge(item, known, root, f"{path}.{name}")
        if found is not None:
            return found
    return None


def _required(value: Any, wanted: Any, _schema: Schema, place: _Place) -> str | None:
    missing = [name for name in wanted if isinstance(value, dict) and name not in value]
    return f"{place[1]}: lacks {missing[0]}" if missing else None


def _items(value: Any, wanted: Any, schema: Schema, place: _Place) -> str | None:
    if not isinstance(value, list):
        return None
    root, path = place
    first = schema.get("prefixItems", [])
    for index, item in enumerate(value):
        known = first[index] if index < len(first) else wanted
        found = judge(item, known, root, f"{path}[{index}]")
        if found is not None:
            return found
    return None


def _size(least: bool, kind: str) -> _Rule:  # noqa: FBT001 - a maker of rules, named in the table below
    def rule(value: Any, wanted: Any, _schema: Schema, place: _Place) -> str | None:
        if kind == "number":
            size = value if _is(value, "number") else wanted
        else:
            size = len(value) if _is(value, kind) else wanted
        is_good = size >= wanted if least else size <= wanted
        return None if is_good else f"{place[1]}: {size} is beyond {wanted}"

    return rule


def _pattern(value: Any, wanted: Any, _schema: Schema, place: _Place) -> str | None:
    is_good = not isinstance(value, str) or re.search(wanted, value)
    return None if is_good else f"{place[1]}: not like {wanted}"


def _format(value: Any, wanted: Any, _schema: Schema, place: _Place) -> str | None:
    pattern = {"date": r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$"}[wanted]
    return _pattern(value, pattern, _schema, place)


def _multiple(value: Any, wanted: Any, _schema: Schema, place: _Place) -> str | None:
    return None if value % wanted == 0 else f"{place[1]}: no multiple of {wanted}"


_RULES: dict[str, _Rule] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "$ref": _reference,
    "anyOf": _any_of,
    "allOf": _all_of,
    "properties": _members,
    "required": _required,
    "items": _items,
    "minimum": _size(True, "number"),
    "maximum": _size(False, "number"),
    "minItems": _size(True, "array"),
    "maxItems": _size(False, "array"),
    "minLength": _size(True, "string"),
    "maxLength": _size(False, "string"),
    "pattern": _pattern,
    "format": _format,
    "multipleOf": _multiple,
}
