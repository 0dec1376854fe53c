"""From a chat body to a run: resolve, render, tokenize, judge. Every dialect that converses is put into a chat body and comes this way.

Owns the order of the refusals, which is the same on all routes: what cannot be honoured is refused before the fleet is asked. It must
not know how a reply looks; a dialect that is not chat's own names its members in refusals by `renamed`.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from superfluid_core.errors import InvalidRequestError
from superfluid_head.api.conversation import conversation, has_large_calls
from superfluid_head.api.errors import ApiError
from superfluid_head.api.run import Caller, Prepared, channels_of, template_of
from superfluid_head.api.sampling import (
    cut,
    judge_chat,
    judge_ids,
    judge_minimum,
    sampling_params,
)
from superfluid_head.api.schemas.chat import ChatRequest
from superfluid_head.api.schemas.common import read_model
from superfluid_head.api.state import Head, Target
from superfluid_head.api.tools import grammar_of, judge_offer, offer_of, speech_of
from superfluid_head.text.channel import Channel
from superfluid_head.text.chat import ModelText, output_budget
from superfluid_head.text.speech import Speech

COUNTED_MAX = 1 << 17
"""Tokens that are counted even for a model of a smaller window."""


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation that nothing can refuse any more but the fleet, and how its answers are to be read."""

    body: ChatRequest
    prepared: Prepared
    speech: Speech

    def channels(self, *, keep_tokens: bool = False) -> list[Channel]:
        return channels_of(self.prepared, self.body, keep_tokens=keep_tokens, speech=self.speech)


async def prepare_chat(head: Head, body: ChatRequest, caller: Caller) -> tuple[Prepared, Speech]:
    """Resolve, render, tokenize and judge. Raises ApiError or SuperfluidError."""
    offer = offer_of(body)
    target, text = head.target(body.model)
    judge_offer(body, offer, text.dialect)
    judge_ids(body, text.tokenizer.vocabulary)
    prompt = await _rendered(body, target.window, text)
    budget = output_budget(target.window, len(prompt), body.output_max)
    judge_minimum(body.min_tokens, budget)
    bad_words = await text.spell_words(body.bad_words) if body.bad_words else ()
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_params(body, secrets.randbits(64), bad_words, logprobs)
    speech = speech_of(body, offer, text, prompt)
    grammar = await grammar_of(body, offer, text, speech)
    first = template_of(head, caller, target, body, sampling, grammar)
    first.prompt, first.max_output = prompt, budget
    requests = (first, *(replace(first, choice=choice) for choice in range(1, body.n)))
    return Prepared(target, text, caller, requests, len(prompt), body.stream), speech


def read_chat(members: Mapping[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """Validate a chat body that a dialect made. Raises ApiError 400 in the dialect's names."""
    try:
        body = read_model(ChatRequest, dict(members))
        judge_chat(body)
    except ApiError as error:
        raise renamed(error, names) from None
    return body


async def prepare_talk(
    head: Head, body: ChatRequest, caller: Caller, names: Mapping[str, str]
) -> Talk:
    """Do what chat does; refusals name the dialect's members. Raises ApiError or SuperfluidError."""
    try:
        return Talk(body, *await prepare_chat(head, body, caller))
    except ApiError as error:
        raise renamed(error, names) from None
    except InvalidRequestError as error:
        param = _renamed(error.param, names)
        words = _reworded(error.message, error.param, param)
        raise InvalidRequestError(words, param=param, code=error.code) from None


async def count_prompt(head: Head, body: ChatRequest) -> tuple[Target, int]:
    """Count the tokens that the body's prompt takes. Raises ApiError or SuperfluidError."""
    offer = offer_of(body)
    target, text = head.target(body.model)
    judge_offer(body, offer, text.dialect)
    return target, len(await _rendered(body, max(target.window, COUNTED_MAX), text))


async def _rendered(body: ChatRequest, window: int, text: ModelText) -> tuple[int, ...]:
    is_large = has_large_calls(body)
    shown = await asyncio.to_thread(conversation, body) if is_large else conversation(body)
    return cut(await text.encode(shown, window), body)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Say a refusal in the names of a dialect."""
    param = _renamed(error.param, names)
    return replace(error, message=_reworded(error.message, error.param, param), param=param)


def _renamed(param: str | None, names: Mapping[str, str]) -> str | None:
    """Rename the longest known beginning of a path; `tools[]` stands for any of them."""
    at = re.match(r"tools(\[\d+\])", param or "")
    if param is not None and at is not None:
        told = _renamed("tools[]" + param[at.end() :], names) or ""
        return told.replace("[]", at[1], 1)
    for name in sorted(names, key=len, reverse=True):
        if param is not None and (param == name or param.startswith((f"{name}.", f"{name}["))):
            return names[name] + param[len(name) :]
    return param


def _reworded(words: str, old: str | None, new: str | None) -> str:
    return words if old is None or new is None else words.replace(old, new)
