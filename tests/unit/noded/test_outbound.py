"""Effects of one step become one TOKENS frame, cut only where limits demand it."""

from __future__ import annotations

from superfluid_core.errors import ErrorCode
from superfluid_core.limits import WireLimits
from superfluid_core.scheduler.plan import Emit, Finish
from superfluid_core.session import FinishReason, SessionKey, TokenLogprobs
from superfluid_core.wire.codec import encode
from superfluid_core.wire.messages import Closed, CloseReason, Opened, TokenRow, Tokens
from superfluid_noded.outbound import Frames

LIMITS = WireLimits()
KEY = SessionKey("h", 1)


def emit(index: int, token: int, logprobs: TokenLogprobs | None = None) -> Emit:
    return Emit(KEY, index, token, logprobs)


def test_all_sessions_of_a_step_share_a_frame_and_a_sessions_ids_share_a_row() -> None:
    frames = Frames(LIMITS)
    frames.emit(1, 1, emit(4, 10))
    frames.emit(2, 7, emit(0, 20))
    frames.emit(1, 1, emit(5, 11))
    assert frames.take() == [Tokens((TokenRow(1, 1, 4, (10, 11)), TokenRow(2, 7, 0, (20,))))]
    assert frames.take() == []


def test_a_finish_travels_with_its_last_token_and_a_failure_behind_it() -> None:
    frames = Frames(LIMITS)
    frames.emit(1, 1, emit(0, 10))
    frames.finish(1, 1, 1, Finish(KEY, FinishReason.STOP, stop_id=10))
    frames.emit(2, 1, emit(0, 11))
    frames.finish(2, 1, 1, Finish(KEY, FinishReason.ERROR, code=ErrorCode.NAN_LOGITS, text="nan"))
    tokens, closed = frames.take()
    assert isinstance(tokens, Tokens)
    assert tokens.rows[0].finish is FinishReason.STOP
    assert tokens.rows[0].stop_id == 10
    assert tokens.rows[1].finish is None
    assert closed == Closed(2, 1, CloseReason.ERROR, ErrorCode.NAN_LOGITS, "nan")


def test_a_regular_end_without_a_token_is_an_empty_row() -> None:
    frames = Frames(LIMITS)
    frames.finish(1, 3, 17, Finish(KEY, FinishReason.LENGTH))
    assert frames.take() == [Tokens((TokenRow(1, 3, 17, (), FinishReason.LENGTH),))]


def test_opened_comes_before_tokens_and_closed_after() -> None:
    frames = Frames(LIMITS)
    frames.finish(9, 1, 0, Finish(KEY, FinishReason.CANCELLED))
    frames.emit(1, 1, emit(0, 10))
    frames.add(Opened(1, 1, 0, 0))
    assert [type(message) for message in frames.take()] == [Opened, Tokens, Closed]


def test_many_rows_and_long_rows_are_cut_into_frames_that_encode() -> None:
    frames = Frames(LIMITS)
    top = tuple((token, -1.0) for token in range(20))
    for session in range(1, 300):
        for index in range(12):
            frames.emit(session, 1, emit(index, index, TokenLogprobs(-0.5, top)))
    for index in range(40_000):
        frames.emit(1000, 1, emit(index, 5))
    frames.finish(1000, 1, 40_000, Finish(KEY, FinishReason.LENGTH))
    seen: dict[int, int] = {}
    finishes = []
    for message in frames.take():
        assert isinstance(message, Tokens)
        encode(message, LIMITS)
        for row in message.rows:
            assert row.first == seen.get(row.session, 0)
            seen[row.session] = row.first + len(row.ids)
            if row.finish:
                finishes.append((row.session, seen[row.session]))
    assert seen == {**dict.fromkeys(range(1, 300), 12), 1000: 40_000}
    assert finishes == [(1000, 40_000)]


def test_reasons_of_ends_are_told_apart() -> None:
    reasons = []
    for reason, code in [
        (FinishReason.DEADLINE, ErrorCode.DEADLINE_EXCEEDED),
        (FinishReason.ERROR, ErrorCode.PREEMPT_FAILED),
        (FinishReason.CANCELLED, None),
        (FinishReason.CANCELLED, ErrorCode.DRAINING),
    ]:
        frames = Frames(LIMITS)
        frames.finish(1, 1, 0, Finish(KEY, reason, code=code))
        (closed,) = frames.take()
        assert isinstance(closed, Closed)
        reasons.append(closed.reason)
    assert reasons == [
        CloseReason.DEADLINE,
        CloseReason.PREEMPT_FAILED,
        CloseReason.CANCELLED,
        CloseReason.DRAIN,
    ]
