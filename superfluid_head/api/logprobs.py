"""Log-probabilities in the API's shape (http_api.md 3.4): one entry a token, bytes beside text, finite numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from superfluid_head.text.channel import Sampled

LOGPROB_MIN = -9999.0


def content_entries(
    tokens: Sequence[Sampled], token_bytes: Callable[[int], bytes], top: int
) -> list[dict[str, Any]]:
    """Return the `logprobs.content` list for `tokens`, each with its `top` best alternatives, best first."""
    entries: list[dict[str, Any]] = []
    for sampled in tokens:
        measured = sampled.logprobs
        entry = _entry(
            sampled.token, LOGPROB_MIN if measured is None else measured.logprob, token_bytes
        )
        ranked = sorted(measured.top if measured else (), key=lambda pair: (-pair[1], pair[0]))
        entry["top_logprobs"] = [_entry(token, value, token_bytes) for token, value in ranked[:top]]
        entries.append(entry)
    return entries


def _entry(token: int, value: float, token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
    data = token_bytes(token)
    is_finite = math.isfinite(value) and value > LOGPROB_MIN
    return {
        "token": data.decode("utf-8", "backslashreplace"),
        "logprob": min(value, 0.0) if is_finite else LOGPROB_MIN,
        "bytes": list(data),
    }
