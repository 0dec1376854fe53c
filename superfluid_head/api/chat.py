"""POST /v1/chat/completions, streamed and not: one way in, one run, two shapes of the same events.

Everything that can be refused is refused before the first byte (http_api G14). The streamed and the collected reply are
made from the same `ChoiceEvent`s, so they cannot disagree in text, usage or finish.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from superfluid_core.clock import MS
from superfluid_core.errors import SuperfluidError
from superfluid_core.logs import log
from superfluid_head.access.keys import Principal
from superfluid_head.api.body import read_object
from superfluid_head.api.choices import (
    ChoiceEvent,
    Ended,
    Stage,
    Started,
    Text,
    run_choices,
)
from superfluid_head.api.conversation import conversation
from superfluid_head.api.inflight import Hold
from superfluid_head.api.logprobs import content_entries
from superfluid_head.api.qos import Service, client_of
from superfluid_head.api.sampling import (
    judge_chat,
    judge_ids,
    judge_minimum,
    sampling_params,
)
from superfluid_head.api.schemas.chat import ChatRequest
from superfluid_head.api.schemas.common import read_model
from superfluid_head.api.sessions import LiveSession
from superfluid_head.api.sse import EventStream, StreamingReply, event, while_connected
from superfluid_head.api.state import Head, Target
from superfluid_head.fleet.events import GenerationRequest
from superfluid_head.text.channel import Channel, ChannelOptions
from superfluid_head.text.chat import ModelText, output_budget
from superfluid_head.text.detokenizer import Detokenizer

_logger = logging.getLogger("superfluid_head.access")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that nothing can refuse any more but the fleet."""

    body: ChatRequest
    target: Target
    text: ModelText
    tenant: str
    request_id: str
    requests: tuple[GenerationRequest, ...]
    service: Service

    @property
    def prompt_tokens(self) -> int:
        return len(self.requests[0].prompt)


@dataclass(slots=True)
class Tally:
    """The counts of one request, for its usage, its headers and its log line."""

    began_ns: int
    counts: dict[int, int] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    first_ns: int | None = None
    cached: int = 0
    moves: int = 0

    def note(self, happened: ChoiceEvent, now_ns: int) -> None:
        match happened:
            case Text():
                self.counts[happened.choice] = happened.count
                self.first_ns = self.first_ns or now_ns
            case Ended():
                self.counts[happened.choice] = happened.count
                self.finishes[happened.choice] = happened.finish
                self.cached = max(self.cached, happened.cached)
                self.moves += happened.moves
            case Started():
                pass

    def usage(self, prompt: int) -> dict[str, Any]:
        completion = sum(self.counts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": min(self.cached, prompt)},
        }


@dataclass(frozen=True, slots=True)
class _Caller:
    """Who asks, and as what it is served."""

    principal: Principal
    request_id: str
    service: Service


class ChatEndpoint:
    """The route's handler."""

    def __init__(self, head: Head) -> None:
        self._head = head

    async def post(self, request: Request) -> Response:
        head = self._head
        raw = await read_object(request, head.limits)
        body = read_model(ChatRequest, raw)
        judge_chat(body)
        head.inflight.judge()
        caller = self._caller(request)
        prepared = await while_connected(request.receive, self._prepare(body, caller))
        run = _Run(head, prepared)
        if body.stream:
            return StreamingReply(run.stream, head.limits)
        return await while_connected(request.receive, run.collect())

    def _caller(self, request: Request) -> _Caller:
        """Judge who asks, and as what it is to be served. Raises ApiError or CapacityError."""
        state = request.scope["state"]
        principal: Principal = state["principal"]
        client = client_of(principal, request.client.host if request.client else None)
        now_ns = self._head.clock.now_ns()
        service = self._head.qos.judge(request.headers, principal, client, now_ns)
        return _Caller(principal, state["request_id"], service)

    async def _prepare(self, body: ChatRequest, caller: _Caller) -> Prepared:
        """Resolve, render, tokenize and judge. Raises ApiError or SuperfluidError."""
        principal, service = caller.principal, caller.service
        target, text = self._head.target(body.model)
        judge_ids(body, text.tokenizer.vocabulary)
        prompt = await text.encode(conversation(body), target.window)
        budget = output_budget(target.window, len(prompt), body.output_max)
        judge_minimum(body.min_tokens, budget)
        bad_words = await text.spell_words(body.bad_words) if body.bad_words else ()
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        sampling = sampling_params(body, secrets.randbits(64), bad_words, logprobs)
        requests = tuple(
            GenerationRequest(
                request_id=caller.request_id,
                model=target.name,
                prompt=prompt,
                sampling=sampling,
                max_output=budget,
                min_output=body.min_tokens,
                stop_ids=tuple(sorted(set(body.stop_token_ids or ()))),
                ignore_eos=body.ignore_eos,
                choice=choice,
                qos=service.qos,
                tenant=principal.name,
                batch_invariant=service.batch_invariant,
                cache_salt=self._head.prefix_salt(principal.name, body.cache_salt),
                start_by_ns=service.start_by_ns,
            )
            for choice in range(body.n)
        )
        return Prepared(body, target, text, principal.name, caller.request_id, requests, service)


class _Run:
    """One accepted request: its channels, its tally, and the two shapes of its reply."""

    def __init__(self, head: Head, prepared: Prepared) -> None:
        self._head = head
        self._prepared = prepared
        self._body = prepared.body
        self._tally = Tally(head.clock.now_ns())
        self._id = "chatcmpl-" + secrets.token_hex(12)
        self._created = head.clock.wall_s()
        self._tokenizer = prepared.text.tokenizer
        self._texts: dict[int, list[str]] = {choice: [] for choice in range(self._body.n)}
        self._entries: dict[int, list[Any]] = {choice: [] for choice in range(self._body.n)}
        self._ends: dict[int, Ended] = {}
        options = self._body.stream_options
        self._usage_wanted = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats
        self._are_roles_sent = False

    def _channels(self) -> list[Channel]:
        body, text = self._body, self._prepared.text
        own = frozenset(body.stop_token_ids or ())
        options = ChannelOptions(
            stops=tuple(body.stop or ()),
            stop_ids=own if body.ignore_eos else own | self._prepared.target.eos_ids,
            min_tokens=body.min_tokens,
            include_stop=body.include_stop_str_in_output,
            keep_tokens=body.logprobs,
        )
        special = text.tokenizer.special_ids
        return [
            Channel(
                Detokenizer(
                    text.tokenizer.token_bytes, special, skip_special=body.skip_special_tokens
                ),
                options,
            )
            for _ in range(body.n)
        ]

    async def collect(self) -> Response:
        """Answer all at once."""

        async def emit(happened: ChoiceEvent) -> None:
            self._tally.note(happened, self._head.clock.now_ns())
            match happened:
                case Text():
                    self._texts[happened.choice].append(happened.delta.text)
                    if self._body.logprobs:
                        self._entries[happened.choice] += self._logprobs(happened)
                case Ended():
                    self._ends[happened.choice] = happened
                case Started():
                    pass

        await self._follow(emit)
        cached = min(self._tally.cached, self._prepared.prompt_tokens)
        headers = {"x-superfluid-warm": str(cached)}
        if self._head.debug_headers:
            headers["x-superfluid-moves"] = str(self._tally.moves)
        content = json.dumps(self._whole(), ensure_ascii=False, allow_nan=False).encode()
        return Response(content, 200, headers, "application/json")

    def _whole(self) -> dict[str, Any]:
        choices = []
        for choice in range(self._body.n):
            end = self._ends[choice]
            entries = {"content": self._entries[choice], "refusal": None}
            choices.append(
                {
                    "index": choice,
                    "message": {
                        "role": "assistant",
                        "content": "".join(self._texts[choice]),
                        "refusal": None,
                    },
                    "logprobs": entries if self._body.logprobs else None,
                    "finish_reason": end.finish,
                    "stop_reason": end.stop_reason,
                }
            )
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._prepared.target.name,
            "choices": choices,
            "usage": self._tally.usage(self._prepared.prompt_tokens),
            "system_fingerprint": None,
        }

    async def stream(self, stream: EventStream) -> None:
        """Answer in chunks: roles in ascending order, text, one finish chunk a choice, usage if asked."""

        async def emit(happened: ChoiceEvent) -> None:
            self._tally.note(happened, self._head.clock.now_ns())
            if not self._are_roles_sent:
                self._are_roles_sent = True
                for choice in range(self._body.n):
                    await stream.put(self._chunk(choice, {"role": "assistant", "content": ""}))
            match happened:
                case Text():
                    extra: dict[str, Any] = {}
                    if self._body.logprobs:
                        entries = {"content": self._logprobs(happened), "refusal": None}
                        extra["logprobs"] = entries
                    delta = {"content": happened.delta.text} if happened.delta.text else {}
                    await stream.put(self._chunk(happened.choice, delta, extra))
                case Ended():
                    extra = {"finish_reason": happened.finish, "stop_reason": happened.stop_reason}
                    await stream.put(self._chunk(happened.choice, {}, extra))
                case Started():
                    pass

        await self._follow(emit)
        if self._usage_wanted:
            usage = self._tally.usage(self._prepared.prompt_tokens)
            await stream.put(event({**self._envelope(), "choices": [], "usage": usage}))

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._prepared.target.name,
            "system_fingerprint": None,
        }

    def _chunk(
        self, choice: int, delta: dict[str, Any], extra: Mapping[str, Any] | None = None
    ) -> bytes:
        part = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = {**self._envelope(), "choices": [{**part, **(extra or {})}]}
        if self._usage_always:
            chunk["usage"] = self._tally.usage(self._prepared.prompt_tokens)
        elif self._usage_wanted:
            chunk["usage"] = None
        return event(chunk)

    def _logprobs(self, text: Text) -> list[dict[str, Any]]:
        top = self._body.top_logprobs or 0
        return content_entries(text.delta.tokens, self._tokenizer.token_bytes, top)

    async def _follow(self, emit: Any) -> None:
        """Run the choices; whatever happens, one log line says how it went."""
        head = self._head
        status: str | int = 499
        try:
            async with head.inflight.hold() as held:
                with head.sessions.enter(self._session(held)) as session:
                    doors = (session.attach, session.detach)
                    stage = Stage(head.fleet, head.metrics, head.clock, *doors)
                    await run_choices(stage, self._prepared.requests, self._channels(), emit)
            status = 200
        except SuperfluidError as error:
            status = error.code.value
            raise
        finally:
            self._report(status)

    def _session(self, held: Hold) -> LiveSession:
        prepared = self._prepared
        return LiveSession(
            id=self._id,
            request_id=prepared.request_id,
            model=prepared.target.name,
            tenant=prepared.tenant,
            qos=prepared.service.qos,
            batch_invariant=prepared.service.batch_invariant,
            prompt_tokens=prepared.prompt_tokens,
            created_s=self._created,
            is_streamed=self._body.stream,
            completion_tokens=lambda: sum(self._tally.counts.values()),
            cancel=held.cancel,
        )

    def _report(self, status: str | int) -> None:
        tally, prepared = self._tally, self._prepared
        completion = sum(tally.counts.values())
        self._head.metrics.tokens(
            prepared.target.name,
            prompt=prepared.prompt_tokens,
            cached=tally.cached,
            completion=completion,
        )
        first = None if tally.first_ns is None else (tally.first_ns - tally.began_ns) // MS
        log(
            _logger,
            "info",
            "chat",
            request_id=prepared.request_id,
            status=status,
            model=prepared.target.name,
            tenant=prepared.tenant,
            qos=prepared.service.qos.label,
            stream=self._body.stream,
            prompt=prepared.prompt_tokens,
            cached=tally.cached,
            completion=completion,
            ttft_ms=first,
            moves=tally.moves,
            finish=",".join(sorted(set(tally.finishes.values()))) or None,
        )
