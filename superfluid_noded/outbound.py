"""Turns one list of scheduler effects into the frames of one link. Pure.

One TOKENS frame holds everything that an engine step produced for all sessions of a link; it is cut only where a frame's
limits demand it. A regular end travels in the row of its last token (in an empty row if the session was complete when it came: CLOSED has
no word for stop or length); every other end travels as CLOSED.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from superfluid_core.errors import ErrorCode
from superfluid_core.limits import WireLimits
from superfluid_core.scheduler.plan import Emit, Finish
from superfluid_core.session import FinishReason, TokenLogprobs
from superfluid_core.wire.messages import Closed, CloseReason, Message, TokenRow
from superfluid_core.wire.pieces import split_tokens

ROW_BYTES = 64
ID_BYTES = 4
LOGPROB_BYTES = 12

CLOSE_REASONS = {
    FinishReason.CANCELLED: CloseReason.CANCELLED,
    FinishReason.DEADLINE: CloseReason.DEADLINE,
    FinishReason.ERROR: CloseReason.ERROR,
}


@dataclass(slots=True)
class _Row:
    session: int
    epoch: int
    first: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_id: int | None = None
    bytes: int = ROW_BYTES

    def frozen(self) -> TokenRow:
        aligned = len(self.logprobs) == len(self.ids)
        return TokenRow(
            session=self.session,
            epoch=self.epoch,
            first=self.first,
            ids=tuple(self.ids),
            finish=self.finish,
            stop_id=self.stop_id,
            logprobs=tuple(self.logprobs) if aligned else (),
        )


def closed_for(session: int, epoch: int, effect: Finish) -> Closed:
    """Translate an end that is neither stop nor length."""
    reason = CLOSE_REASONS[effect.reason]
    if effect.code is ErrorCode.PREEMPT_FAILED:
        reason = CloseReason.PREEMPT_FAILED
    if effect.code is ErrorCode.FENCED:
        reason = CloseReason.FENCED
    if effect.code is ErrorCode.DRAINING:
        reason = CloseReason.DRAIN
    text = effect.text[: WireLimits().text_chars_max]
    return Closed(session, epoch, reason, effect.code, text or effect.reason.value)


class Frames:
    """Gathers what one list of effects means for one link; `take` hands the messages over.

    The order is: what is neither token nor end, then the tokens, then the ends. Within a session that is the order of events.
    """

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._row_bytes_max = limits.tokens_bytes_max // 4
        self._before: list[Message] = []
        self._rows: list[_Row] = []
        self._last: dict[tuple[int, int], _Row] = {}
        self._after: list[Message] = []

    def add(self, message: Message) -> None:
        """Queue a message that is neither a token nor an end."""
        self._before.append(message)

    def emit(self, session: int, epoch: int, effect: Emit) -> None:
        """Add one output id to the session's row."""
        cost = ID_BYTES
        if effect.logprobs is not None:
            cost += LOGPROB_BYTES * (1 + len(effect.logprobs.top))
        row = self._last.get((session, epoch))
        if row is None or row.bytes + cost > self._row_bytes_max:
            row = _Row(session, epoch, effect.index)
            self._last[(session, epoch)] = row
            self._rows.append(row)
        assert effect.index == row.first + len(row.ids), "an output index was skipped"
        row.ids.append(effect.token)
        if effect.logprobs is not None:
            row.logprobs.append(effect.logprobs)
        row.bytes += cost

    def finish(self, session: int, epoch: int, outputs: int, effect: Finish) -> None:
        """Let the last row carry the end, or an empty one when it comes without a token; a failure is CLOSED."""
        if effect.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self.close(closed_for(session, epoch, effect))
            return
        row = self._last.get((session, epoch))
        if row is None:
            row = _Row(session, epoch, outputs)
            self._rows.append(row)
        row.finish = effect.reason
        row.stop_id = effect.stop_id

    def close(self, message: Closed) -> None:
        """Queue an end behind all tokens."""
        self._after.append(message)

    def take(self) -> list[Message]:
        """Hand over everything in order; nothing is kept."""
        tokens = split_tokens([row.frozen() for row in self._rows], self._limits)
        messages = [*self._before, *tokens, *self._after]
        self._before, self._rows, self._last, self._after = [], [], {}, []
        return messages
