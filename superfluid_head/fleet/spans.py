"""The trace of one choice: a span for all of it, with where it was placed and why it moved, and one under it per placement.

The span of a placement is what its node's own span hangs under: its context goes to the node ahead of the OPEN, when the node announced that
it exports traces. A request that is not traced has no parent span, and then nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from superfluid_core.errors import SuperfluidError
from superfluid_core.tracing.context import SPAN, Field, Kind, Span
from superfluid_core.wire.notes import TRACE, Trace
from superfluid_head.fleet.causes import cause_of
from superfluid_head.fleet.events import EndEvent, GenerationRequest, MovedEvent


class ChoiceSpans:
    """Made in the context of the request that the choice belongs to; `close` ends whatever is still open."""

    __slots__ = ("_choice", "_placement")

    def __init__(self, request: GenerationRequest) -> None:
        parent = SPAN.get()
        self._choice: Span | None = None
        self._placement: Span | None = None
        if parent is not None:
            fields: dict[str, Field] = {
                "gen_ai.request.model": request.model,
                "gen_ai.usage.input_tokens": len(request.prompt),
                "superfluid.class": request.qos.label,
                "superfluid.choice": request.choice,
            }
            self._choice = parent.child(f"choice {request.choice}", fields)

    def placed(self, node: str, epoch: int, reason: str, waited_ms: int) -> None:
        """Note where it was placed: the next OPEN goes there."""
        if self._choice is not None:
            fields: dict[str, Field] = {
                "node": node,
                "epoch": epoch,
                "reason": cause_of(reason),
                "waited_ms": waited_ms,
            }
            self._choice.event("placed", fields)

    def opened(self, session: int, epoch: int, node: str, features: Sequence[str]) -> Trace | None:
        """Begin a placement's span; what comes back is for the node, if it wants it."""
        if self._choice is None:
            return None
        self.left("")
        fields: dict[str, Field] = {"superfluid.node": node, "superfluid.epoch": epoch}
        self._placement = self._choice.child(f"placement {node}", fields, Kind.CLIENT)
        if TRACE not in features:
            return None
        return Trace(session, epoch, self._placement.context.traceparent)

    def began(self) -> None:
        """Note the placement's first token."""
        if self._placement is not None:
            self._placement.event("first token", {})

    def left(self, reason: str) -> None:
        """End the placement's span."""
        if self._placement is not None:
            self._placement.note({"superfluid.left": reason})
            self._placement.end()
            self._placement = None

    def moved(self, event: MovedEvent, delivered: int) -> None:
        if self._choice is not None:
            fields: dict[str, Field] = {
                "cause": cause_of(event.reason),
                "reason": event.reason,
                "moves": event.moves,
                "delivered": delivered,
            }
            self._choice.event("moved", fields)

    def ended(self, event: EndEvent, delivered: int) -> None:
        if self._choice is not None:
            fields: dict[str, Field] = {
                "gen_ai.response.finish_reasons": event.reason.value,
                "gen_ai.usage.output_tokens": delivered,
                "superfluid.cached_tokens": event.cached,
                "superfluid.moves": event.moves,
            }
            self._choice.note(fields)

    def failed(self, error: SuperfluidError) -> None:
        if self._choice is not None:
            self._choice.note({"error.type": error.code.value})
            self._choice.end(error.code.value)

    def close(self) -> None:
        self.left("")
        if self._choice is not None:
            self._choice.end()
            self._choice = None
