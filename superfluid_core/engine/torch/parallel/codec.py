"""Plans as bytes for the other ranks: msgpack of plain values, read back by the types of their fields.

Owns no field: what a plan is, its dataclasses say. Only types that occur in one are known, and nothing in the bytes names any.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack

from superfluid_core.scheduler.plan import TickPlan

DEPTH_MAX = 16


def plan_bytes(plan: TickPlan) -> bytes:
    """Write a plan."""
    return bytes(msgpack.packb(_plain(plan), use_bin_type=True))


def plan_of(data: bytes) -> TickPlan:
    """Read a plan. Raises ValueError for what is none."""
    try:
        plain = msgpack.unpackb(data, raw=False, strict_map_key=True, use_list=True)
        found = _typed(plain, TickPlan)
    except (TypeError, ValueError, KeyError, msgpack.UnpackException) as error:
        raise ValueError(f"no plan: {type(error).__name__}") from error
    assert isinstance(found, TickPlan)
    return found


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return [_plain(getattr(value, each.name)) for each in fields(value)]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(each) for each in value]
    return value


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    """Types of the fields. A class compiled by mypyc keeps what its columns hold in its source only, which lies beside it."""
    module = sys.modules[kind.__module__]
    path = Path(module.__file__ or "")
    if path.suffix == ".py":
        return get_type_hints(kind)
    tree = ast.parse(path.with_name(path.name.partition(".")[0] + ".py").read_bytes())
    [found] = [
        each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == kind.__name__
    ]
    written = {
        each.target.id: ast.unparse(each.annotation)
        for each in found.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    return get_type_hints(type(kind.__name__, (), {"__annotations__": written}), vars(module))


def _typed(value: Any, kind: Any) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        inner = [each for each in get_args(kind) if each is not types.NoneType]
        return None if value is None else _typed(value, inner[0])
    if origin is tuple:
        return _tuple(value, get_args(kind))
    if origin in (list, Sequence):
        return [_typed(each, get_args(kind)[0]) for each in value]
    if origin is frozenset:
        return frozenset(value)
    if is_dataclass(kind):
        return _dataclass(value, kind)
    if isinstance(kind, type) and issubclass(kind, tuple):  # a named one
        hints = _hints(kind)
        return kind(*(_typed(v, h) for v, h in zip(value, hints.values(), strict=True)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if not isinstance(value, (int, float) if kind is float else kind):
        raise TypeError(f"{type(value).__name__} where {kind} belongs")
    return value


def _tuple(value: Any, inner: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(inner) == 2 and inner[1] is Ellipsis:
        return tuple(value) if inner[0] is int else tuple(_typed(each, inner[0]) for each in value)
    return tuple(_typed(each, one) for each, one in zip(value, inner, strict=True))


def _dataclass(value: Any, kind: Any) -> Any:
    hints = _hints(kind)
    names = [each.name for each in fields(kind)]
    return kind(**{name: _typed(v, hints[name]) for name, v in zip(names, value, strict=True)})
