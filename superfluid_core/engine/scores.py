"""How likely a text is: log-probabilities of its tokens, asked for and computed as vectors are, beside the ticks.

Owns the name by which they are asked for and the form in which they travel. The first token has none. A text is scored by itself: no
session, no cache and no batch mate has part in it. Values are little-endian and of four bytes each, in columns:

    logprob f32[rows] | ids of the best u32[rows * best] | their logprobs f32[rows * best]
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from superfluid_core.errors import RemoteProtocolError
from superfluid_core.session import TokenLogprobs

PREFIX = "logprobs-"
BEST_MAX = 20
_VALUE_BYTES = 4


def scoring(best: int) -> str:
    """Name what is wanted: every token's log-probability and those of the `best` ids in its place."""
    return f"{PREFIX}{best}"


def best_of(pooling: str) -> int | None:
    """Reverse `scoring`; None for what is no such name."""
    count = pooling.removeprefix(PREFIX)
    if count == pooling or not count.isascii() or not count.isdigit() or len(count) > 2:
        return None
    return int(count) if int(count) <= BEST_MAX else None


def pack_scores(rows: Sequence[TokenLogprobs]) -> bytes:
    """Put rows of equally many best ids into columns."""
    ids = [token for row in rows for token, _ in row.top]
    values = [row.logprob for row in rows], [value for row in rows for _, value in row.top]
    chosen, best = (struct.pack(f"<{len(each)}f", *each) for each in values)
    return chosen + struct.pack(f"<{len(ids)}I", *ids) + best


def unpack_scores(data: bytes, tokens: int) -> list[TokenLogprobs]:
    """Read the scores of a text of so many tokens, the second one's first. Raises RemoteProtocolError."""
    rows = tokens - 1
    best, rest = divmod(len(data) // _VALUE_BYTES - rows, 2 * rows)
    if rest or len(data) % _VALUE_BYTES or not 0 <= best <= BEST_MAX:
        raise RemoteProtocolError("scores of another number of tokens came")
    split = _VALUE_BYTES * rows
    chosen, ids = _values("f", data[:split]), _values("I", data[split : split * (1 + best)])
    values = _values("f", data[split * (1 + best) :])
    pairs = list(zip(ids, values, strict=True))
    return [
        TokenLogprobs(chosen[row], tuple(pairs[row * best : (row + 1) * best]))
        for row in range(rows)
    ]


def _values(kind: str, data: bytes) -> tuple[Any, ...]:
    return struct.unpack(f"<{len(data) // _VALUE_BYTES}{kind}", data)
