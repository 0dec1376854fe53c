"""Log-probabilities in the API's shape (http_api.md 3.4): one entry a token, bytes beside text, finite numbers. Pure."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from superfluid_core.session import TokenLogprobs
from superfluid_head.text.channel import Sampled

LOGPROB_MIN = -9999.0


def content_entries(
    tokens: Sequence[Sampled],
    token_bytes: Callable[[int], bytes],
    top: int,
    *,
    as_ids: bool = False,
) -> list[dict[str, Any]]:
    """Return the `logprobs.content` list for `tokens`, each with its `top` best alternatives, best first.

    With `as_ids` tokens are named by number, for texts that spell them may be the same.
    """
    entries: list[dict[str, Any]] = []
    for sampled in tokens:
        measured = sampled.logprobs
        logprob = LOGPROB_MIN if measured is None else measured.logprob
        entry = _entry(sampled.token, logprob, token_bytes)
        ranked = sorted(measured.top if measured else (), key=lambda pair: (-pair[1], pair[0]))
        best = [_entry(token, value, token_bytes) for token, value in ranked[:top]]
        if as_ids:
            entry["token"] = id_name(sampled.token)
            for each, (token, _) in zip(best, ranked, strict=False):
                each["token"] = id_name(token)
        entry["top_logprobs"] = best
        entries.append(entry)
    return entries


class LegacyLogprobs:
    """The four parallel lists of /v1/completions, for one choice; `text_offset` counts characters of its whole text.

    A token leaves with the text that holds its last character, so offsets of a token that was held begin where its
    text does, and never go back.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], top: int, offset: int, *, as_ids: bool
    ) -> None:
        self._token_bytes = token_bytes
        self._top = top
        self._as_ids = as_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = offset

    def take(self, tokens: Sequence[Sampled]) -> dict[str, list[Any]]:
        """Give the lists for the next tokens, in order."""
        found: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for sampled in tokens:
            measured = sampled.logprobs
            found["tokens"].append(self._name(sampled.token))
            found["token_logprobs"].append(
                finite(LOGPROB_MIN if measured is None else measured.logprob)
            )
            found["top_logprobs"].append(self._best(sampled) if self._top else None)
            found["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(self._token_bytes(sampled.token)))
        return found

    def prompt(
        self, ids: Sequence[int], scores: Sequence[TokenLogprobs], text: str
    ) -> dict[str, list[Any]]:
        """Give the lists for an echoed prompt, of which the first token has no score; what follows begins behind `text`.

        A token of which `text` shows nothing (a control token, or one that was put before it) takes no room.
        """
        found: dict[str, list[Any]] = {
            "tokens": [self._name(token) for token in ids],
            "token_logprobs": [None, *(finite(score.logprob) for score in scores)][: len(ids)],
            "top_logprobs": [None] * len(ids),
            "text_offset": list(_offsets(ids, self._token_bytes, text)),
        }
        if self._top:
            told = [Sampled(*pair) for pair in zip(ids[1:], scores, strict=True)]
            found["top_logprobs"] = [None, *map(self._best, told)][: len(ids)]
        self._offset = len(text)
        return found

    def _best(self, sampled: Sampled) -> dict[str, float]:
        """Map the best ids and the sampled one; of two with one name the likelier stays."""
        measured = sampled.logprobs
        if measured is None:
            return {}
        ranked = sorted(measured.top, key=lambda pair: (-pair[1], pair[0]))[: self._top]
        best: dict[str, float] = {}
        for token, value in (*ranked, (sampled.token, measured.logprob)):
            best.setdefault(self._name(token), finite(value))
        return best

    def _name(self, token: int) -> str:
        if self._as_ids:
            return id_name(token)
        return self._token_bytes(token).decode("utf-8", "backslashreplace")


def _offsets(ids: Sequence[int], token_bytes: Callable[[int], bytes], text: str) -> Iterator[int]:
    """Say where in `text` each token begins: what it does not show is passed over."""
    data = text.encode()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    at = chars = 0
    for token in ids:
        yield chars
        piece = token_bytes(token)
        if not data.startswith(piece, at):
            piece = piece[1:] if at == 0 and piece[:1] == b" " else b""
        if data.startswith(piece, at):
            at += len(piece)
            chars += len(decoder.decode(piece))


def id_name(token: int) -> str:
    """Name a token by its number."""
    return f"token_id:{token}"


def finite(value: float) -> float:
    """Make a number that JSON has."""
    is_finite = math.isfinite(value) and value > LOGPROB_MIN
    return min(value, 0.0) if is_finite else LOGPROB_MIN


def _entry(token: int, value: float, token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
    data = token_bytes(token)
    # Made anew each time: keeping the words of a vocabulary took 20 MiB and saved less than a tenth of an event's time.
    return {
        "token": data.decode("utf-8", "backslashreplace"),
        "logprob": finite(value),
        "bytes": list(data),
    }
