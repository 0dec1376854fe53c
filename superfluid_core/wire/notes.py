"""Optional messages: what sessions run as well without. Values only, as in `messages.py`.

Their numbers are above 0x80: a peer that does not know one skips it, so an older build on either end stays as it was. Each is sent
only to a peer that announced its feature.
"""

from __future__ import annotations

from dataclasses import dataclass

TRACE = "trace"
"""Announced by a node that exports traces."""
TIMING = "timing"
"""Announced by heads."""


@dataclass(frozen=True, slots=True)
class Trace:
    """head -> node, right before an OPEN: the span that this placement belongs to, as W3C `traceparent` spells it."""

    session: int
    epoch: int
    context: str


@dataclass(frozen=True, slots=True)
class Timing:
    """node -> head, before a placement's first token: how long it waited for a lane, and how long from there to the token."""

    session: int
    epoch: int
    queued_us: int
    prefill_us: int


Note = Trace | Timing
