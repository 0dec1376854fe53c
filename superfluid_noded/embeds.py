"""EMBED asks: judged here, computed beside the ticks of the model's engine, answered in pieces.

A text is no session: it has no lane, no lease and no epoch, and whoever lost its link asks again. What waits is bounded by the line of the
engine; a text whose head is gone is dropped before it is begun. Runs on the event loop, between awaits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from superfluid_core.engine.base import EngineInfo
from superfluid_core.engine.embedding import POOLINGS, Embedding, Outcome
from superfluid_core.engine.scores import best_of
from superfluid_core.errors import ErrorCode, SuperfluidError
from superfluid_core.limits import WireLimits
from superfluid_core.wire.messages import Embed, Embedded, Refuse
from superfluid_core.wire.pieces import split_bytes
from superfluid_noded.heads import Head, Roster
from superfluid_noded.judge import NAME_CHARS_SHOWN, Denial
from superfluid_noded.serving import Serving

FULL_RETRY_MS = 1_000
SCORED_MIN = 2
"""Tokens of a text that can be scored: the first one has no score."""


class EmbedDesk:
    """Takes what heads want embedded."""

    def __init__(self, servings: Sequence[Serving], roster: Roster) -> None:
        self._servings = servings
        self._roster = roster
        self._limits = WireLimits()

    def take(self, head: Head, message: Embed) -> Denial | None:
        """Put a text into its engine's line, or say why not."""
        serving = next((each for each in self._servings if message.model in each.card.names), None)
        if serving is None:
            shown = message.model[:NAME_CHARS_SHOWN]
            return Denial(ErrorCode.MODEL_NOT_FOUND, f"this node does not serve {shown!r}")
        denial = judge_embed(message, serving.card.info)
        if denial is not None:
            return denial
        text = Embedding(message.ids, message.pooling, partial(self._tell, head, message.session))
        text.is_wanted = lambda: self._roster.heads.get(head.number) is head
        if not serving.loop.embed(text):
            words = "too many texts wait to be embedded"
            return Denial(ErrorCode.OVERLOADED, words, FULL_RETRY_MS)
        return None

    def _tell(self, head: Head, session: int, outcome: Outcome) -> None:
        if isinstance(outcome, SuperfluidError):
            words = outcome.message[: self._limits.text_chars_max]
            refusal = Refuse(outcome.code, words, outcome.retry_after_ms, session, 0)
            self._roster.send(head, (refusal,))
            return
        pieces = split_bytes(outcome, self._limits.file_piece_bytes)
        self._roster.send(
            head,
            [Embedded(session, at, len(pieces), piece) for at, piece in enumerate(pieces)],
        )


def judge_embed(message: Embed, info: EngineInfo) -> Denial | None:
    """Say why a text cannot be embedded by this engine."""
    if not info.capabilities.embeddings:
        return Denial(ErrorCode.UNSUPPORTED, "this engine has no embeddings")
    if message.pooling not in POOLINGS and best_of(message.pooling) is None:
        return Denial(ErrorCode.UNSUPPORTED, f"pooling is one of {', '.join(POOLINGS)}")
    least = 1 if message.pooling in POOLINGS else SCORED_MIN
    if len(message.ids) < least:
        return Denial(ErrorCode.INVALID_REQUEST, "the text is too short")
    if len(message.ids) > info.window:
        words = f"the text has {len(message.ids)} tokens; the window is {info.window}"
        return Denial(ErrorCode.CONTEXT_LENGTH_EXCEEDED, words)
    if any(not 0 <= token < info.vocabulary for token in message.ids):
        return Denial(ErrorCode.INVALID_REQUEST, f"a token id is not below {info.vocabulary}")
    return None
