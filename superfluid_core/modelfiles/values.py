"""Typed reading of untyped tables: JSON files and GGUF metadata come from strangers.

Owns the one border where `object` becomes `int`, `float`, `str`; each refusal names the file and
the key. It must not know which keys exist. The idea: no value passes this page unchecked, so no
later page has to check.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from superfluid_core.errors import ModelFilesError

INTEGER_MAX = 1 << 31
IDS_MAX = 256
JSON_BYTES_MAX = 64 << 20


class Fields:
    """A table with typed, bounded getters; `place` says in messages whose table it is."""

    def __init__(self, table: Mapping[str, object] | None, place: str) -> None:
        self._table = table or {}
        self._place = place

    def has(self, key: str) -> bool:
        return self._table.get(key) is not None

    def integer(
        self,
        key: str,
        default: int | None = None,
        *,
        at_least: int = 1,
        at_most: int = INTEGER_MAX,
    ) -> int:
        value = self._table.get(key)
        if value is None:
            value = default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "a whole number")
        if not at_least <= value <= at_most:
            raise self._wrong(key, f"from {at_least} to {at_most}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._table.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        if not math.isfinite(value):
            raise self._wrong(key, "finite")
        return float(value)

    def is_text(self, key: str) -> bool:
        return isinstance(self._table.get(key), str)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._table.get(key)
        if value is None:
            value = default
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def truth(self, key: str, default: bool) -> bool:  # noqa: FBT001 - reads as dict.get does
        value = self._table.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def mapping(self, key: str) -> Mapping[str, object]:
        value = self._table.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return value

    def texts(self, key: str) -> list[str]:
        """Give a list of texts, not copied: vocabularies are long."""
        return self._list(key, (str,), "a list of texts")

    def numbers(self, key: str) -> list[float]:
        """Give a list of numbers, whole or not, not copied."""
        return self._list(key, (int, float), "a list of numbers")

    def _list(self, key: str, kinds: tuple[type, ...], what: str) -> list[Any]:
        value = self._table.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not set(map(type, value)) <= set(kinds):
            raise self._wrong(key, what)
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Read token ids: absent, one number or a list of numbers."""
        value = self._table.get(key)
        if value is None:
            return ()
        found = value if isinstance(value, list) else [value]
        if len(found) > IDS_MAX:
            raise self._wrong(key, f"at most {IDS_MAX} ids")
        ids: list[int] = []
        for item in found:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < INTEGER_MAX:
                raise self._wrong(key, "token ids")
            ids.append(item)
        return tuple(ids)

    def _wrong(self, key: str, what: str) -> ModelFilesError:
        if not self.has(key):
            return ModelFilesError(f"{self._place}: {key} is missing, expected {what}")
        shown = repr(self._table.get(key))[:60]
        return ModelFilesError(f"{self._place}: {key} should be {what}, it is {shown}")


def parse_table(data: bytes, place: str) -> dict[str, object]:
    """Parse a JSON object; `place` names the file in the refusal."""
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as cause:
        raise ModelFilesError(f"{place} is not valid JSON: {str(cause)[:120]}") from cause
    if not isinstance(table, dict):
        raise ModelFilesError(f"{place} should hold a JSON object")
    return table


def read_small(path: Path) -> bytes:
    """Read a small text file of a model, bounded."""
    try:
        if path.stat().st_size > JSON_BYTES_MAX:
            raise ModelFilesError(f"{path} is larger than {JSON_BYTES_MAX >> 20} MiB")
        return path.read_bytes()
    except OSError as cause:
        raise ModelFilesError(f"cannot read {path}: {cause.strerror}") from cause
