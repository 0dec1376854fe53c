"""What a caller of the fleet hands in and what it gets back: plain values, no node or link in sight.

A `GenerationRequest` is one choice of one request, fully resolved: ids, absolute limits, a seed. The events of a
generation come in output order: tokens exactly once each, and as the last one an `EndEvent`, unless an error is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from superfluid_core.session import (
    FinishReason,
    Grammar,
    QosClass,
    SamplingParams,
    TokenLogprobs,
)


@dataclass(slots=True, unsafe_hash=True)
class GenerationRequest:
    """One choice; nobody changes it (not frozen, as a `SessionSpec`). `stop_ids` are the request's own; the model's end-of-text ids count unless `ignore_eos`.

    `weight` is the share of its tenant in fair queueing. `max_output` and `min_output` are absolute counts; `deadline_ns` is a time of the head's monotonic clock, and so is
    `start_by_ns`: who has not got a lane until then is dropped, who has is not bound by it.
    """

    request_id: str
    model: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_output: int
    min_output: int = 0
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    choice: int = 0
    qos: QosClass = QosClass.AGENT
    tenant: str = "anonymous"
    weight: int = 1
    batch_invariant: bool = False
    cache_salt: bytes = field(default=b"", repr=False)
    grammar: Grammar | None = None
    deadline_ns: int | None = None
    start_by_ns: int | None = None


@dataclass(slots=True)
class TokensEvent:
    """New ids; `first` is the output index of `ids[0]`. `logprobs` is parallel to `ids` or empty."""

    first: int
    ids: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Context tokens computed, of `total`; `cached` of them came from a prefix cache."""

    done: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class MovedEvent:
    """The generation goes on elsewhere: nothing is lost, the reader sees a pause."""

    moves: int
    reason: str


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The one end. `cached` counts prompt tokens that the first placement found in a cache.

    `queued_ms` is how long it waited, in the head and for a lane, before its first token.
    """

    reason: FinishReason
    stop_id: int | None
    cached: int
    moves: int
    queued_ms: int = field(default=0, compare=False)


GenerationEvent = TokensEvent | ProgressEvent | MovedEvent | EndEvent
