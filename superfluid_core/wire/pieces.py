"""Cutting what is long into messages that fit a frame.

Every function returns at least one piece, so that an empty thing is still an answer. Sizes are the schema's worst cases.
"""

from __future__ import annotations

from collections.abc import Sequence

from superfluid_core.limits import WireLimits
from superfluid_core.session import TokenLogprobs
from superfluid_core.wire.columns import HASH_BYTES
from superfluid_core.wire.messages import (
    Prefix,
    PromptLogprobs,
    SessionRow,
    Sessions,
    TokenRow,
    Tokens,
)
from superfluid_core.wire.schema import SESSION_ROWS_MAX

_HEAD_ROOM_BYTES = 4 * 1024
_ROW_HEAD_BYTES = 64


def split_bytes(data: bytes, piece_bytes: int) -> list[bytes]:
    """Cut into pieces of at most `piece_bytes`, in order (FILE, STATS, EMBEDDED)."""
    return [data[at : at + piece_bytes] for at in range(0, len(data), piece_bytes)] or [b""]


def split_tokens(rows: Sequence[TokenRow], limits: WireLimits) -> list[Tokens]:
    """Make one TOKENS frame if it fits, else several. A single row must fit by itself."""
    frames: list[Tokens] = []
    batch: list[TokenRow] = []
    bytes_used = 0
    heads_used = 0
    room = limits.tokens_bytes_max - _HEAD_ROOM_BYTES
    for row in rows:
        head = _ROW_HEAD_BYTES + len(row.logprobs)
        body = head + 4 * len(row.ids) + _logprob_bytes(row.logprobs)
        is_full = len(batch) >= limits.token_rows_max or bytes_used + body > room
        if batch and (is_full or heads_used + head > limits.head_bytes_max - _HEAD_ROOM_BYTES):
            frames.append(Tokens(tuple(batch)))
            batch, bytes_used, heads_used = [], 0, 0
        batch.append(row)
        bytes_used += body
        heads_used += head
    if batch:
        frames.append(Tokens(tuple(batch)))
    return frames


def split_prefix(
    sequence: int,
    added: Sequence[bytes],
    removed: Sequence[bytes],
    limits: WireLimits,
    *,
    snapshot: bool,
    engine: int = 0,
) -> list[Prefix]:
    """Cut a report of blocks into numbered pieces, all under one sequence number."""
    room = (limits.prefix_bytes_max - _HEAD_ROOM_BYTES) // HASH_BYTES
    count = max(1, -(-(len(added) + len(removed)) // room))
    pieces = []
    for piece in range(count):
        low, high = piece * room, (piece + 1) * room
        here = tuple(added[low:high])
        gone = tuple(removed[max(0, low - len(added)) : max(0, high - len(added))])
        pieces.append(Prefix(sequence, piece, count, snapshot, here, gone, engine))
    return pieces


def split_prompt_logprobs(
    session: int, epoch: int, first: int, rows: Sequence[TokenLogprobs], limits: WireLimits
) -> list[PromptLogprobs]:
    """Cut rows, from position `first` on, into frames."""
    pieces: list[PromptLogprobs] = []
    room = limits.frame_bytes_max - _HEAD_ROOM_BYTES
    start = bytes_used = 0
    for index, row in enumerate(rows):
        body = 1 + _logprob_bytes((row,))
        if bytes_used + body > room:
            piece = tuple(rows[start:index])
            pieces.append(PromptLogprobs(session, epoch, first + start, piece))
            start, bytes_used = index, 0
        bytes_used += body
    pieces.append(PromptLogprobs(session, epoch, first + start, tuple(rows[start:])))
    return pieces


def split_sessions(request: int, rows: Sequence[SessionRow]) -> list[Sessions]:
    """Cut a listing into numbered pieces."""
    step = SESSION_ROWS_MAX
    groups = [tuple(rows[at : at + step]) for at in range(0, len(rows), step)] or [()]
    return [Sessions(request, piece, len(groups), group) for piece, group in enumerate(groups)]


def _logprob_bytes(rows: Sequence[TokenLogprobs]) -> int:
    return sum(8 + 12 * len(row.top) for row in rows)
