"""A session's part of a trace: one span for its time on this node, and under it the wait for a lane, the prefill and the decoding.

Everything is made when the session ends here, however it ends, from what the roster kept anyway: nothing is traced on the way of a
token. `engine.steps` are the forward passes of this node's engines during a phase.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from superfluid_core.clock import Clock
from superfluid_core.session import FinishReason
from superfluid_core.tracing.context import Field, Span, Tracer, parse_traceparent
from superfluid_noded.heads import Live

_ORDERLY = frozenset(
    {FinishReason.STOP.value, FinishReason.LENGTH.value, FinishReason.CANCELLED.value, "superseded"}
)


class Traces:
    """Begins and ends the spans of sessions. `steps` counts the engines' forward passes."""

    def __init__(self, tracer: Tracer | None, clock: Clock, steps: Callable[[], int]) -> None:
        self.tracer = tracer
        self._clock = clock
        self._steps = steps

    async def close(self) -> None:
        """Send what waits; a collector that is away costs a bounded moment."""
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    def begin(self, live: Live, context: str) -> None:
        """Note what a session belongs to; contexts that cannot be are nobody's."""
        if self.tracer is not None:
            live.trace = parse_traceparent(context)

    def over(self, live: Live, outcome: str) -> None:
        """Tell of a session that ended here."""
        if self.tracer is None or live.trace is None:
            return
        now_ns, steps = self._clock.now_ns(), self._steps()
        fields: dict[str, Field] = {
            "superfluid.head": live.head.name,
            "superfluid.session": f"{live.number:016x}",
            "superfluid.epoch": live.epoch,
            "superfluid.class": live.qos.label,
            "superfluid.outcome": outcome,
        }
        span = self.tracer.root("session", live.trace, fields, live.submitted_ns)
        if span is None:
            return
        self._phases(span, live, now_ns, steps)
        span.end("" if outcome in _ORDERLY else outcome, now_ns)

    def _phases(self, span: Span, live: Live, now_ns: int, steps: int) -> None:
        queue = span.child("queue", {}, began_ns=live.submitted_ns)
        queue.end(ended_ns=live.started_ns or now_ns)
        if not live.started_ns:
            return
        until, ended_ns = (live.first_step, live.first_ns) if live.first_ns else (steps, now_ns)
        fields: dict[str, Field] = {
            "tokens": max(0, live.done - live.cached),
            "cached": live.cached,
            "engine.steps": until - live.started_step,
        }
        span.child("prefill", fields, began_ns=live.started_ns).end(ended_ns=ended_ns)
        if live.first_ns:
            tokens = live.outputs - live.delivered
            fields = {"tokens": tokens, "engine.steps": steps - live.first_step}
            span.child("decode", fields, began_ns=live.first_ns).end(ended_ns=now_ns)
