"""Turns an OPEN of the wire into a session of the scheduler, or into the reason why not. Pure.

The codec has checked shapes and ranges; here is judged what only this node knows: its models, vocabulary, window and what its
engine can do. Limits are absolute. A session that wants more than the window holds is not refused when its context fits: it
ends with `length` at the window, which is what a move to a smaller node promises (decisions 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from superfluid_core.engine.base import EngineInfo
from superfluid_core.errors import ErrorCode
from superfluid_core.session import SamplingParams, SessionKey, SessionSpec
from superfluid_core.wire.messages import Open

MS_NS = 1_000_000
NAME_CHARS_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Denial:
    """Why an OPEN is refused; goes out as REFUSE."""

    code: ErrorCode
    text: str
    retry_after_ms: int | None = None


def judge_open(
    message: Open, info: EngineInfo | None, key: SessionKey, now_ns: int
) -> SessionSpec | Denial:
    """Build the session that `message` asks for, under `key`. `now_ns` is monotonic and starts its deadline.

    `info` describes the engine of the model that it names, None when there is none.
    """
    if info is None:
        shown = message.model[:NAME_CHARS_SHOWN]
        return Denial(ErrorCode.MODEL_NOT_FOUND, f"this node does not serve {shown!r}")
    denial = (
        _judge_ids(message, info.vocabulary)
        or _judge_lengths(message, info)
        or _judge_capabilities(message, info)
    )
    if denial is not None:
        return denial
    stop_ids = frozenset(message.stop_ids)
    room = info.window - len(message.prompt)
    max_output = min(message.max_output, room)
    deadline_ms, start_ms = message.deadline_ms, message.start_deadline_ms
    return SessionSpec(
        key=key,
        model=message.model,
        prompt=message.prompt,
        max_output=max_output,
        delivered=message.delivered,
        min_output=min(message.min_output, max_output),
        stop_ids=stop_ids if message.ignore_eos else stop_ids | frozenset(info.eos_ids),
        sampling=message.sampling,
        choice=message.choice,
        qos=message.qos,
        tenant=message.tenant,
        weight=message.weight,
        batch_invariant=message.batch_invariant,
        cache_salt=message.cache_salt,
        grammar=message.grammar,
        deadline_ns=None if deadline_ms is None else now_ns + deadline_ms * MS_NS,
        start_deadline_ns=None if start_ms is None else now_ns + start_ms * MS_NS,
        prompt_logprobs=message.prompt_logprobs,
    )


def _is_beyond(ids: Sequence[int], vocabulary: int) -> bool:
    """Whether any id is: by the least and the greatest, for a long prompt is judged between two steps."""
    return len(ids) > 0 and (min(ids) < 0 or max(ids) >= vocabulary)


def _judge_ids(message: Open, vocabulary: int) -> Denial | None:
    """No id may reach the engine that its tables do not have."""
    sampling = message.sampling
    groups: tuple[tuple[str, Sequence[int]], ...] = (
        ("prompt", message.prompt),
        ("delivered", message.delivered),
        ("stop_ids", message.stop_ids),
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("bad_words", [token for word in sampling.bad_words for token in word]),
    )
    for name, ids in groups:
        if _is_beyond(ids, vocabulary):
            text = f"{name}: an id is outside the vocabulary of {vocabulary}"
            return Denial(ErrorCode.INVALID_REQUEST, text)
    if any(not word for word in sampling.bad_words):
        return Denial(ErrorCode.INVALID_REQUEST, "bad_words: an empty word")
    return None


def _judge_lengths(message: Open, info: EngineInfo) -> Denial | None:
    prompt, delivered = len(message.prompt), len(message.delivered)
    if prompt == 0:
        return Denial(ErrorCode.INVALID_REQUEST, "the prompt is empty")
    if message.max_output < 1:
        return Denial(ErrorCode.INVALID_REQUEST, "max_output is below 1")
    if message.min_output > message.max_output:
        return Denial(ErrorCode.INVALID_REQUEST, "min_output is above max_output")
    if delivered >= message.max_output:
        return Denial(ErrorCode.INVALID_REQUEST, "the output is complete already")
    if prompt + delivered + 1 > info.window:
        text = f"{prompt} + {delivered} tokens leave no room in a window of {info.window}"
        return Denial(ErrorCode.CONTEXT_LENGTH_EXCEEDED, text)
    return None


def _has_penalties(sampling: SamplingParams) -> bool:
    return (
        sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or sampling.repetition_penalty != 1.0
    )


def _has_masks(sampling: SamplingParams) -> bool:
    return bool(sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_words)


def _judge_capabilities(message: Open, info: EngineInfo) -> Denial | None:
    can = info.capabilities
    sampling = message.sampling
    needs = (
        ("penalties", _has_penalties(sampling), can.penalties),
        ("logit bias", _has_masks(sampling), can.logit_bias),
        ("logprobs", sampling.logprobs is not None, can.logprobs),
        ("structured output", message.grammar is not None, can.structured_output),
        ("batch-invariant lanes", message.batch_invariant, can.batch_invariant),
        ("prompt logprobs", message.prompt_logprobs is not None, can.prompt_logprobs),
    )
    for name, is_needed, is_there in needs:
        if is_needed and not is_there:
            return Denial(ErrorCode.UNSUPPORTED, f"the engine of this node has no {name}")
    return None
