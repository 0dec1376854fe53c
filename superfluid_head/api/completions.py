"""POST /v1/completions: raw prompts, echo, best of several, fill-in-the-middle; streamed and not from the same events.

Owns the shapes of its replies and what only this route has. The run itself, its counts and its session are `run.py`'s, as for chat;
choice k of prompt p has the index p * n + k, and draws like choice k of that prompt alone. A request for the echo alone is
answered here: no node has anything to do for it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from superfluid_core.session import QosClass
from superfluid_head.api.body import read_as
from superfluid_head.api.choices import ChoiceEvent, Emit, Ended, Started, Text
from superfluid_head.api.logprobs import LegacyLogprobs
from superfluid_head.api.prompts import Prompt, encode_prompts, judge_completion, judge_fim
from superfluid_head.api.run import (
    Caller,
    Prepared,
    Run,
    ShortWay,
    channels_of,
    judge_caller,
    template_of,
)
from superfluid_head.api.sampling import (
    judge_constrained,
    judge_ids,
    judge_minimum,
    sampling_params,
)
from superfluid_head.api.schemas.common import read_model
from superfluid_head.api.schemas.completions import CompletionRequest, Ids
from superfluid_head.api.scores import PromptScores
from superfluid_head.api.sse import (
    EventStream,
    StreamingReply,
    TextTemplate,
    event,
    while_connected,
)
from superfluid_head.api.state import Head
from superfluid_head.text.chat import output_budget

ECHO_ONLY = 0
LISTED_MAX = 1_024
"""Tokens of prompts whose lists are made in a moment."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a body asks for, prepared: `prepared.requests` is empty when only an echo is wanted."""

    body: CompletionRequest
    prompts: tuple[Prompt, ...]
    prepared: Prepared


class CompletionsEndpoint:
    """The route's handler."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._scores = PromptScores(head.fleet)

    async def post(self, request: Request) -> Response:
        """Continue one text or several, or fill in between prompt and suffix (OpenAI completions)."""
        head = self._head
        most = head.limits.choices_max

        def read(members: dict[str, Any]) -> tuple[CompletionRequest, list[str | Ids]]:
            body = read_model(CompletionRequest, members)
            return body, judge_completion(body, most)

        body, prompts = await read_as(request, head.limits, read)
        head.inflight.judge()
        default = None if body.suffix is None else QosClass.COMPLETION
        caller = judge_caller(head, request, default)
        asked = await while_connected(request, prepare_completion(head, body, prompts, caller))
        if body.echo and body.logprobs is not None:
            asked = await while_connected(request, self._scored(asked))
        is_long = asked.prepared.prompt_tokens > LISTED_MAX
        run = await asyncio.to_thread(_Run, head, asked) if is_long else _Run(head, asked)
        if body.stream:
            return StreamingReply(run.stream, head.limits)
        return await while_connected(request, run.collect())

    async def _scored(self, asked: Completion) -> Completion:
        """Find out how likely the prompts are. Raises SuperfluidError."""
        head, prepared = self._head, asked.prepared
        every = [prompt.ids for prompt in asked.prompts]
        async with head.inflight.hold():
            name = prepared.target.name
            scores = await self._scores.of(name, every, asked.body.logprobs or 0)
        if not prepared.requests:  # else the run charges and counts the prompts
            principal, count = prepared.caller.principal, prepared.prompt_tokens
            head.quotas.charge(principal, count, head.clock.now_ns())
            whose = (prepared.target.name, principal.name)
            head.metrics.tokens(whose, prompt=count, cached=0, completion=0)
        prompts = tuple(
            replace(prompt, scores=tuple(found))
            for prompt, found in zip(asked.prompts, scores, strict=True)
        )
        return replace(asked, prompts=prompts)


async def prepare_completion(
    head: Head, body: CompletionRequest, given: Sequence[str | Ids], caller: Caller
) -> Completion:
    """Resolve, tokenize and judge. Raises ApiError or SuperfluidError."""
    constraint = body.constraint()
    if constraint is not None:
        judge_constrained(body)
    target, text = head.target(body.model)
    judge_ids(body, text.tokenizer.vocabulary)
    fim = judge_fim(body, text)
    prompts = await encode_prompts(body, given, text, target.window, fim)
    bad_words = await text.spell_words(body.bad_words) if body.bad_words else ()
    logprobs = 0 if body.tried > body.n and body.logprobs is None else body.logprobs
    sampling = sampling_params(body, secrets.randbits(64), bad_words, logprobs)
    grammar = None
    if constraint is not None:
        grammar = await text.constrain(constraint, param=body.constrained_by)
    template = template_of(head, caller, target, body, sampling, grammar)
    if fim is not None:
        template = replace(template, stop_ids=_united(template.stop_ids, fim.end_ids))
    requests = []
    for prompt in prompts:
        budget = output_budget(target.window, len(prompt.ids), body.max_tokens, "prompt")
        judge_minimum(body.min_tokens, budget)
        requests += [
            replace(template, prompt=prompt.ids, max_output=budget, choice=choice)
            for choice in range(body.tried)
            if budget != ECHO_ONLY
        ]
    count = sum(len(prompt.ids) for prompt in prompts)
    prepared = Prepared(target, text, caller, tuple(requests), count, body.stream)
    return Completion(body, tuple(prompts), prepared)


def _united(some: tuple[int, ...], others: frozenset[int]) -> tuple[int, ...]:
    return tuple(sorted({*some, *others}))


@dataclass(slots=True)
class _Answer:
    """One choice under way. `score` sums the log-probabilities of its ids, for the best of several."""

    logprobs: LegacyLogprobs | None
    text: list[str]
    lists: dict[str, list[Any]]
    ids: list[int]
    score: float = 0.0
    end: Ended | None = None

    @property
    def mean(self) -> float:
        return self.score / max(1, len(self.ids))


class _Run(Run):
    """One accepted request: its channels, and the two shapes of its reply."""

    def __init__(self, head: Head, asked: Completion) -> None:
        super().__init__(head, asked.prepared, "completion", "cmpl-")
        self._body = asked.body
        self._prompts = asked.prompts
        self._answers = [
            self._fresh(prompt) for prompt in asked.prompts for _ in range(self._body.tried)
        ]
        options = self._body.stream_options
        self._usage_wanted = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats
        self._is_begun = False
        self._templates: dict[int, TextTemplate] = {}

    def _fresh(self, prompt: Prompt) -> _Answer:
        body = self._body
        legacy = None
        if body.logprobs is not None:
            legacy = LegacyLogprobs(
                self.prepared.text.tokenizer.token_bytes,
                body.logprobs,
                0,
                as_ids=body.return_tokens_as_token_ids,
            )
        echo = [prompt.text] if body.echo else []
        lists: dict[str, list[Any]] = {}
        if legacy is not None and body.echo:
            lists = legacy.prompt(prompt.ids, prompt.scores, prompt.text)
        elif legacy is not None:
            lists = legacy.take(())
        return _Answer(legacy, echo, lists, [])

    async def collect(self) -> Response:
        """Answer all at once."""

        async def emit(happened: ChoiceEvent) -> None:
            self.note(happened)
            if isinstance(happened, Started):
                return
            answer = self._answers[happened.choice]
            answer.ids += happened.ids
            if isinstance(happened, Ended):
                answer.end = happened
                return
            answer.text.append(happened.delta.text)
            for sampled in happened.delta.tokens:
                answer.score += 0.0 if sampled.logprobs is None else sampled.logprobs.logprob
            for name, more in self._lists(happened).items():
                answer.lists[name] += more

        await self._follow(emit)
        content = json.dumps(self._whole(), ensure_ascii=False, allow_nan=False).encode()
        return Response(content, 200, self.headers(), "application/json")

    async def stream(self, stream: EventStream) -> None:
        """Answer in chunks: the echo, text, one finish chunk a choice, usage if asked."""

        async def emit(happened: ChoiceEvent) -> None:
            self.note(happened)
            await self._begin(stream)
            match happened:
                case Text():
                    await stream.put(self._told(happened))
                case Ended():
                    await stream.put(self._last(happened.choice, happened))
                case Started():
                    pass

        await self._follow(emit, ShortWay(stream, self, self._told, self._templates))
        if not self.prepared.requests:
            await self._begin(stream)
            for choice in range(len(self._answers)):
                await stream.put(self._last(choice, None))
        if self._usage_wanted:
            await stream.put(event({**self._envelope(), "choices": [], "usage": self.usage()}))

    async def _follow(self, emit: Emit, way: ShortWay | None = None) -> None:
        if self.prepared.requests:
            keep = self._body.logprobs is not None or self._body.tried > self._body.n
            channels = channels_of(self.prepared, self._body, keep_tokens=keep)
            await self.follow(channels, emit, way)

    async def _begin(self, stream: EventStream) -> None:
        """Send what precedes all text, once, in ascending order."""
        if self._is_begun:
            return
        self._is_begun = True
        if not (self._body.echo or self._body.return_token_ids):
            return
        begun = []
        for choice, answer in enumerate(self._answers):
            extra = self._prompt_ids(choice)
            if self._body.echo:
                extra["logprobs"] = answer.lists or None
            begun.append(self._chunk(choice, "".join(answer.text), extra))
        await stream.put(b"".join(begun))

    # --- shapes

    def _told(self, happened: Text) -> bytes:
        """Make the chunk of some text."""
        body, choice = self._body, happened.choice
        if body.logprobs is None and not body.return_token_ids and not self._usage_always:
            template = self._templates.get(choice)
            if template is None:
                template = TextTemplate(lambda text: self._chunk(choice, text, {}))
                self._templates[choice] = template
            return template.event(happened.delta.text)
        extra = {"logprobs": self._lists(happened) or None}
        extra |= self._token_ids(happened.ids)
        return self._chunk(choice, happened.delta.text, extra)

    def _lists(self, happened: Text) -> dict[str, list[Any]]:
        legacy = self._answers[happened.choice].logprobs
        return {} if legacy is None else legacy.take(happened.delta.tokens)

    def _token_ids(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(ids)} if self._body.return_token_ids else {}

    def _prompt_ids(self, choice: int) -> dict[str, Any]:
        prompt = self._prompts[choice // self._body.tried]
        return {"prompt_token_ids": list(prompt.ids)} if self._body.return_token_ids else {}

    def _chosen(self) -> list[int]:
        """Give the places of the answers to show: of every prompt the first n, or the n likeliest."""
        n, tried = self._body.n, self._body.tried
        chosen: list[int] = []
        for first in range(0, len(self._answers), tried):
            places = list(range(first, first + tried))
            if tried > n:
                places.sort(key=lambda place: -self._answers[place].mean)
            chosen += places[:n]
        return chosen

    def _whole(self) -> dict[str, Any]:
        choices = []
        for index, place in enumerate(self._chosen()):
            answer = self._answers[place]
            choices.append(
                {
                    "index": index,
                    "text": "".join(answer.text),
                    "logprobs": answer.lists if answer.logprobs is not None else None,
                    **self._finish(answer.end),
                    **self._token_ids(answer.ids),
                    **self._prompt_ids(place),
                }
            )
        return {**self._envelope(), "choices": choices, "usage": self.usage()}

    def _finish(self, end: Ended | None) -> dict[str, Any]:
        """Say how a choice ended; the echo alone ends where its budget does."""
        if end is None:
            return {"finish_reason": "length", "stop_reason": None}
        return {"finish_reason": end.finish, "stop_reason": end.stop_reason}

    def _last(self, choice: int, end: Ended | None) -> bytes:
        ids = self._token_ids(() if end is None else end.ids)
        return self._chunk(choice, "", {**self._finish(end), **ids})

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.prepared.target.name,
            "system_fingerprint": None,
        }

    def _chunk(self, choice: int, text: str, extra: dict[str, Any]) -> bytes:
        part = {"index": choice, "text": text, "logprobs": None, "finish_reason": None}
        chunk = {**self._envelope(), "choices": [{**part, **extra}]}
        if self._usage_always:
            chunk["usage"] = self.usage()
        elif self._usage_wanted:
            chunk["usage"] = None
        return event(chunk)
