"""Kinds of head fields: how a value looks in msgpack, and what is acceptable.

A kind reads what a peer sent and writes what we send, under the same rules, so that a bug of ours shows here and not as a
breach at the other end. Types are exact (a bool is no int, an int no float), ranges are closed, floats finite, texts
bounded. Kinds know neither messages nor frames; `BreachError` says what was wrong, `codec.py` says whose fault it was.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from operator import attrgetter
from typing import Any, NoReturn, Protocol

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
FLOAT_MAX = sys.float_info.max
IDENTITY = re.compile(r"[A-Za-z0-9._-]{1,64}")
FEATURE = re.compile(r"[a-z0-9._-]{1,64}")
HEX_DIGEST = re.compile(r"(?:[0-9a-f]{64})?")
FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
WORD = re.compile(r"[a-z0-9_-]{1,32}")
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class BreachError(ValueError):
    """A value breaks the schema; the text never repeats the value itself."""


class Kind(Protocol):
    """Reads a decoded msgpack value into ours, and back. Both raise BreachError."""

    def read(self, value: Any) -> Any: ...

    def write(self, value: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class UInt:
    """An integer within closed bounds."""

    high: int
    low: int = 0

    def read(self, value: Any) -> int:
        if type(value) is not int:
            raise BreachError("is not an integer")
        if not self.low <= value <= self.high:
            raise BreachError(f"is not within {self.low} and {self.high}")
        return value

    write = read


@dataclass(frozen=True, slots=True)
class Flag:
    """A boolean."""

    def read(self, value: Any) -> bool:
        if type(value) is not bool:
            raise BreachError("is not a boolean")
        return value

    write = read


@dataclass(frozen=True, slots=True)
class Real:
    """A finite float within closed bounds."""

    low: float = -FLOAT_MAX
    high: float = FLOAT_MAX

    def read(self, value: Any) -> float:
        if type(value) is not float:
            raise BreachError("is not a float")
        if not self.low <= value <= self.high:  # false for NaN
            raise BreachError(f"is not finite or not within {self.low:g} and {self.high:g}")
        return value

    def write(self, value: Any) -> float:
        return self.read(float(value) if type(value) is int else value)


@dataclass(frozen=True, slots=True)
class Text:
    """A string: matches `pattern` whole when there is one, else is printable; bounded in characters."""

    chars_max: int
    pattern: re.Pattern[str] | None = None
    chars_min: int = 0

    def read(self, value: Any) -> str:
        if type(value) is not str:
            raise BreachError("is not a string")
        if not self.chars_min <= len(value) <= self.chars_max:
            raise BreachError(f"has not {self.chars_min} to {self.chars_max} characters")
        if self.pattern is None:
            if not value.isprintable():
                raise BreachError("is not printable")
        elif self.pattern.fullmatch(value) is None:
            raise BreachError("uses characters outside its alphabet")
        return value

    write = read


@dataclass(frozen=True, slots=True)
class Prose:
    """Words for a person: cut and cleaned when written; anything of that length when read."""

    chars_max: int

    def read(self, value: Any) -> str:
        if type(value) is not str:
            raise BreachError("is not a string")
        if len(value) > self.chars_max:
            raise BreachError(f"is longer than {self.chars_max} characters")
        return value

    def write(self, value: Any) -> str:
        if type(value) is not str:
            raise BreachError("is not a string")
        return value[: self.chars_max].encode("utf-8", "replace").decode()


@dataclass(frozen=True, slots=True)
class Name:
    """A member of a StrEnum, by value; `only` narrows it."""

    names: type[StrEnum]
    only: tuple[StrEnum, ...] = ()
    members: Mapping[str, StrEnum] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        members = {member.value: member for member in self.only or self.names}
        object.__setattr__(self, "members", members)

    def read(self, value: Any) -> StrEnum:
        found = self.members.get(value) if type(value) is str else None
        if found is None:
            raise BreachError(f"names no {self.names.__name__}")
        return found

    def write(self, value: Any) -> str:
        if not isinstance(value, self.names) or value.value not in self.members:
            raise BreachError(f"names no {self.names.__name__}")
        return value.value


@dataclass(frozen=True, slots=True)
class Rank:
    """A member of an IntEnum, by number."""

    ranks: type[IntEnum]

    def read(self, value: Any) -> IntEnum:
        if type(value) is not int or value not in self.ranks._value2member_map_:
            raise BreachError(f"names no {self.ranks.__name__}")
        return self.ranks(value)

    def write(self, value: Any) -> int:
        if not isinstance(value, self.ranks):
            raise BreachError(f"names no {self.ranks.__name__}")
        return int(value)


@dataclass(frozen=True, slots=True)
class Octets:
    """Bytes, bounded."""

    bytes_max: int

    def read(self, value: Any) -> bytes:
        if type(value) is not bytes:
            raise BreachError("is not bytes")
        if len(value) > self.bytes_max:
            raise BreachError(f"is longer than {self.bytes_max} bytes")
        return value

    write = read


@dataclass(frozen=True, slots=True)
class Nilable:
    """The kind, or nil."""

    kind: Kind

    def read(self, value: Any) -> Any:
        return None if value is None else self.kind.read(value)

    def write(self, value: Any) -> Any:
        return None if value is None else self.kind.write(value)


@dataclass(frozen=True, slots=True)
class ListOf:
    """At most `count_max` of one kind; a tuple on our side. `is_set` refuses repetitions."""

    kind: Kind
    count_max: int
    is_set: bool = False

    def read(self, value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise BreachError("is not an array")
        if len(value) > self.count_max:
            raise BreachError(f"has more than {self.count_max} entries")
        read = self.kind.read
        items = tuple([read(item) for item in value])
        if self.is_set and len(set(items)) != len(items):
            raise BreachError("repeats an entry")
        return items

    def write(self, value: Any) -> list[Any]:
        if len(value) > self.count_max:
            raise BreachError(f"has more than {self.count_max} entries")
        if self.is_set and len(set(value)) != len(value):
            raise BreachError("repeats an entry")
        write = self.kind.write
        return [write(item) for item in value]


@dataclass(frozen=True, slots=True)
class Row:
    """A fixed array of kinds; a tuple on our side."""

    kinds: tuple[Kind, ...]

    def read(self, value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(self.kinds):
            raise BreachError(f"is not an array of {len(self.kinds)}")
        return tuple([kind.read(item) for kind, item in zip(self.kinds, value, strict=True)])

    def write(self, value: Any) -> list[Any]:
        if len(value) != len(self.kinds):
            raise BreachError(f"is not an array of {len(self.kinds)}")
        return [kind.write(item) for kind, item in zip(self.kinds, value, strict=True)]


@dataclass(frozen=True, slots=True)
class Record:
    """A map with exactly these keys; a dataclass on our side."""

    shape: type[Any]
    fields: Mapping[str, Kind]
    layout: Layout = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", Layout(self.fields))

    def read(self, value: Any) -> Any:
        if type(value) is not dict:
            raise BreachError("is not a map")
        judge_keys(value, self.fields)
        self.layout.read(value)
        return self.shape(**value)

    def write(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, self.shape):
            raise BreachError(f"is no {self.shape.__name__}")
        return self.layout.write(value)


def judge_keys(raw: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse a map that has not exactly these keys. Raises BreachError."""
    if raw.keys() != wanted.keys():
        missing = next((name for name in wanted if name not in raw), None)
        raise BreachError("has an unknown key" if missing is None else f"lacks {missing!r}")


class Layout:
    """The kinds of a map's values, sorted once by what has to be done with them.

    Most values are integers that look the same on both sides: they are compared where they lie, without a call for each. What is wrong
    is looked for again one by one, in the order of the fields, so that the first breach is named whatever came to light first.
    """

    __slots__ = ("_fields", "_get", "_names", "_others", "_wholes")

    def __init__(self, fields: Mapping[str, Kind]) -> None:
        self._fields = fields
        self._names = tuple(fields)
        self._get = attrgetter(*fields) if fields else None
        self._wholes = tuple(
            (name, kind.low, kind.high) for name, kind in fields.items() if type(kind) is UInt
        )
        self._others = tuple(
            (name, kind) for name, kind in fields.items() if type(kind) is not UInt
        )

    def read(self, raw: dict[str, Any]) -> None:
        """Turn what a peer sent into ours, in place; the keys were judged. Raises BreachError naming the key."""
        for name, low, high in self._wholes:
            value = raw[name]
            if type(value) is not int or not low <= value <= high:
                self._blame(raw, is_read=True)
        name = ""
        try:
            for name, kind in self._others:
                raw[name] = kind.read(raw[name])
        except BreachError as breach:
            raise BreachError(f"{name} {breach}") from None

    def write(self, source: Any) -> dict[str, Any]:
        """Make the raw map of an object's attributes. Raises BreachError naming the attribute."""
        if self._get is None:
            return {}
        values = self._get(source)
        names = self._names
        raw = dict(zip(names, values, strict=True)) if len(names) > 1 else {names[0]: values}
        for name, low, high in self._wholes:
            value = raw[name]
            if type(value) is not int or not low <= value <= high:
                self._blame(raw, is_read=False)
        name = ""
        try:
            for name, kind in self._others:
                raw[name] = kind.write(raw[name])
        except BreachError as breach:
            raise BreachError(f"{name} {breach}") from None
        return raw

    def _blame(self, raw: Mapping[str, Any], *, is_read: bool) -> NoReturn:
        """Name the first field that is not right; one of the integers is not."""
        for name, kind in self._fields.items():
            try:
                kind.read(raw[name]) if is_read else kind.write(raw[name])
            except BreachError as breach:
                raise BreachError(f"{name} {breach}") from None
        raise AssertionError("nothing is wrong with these fields")
