"""Reads a recorded arrival trace: one JSON object a line, in order of time.

    {"timestamp": 0.25, "prompt_tokens": 300, "output_tokens": 60, "class": "agent", "tenant": "a",
     "prefix": "system-1", "prefix_tokens": 128}

`timestamp` is in seconds from any start; the first line's is 0 of the run. Only the first three are needed. `prefix` names a
text that prompts share from their first token on; `prefix_tokens` says how much of it (default: the whole prompt).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from superfluid_core.errors import ConfigError
from superfluid_core.session import QosClass
from superfluid_core.simulator.hardware import SECOND_NS
from superfluid_core.simulator.scenario import Arrival

LINE_BYTES_MAX = 64 * 1024
TOKENS_MAX = 1 << 24
SECONDS_MAX = 1e9
MEMBERS = frozenset(
    ("timestamp", "prompt_tokens", "output_tokens", "class", "tenant", "prefix", "prefix_tokens")
)


def read_trace(path: str) -> Iterator[Arrival]:
    """Yield arrivals as the file is read. Raises ConfigError with the line's number."""
    try:
        with Path(path).open("rb") as file:
            reader = _Reader(path)
            for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX + 1), b""), 1):
                if len(line) > LINE_BYTES_MAX:
                    raise ConfigError(f"{path}:{number}: a line of over {LINE_BYTES_MAX} bytes")
                if line.strip():
                    yield reader.read(line, number)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


class _Reader:
    """Remembers the start, the last time and the names of prefixes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._start_ns: int | None = None
        self._last_ns = 0
        self._prefixes: dict[str, int] = {}

    def read(self, line: bytes, number: int) -> Arrival:
        try:
            return self._read(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{self._path}:{number}: {reason[:200]}") from error

    def _read(self, row: Any) -> Arrival:
        if not isinstance(row, dict):
            raise TypeError("not a JSON object")
        unknown = sorted(set(row) - MEMBERS)
        if unknown:
            raise ValueError(f"unknown member {unknown[0][:40]!r}")
        at_ns = self._time(row["timestamp"])
        prompt = _tokens(row, "prompt_tokens")
        shared = _tokens(row, "prefix_tokens") if "prefix_tokens" in row else prompt
        prefix = row.get("prefix")
        return Arrival(
            at_ns,
            prompt,
            _tokens(row, "output_tokens"),
            qos=QosClass.parse(str(row.get("class", "agent"))),
            tenant=str(row.get("tenant", "anonymous")),
            prefix=0 if prefix is None else self._prefix(str(prefix)),
            prefix_tokens=0 if prefix is None else shared,
        )

    def _time(self, seconds: Any) -> int:
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise TypeError("timestamp must be a number of seconds")
        if not abs(seconds) < SECONDS_MAX:
            raise ValueError("timestamp is out of range")
        at_ns = round(seconds * SECOND_NS)
        if self._start_ns is None:
            self._start_ns = at_ns
        at_ns -= self._start_ns
        if at_ns < self._last_ns:
            raise ValueError("timestamps must not go back")
        self._last_ns = at_ns
        return at_ns

    def _prefix(self, name: str) -> int:
        return self._prefixes.setdefault(name, len(self._prefixes) + 1)


def _tokens(row: dict[str, Any], name: str) -> int:
    value = row[name]
    if type(value) is not int or not 1 <= value <= TOKENS_MAX:
        raise ValueError(f"{name} must be a whole number of 1..{TOKENS_MAX}")
    return value
