"""What a lane's sampling needs, built once when a session takes the lane.

Owns the translation of SamplingParams into one row: cut to the vocabulary, made dense where a step applies it whole. Nothing here
draws. The allowed ids, the logit bias and single-token bad words become one additive row, as all three are the same sum.

Bad words of several ids are matched against the generated ids only: what the prompt says is no output.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from superfluid_core.scheduler.plan import LaneStart
from superfluid_core.session import SamplingParams


@dataclass(slots=True)
class SamplingRow:
    """One lane. `recent` are its last output ids, kept only as far back as a bad word reaches."""

    params: SamplingParams
    choice: int
    stop_ids: frozenset[int]
    min_output: int
    static: Tensor | None
    bad_words: tuple[tuple[int, ...], ...]
    recent: list[int]

    @property
    def is_penalized(self) -> bool:
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )

    @property
    def is_filtered(self) -> bool:
        params = self.params
        return params.top_k > 0 or params.min_p > 0.0 or params.top_p < 1.0

    def banned_now(self, index: int) -> list[int]:
        """Ids that must not be drawn as output `index`: stop ids below the minimum, last ids of bad words."""
        banned = list(self.stop_ids) if index < self.min_output else []
        for word in self.bad_words:
            if self.recent[-(len(word) - 1) :] == list(word[:-1]):
                banned.append(word[-1])
        return banned

    def remember(self, token: int) -> None:
        """Keep `token` for bad words."""
        self.recent.append(token)
        reach = max(len(word) for word in self.bad_words) - 1
        del self.recent[:-reach]


def _known(ids: Iterable[int], vocabulary: int) -> list[int]:
    return [token for token in ids if 0 <= token < vocabulary]


def _static_row(params: SamplingParams, vocabulary: int, device: torch.device) -> Tensor | None:
    """Sum allowed ids, bias and single bad words into numbers to add; None when there are none of them."""
    single = _known((word[0] for word in params.bad_words if len(word) == 1), vocabulary)
    if not (params.allowed_token_ids or params.logit_bias or single):
        return None
    row = torch.zeros(vocabulary)
    if params.allowed_token_ids:
        row.fill_(-torch.inf)
        row[_known(params.allowed_token_ids, vocabulary)] = 0.0
    bias = [(token, value) for token, value in params.logit_bias if 0 <= token < vocabulary]
    if bias:
        row[[token for token, _ in bias]] += torch.tensor([value for _, value in bias])
    row[single] = -torch.inf
    return row.to(device)


def make_row(start: LaneStart, vocabulary: int, device: torch.device) -> SamplingRow:
    """Build the row of a session that takes a lane."""
    params = start.spec.sampling
    words = tuple(
        word
        for word in params.bad_words
        if len(word) > 1 and len(_known(word, vocabulary)) == len(word)
    )
    reach = max((len(word) for word in words), default=1) - 1
    return SamplingRow(
        params=params,
        choice=start.spec.choice,
        stop_ids=frozenset(_known(start.spec.stop_ids, vocabulary)),
        min_output=start.spec.min_output,
        static=_static_row(params, vocabulary, device),
        bad_words=words,
        recent=list(start.outputs[-reach:]) if reach else [],
    )
