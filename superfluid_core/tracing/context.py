"""What a trace is to the rest of the program: a context that travels as W3C `traceparent`, and spans as protocols. Pure.

Spans carry ids, counts, timings and codes, never content. Times are integer nanoseconds of the program's monotonic clock; None is
now. Whoever records nothing has no span: None stands for that everywhere, so what is not traced costs one comparison.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
TRACEPARENT_CHARS = 55

Field = str | int | float | bool


class Kind(Enum):
    """A span's part in a conversation."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Names a span in a trace. `is_sampled`: whoever began the trace records it."""

    trace_id: int
    span_id: int
    is_sampled: bool = True

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


def parse_traceparent(text: str | None) -> TraceContext | None:
    """Read a `traceparent`; None for what is none. Versions after 00 may say more, which is left out."""
    if text is None:
        return None
    head, rest = text[:TRACEPARENT_CHARS], text[TRACEPARENT_CHARS:]
    if TRACEPARENT.fullmatch(head) is None or head.startswith("ff"):
        return None
    if rest and (head.startswith("00") or not rest.startswith("-")):
        return None
    _, trace, span, flags = head.split("-")
    context = TraceContext(int(trace, 16), int(span, 16), bool(int(flags, 16) & 1))
    return context if context.trace_id and context.span_id else None


class Span(Protocol):
    """One recorded piece of work. `end` counts once; nothing here waits or raises."""

    @property
    def context(self) -> TraceContext: ...

    def child(
        self,
        name: str,
        fields: Mapping[str, Field],
        kind: Kind = Kind.INTERNAL,
        began_ns: int | None = None,
    ) -> Span: ...

    def rename(self, name: str) -> None: ...

    def note(self, fields: Mapping[str, Field]) -> None: ...

    def event(self, name: str, fields: Mapping[str, Field]) -> None: ...

    def end(self, error: str = "", ended_ns: int | None = None) -> None: ...


class Tracer(Protocol):
    """Begins traces, or goes on with somebody's."""

    def root(
        self,
        name: str,
        parent: TraceContext | None,
        fields: Mapping[str, Field],
        began_ns: int | None = None,
    ) -> Span | None:
        """Begin a SERVER span; None when this trace is not recorded."""
        ...

    def counts(self) -> Mapping[str, int]:
        """How many spans were exported, failed, dropped."""
        ...

    def close(self) -> None:
        """Send what waits; blocks for a bounded time."""
        ...


SPAN: ContextVar[Span | None] = ContextVar("superfluid_span", default=None)
"""The span of the request that runs in this context."""
