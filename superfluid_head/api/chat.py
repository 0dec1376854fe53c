"""POST /v1/chat/completions, streamed and not: one way in, one run, two shapes of the same events.

Everything that can be refused is refused before the first byte (http_api G14). The streamed and the collected reply are
made from the same `ChoiceEvent`s, so they cannot disagree in text, usage or finish.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from superfluid_head.api.body import read_as
from superfluid_head.api.choices import (
    ChoiceEvent,
    Ended,
    Started,
    Text,
)
from superfluid_head.api.legacy import NAMES, modern
from superfluid_head.api.logprobs import content_entries
from superfluid_head.api.message import MessageBuilder, Wording
from superfluid_head.api.prepare import prepare_talk
from superfluid_head.api.run import Prepared, Run, ShortWay, channels_of, judge_caller
from superfluid_head.api.sampling import judge_chat
from superfluid_head.api.schemas.chat import ChatRequest
from superfluid_head.api.schemas.common import read_model
from superfluid_head.api.sse import (
    EventStream,
    StreamingReply,
    TextTemplate,
    event,
    while_connected,
)
from superfluid_head.api.state import Head
from superfluid_head.text.channel import Channel
from superfluid_head.text.speech import Speech


class ChatEndpoint:
    """The route's handler."""

    def __init__(self, head: Head) -> None:
        self._head = head

    async def post(self, request: Request) -> Response:
        """Answer a conversation, as one object or as server-sent events (OpenAI chat completions)."""
        head = self._head
        body = await read_as(request, head.limits, _read)
        head.inflight.judge()
        caller = judge_caller(head, request)
        names = NAMES if body.functions else {}
        talk = await while_connected(request, prepare_talk(head, body, caller, names))
        run = _Run(head, talk.prepared, body, talk.speech)
        if body.stream:
            return StreamingReply(run.stream, head.limits)
        return await while_connected(request, run.collect())


def _read(members: dict[str, Any]) -> ChatRequest:
    body = read_model(ChatRequest, members)
    judge_chat(body)
    return modern(body)


class _Run(Run):
    """One accepted request: its channels, and the two shapes of its reply."""

    def __init__(self, head: Head, prepared: Prepared, body: ChatRequest, speech: Speech) -> None:
        super().__init__(head, prepared, "chat", "chatcmpl-")
        self._body = body
        self._speech = speech
        self._tokenizer = prepared.text.tokenizer
        if speech.can_reason:
            self.tally.thoughts = {}
        doubled = head.is_reasoning_doubled
        id_chars, is_legacy = speech.dialect.id_chars, bool(body.functions)
        self._wording = Wording(body.include_reasoning, doubled, id_chars, is_legacy)
        options = body.stream_options
        self._usage_wanted = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats
        self._are_roles_sent = False
        has_more = body.logprobs or body.return_token_ids or self._usage_always
        self._is_plain = not has_more
        self._templates: dict[int, TextTemplate] = {}
        self._foreseen: dict[int, TextTemplate] = {}

    def _channels(self) -> list[Channel]:
        keeps = self._body.logprobs
        return channels_of(self.prepared, self._body, keep_tokens=keeps, speech=self._speech)

    async def collect(self) -> Response:
        """Answer all at once."""
        messages = [MessageBuilder(self._wording) for _ in range(self._body.n)]
        ids: list[list[int]] = [[] for _ in messages]
        entries: list[list[Any]] = [[] for _ in messages]
        ends: dict[int, Ended] = {}

        async def emit(happened: ChoiceEvent) -> None:
            self.note(happened)
            match happened:
                case Text():
                    ids[happened.choice] += happened.ids
                    messages[happened.choice].add(happened.delta)
                    if self._body.logprobs:
                        entries[happened.choice] += self._logprobs(happened)
                case Ended():
                    ids[happened.choice] += happened.ids
                    ends[happened.choice] = happened
                case Started():
                    pass

        await self.follow(self._channels(), emit)
        choices = [
            {
                "index": choice,
                "message": message.message(),
                "logprobs": {"content": entries[choice], "refusal": None}
                if self._body.logprobs
                else None,
                "finish_reason": self._wording.finish(ends[choice].finish),
                "stop_reason": ends[choice].stop_reason,
                **self._token_ids(ids[choice]),
            }
            for choice, message in enumerate(messages)
        ]
        whole = self._whole(choices)
        content = json.dumps(whole, ensure_ascii=False, allow_nan=False).encode()
        return Response(content, 200, self.headers(), "application/json")

    def _whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._prompt_ids(),
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.prepared.target.name,
            "choices": choices,
            "usage": self.usage(),
            "system_fingerprint": None,
        }

    async def stream(self, stream: EventStream) -> None:
        """Answer in chunks: roles in ascending order, text, one finish chunk a choice, usage if asked."""

        async def emit(happened: ChoiceEvent) -> None:
            self.note(happened)
            if not self._are_roles_sent:
                self._are_roles_sent = True
                first, shared = {"role": "assistant", "content": ""}, self._prompt_ids()
                roles = [self._chunk(n, first, shared=shared) for n in range(self._body.n)]
                await stream.put(b"".join(roles))
            match happened:
                case Text():
                    data = self._told(happened)
                    if data:
                        await stream.put(data)
                case Ended():
                    extra = self._token_ids(happened.ids)
                    extra["finish_reason"] = self._wording.finish(happened.finish)
                    extra["stop_reason"] = happened.stop_reason
                    await stream.put(self._chunk(happened.choice, {}, extra))
                case Started():
                    pass

        if self._is_plain:
            # the session is placed before the loop turns, so the node works meanwhile
            asyncio.get_running_loop().call_soon(self._foresee)
        way = ShortWay(stream, self, self._told, self._templates)
        await self.follow(self._channels(), emit, way)
        if self._usage_wanted:
            usage = self.usage()
            await stream.put(event({**self._envelope(), "choices": [], "usage": usage}))

    def _told(self, happened: Text) -> bytes:
        """Make the chunk of some text; nothing for what is not told."""
        delta = happened.delta
        if self._is_plain and delta.text and delta.call is None and not delta.reasoning:
            template = self._templates.get(happened.choice)
            if template is None:
                template = self._templates[happened.choice] = self._template(happened.choice)
            return template.event(delta.text)
        extra: dict[str, Any] = self._token_ids(happened.ids)
        if self._body.logprobs:
            extra["logprobs"] = {"content": self._logprobs(happened), "refusal": None}
        members = self._wording.delta(delta)
        return self._chunk(happened.choice, members, extra) if members or extra else b""

    def _template(self, choice: int) -> TextTemplate:
        found = self._foreseen.pop(choice, None)
        return found or TextTemplate(lambda text: self._chunk(choice, {"content": text}))

    def _foresee(self) -> None:
        """Make what the first text of a lone choice will need."""
        if self._body.n == 1 and not self._templates:
            self._foreseen[0] = self._template(0)

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.prepared.target.name,
            "system_fingerprint": None,
        }

    def _token_ids(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(ids)} if self._body.return_token_ids else {}

    def _prompt_ids(self) -> dict[str, Any]:
        prompt = self.prepared.requests[0].prompt
        return {"prompt_token_ids": list(prompt)} if self._body.return_token_ids else {}

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        extra: Mapping[str, Any] | None = None,
        shared: Mapping[str, Any] | None = None,
    ) -> bytes:
        part = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = {**self._envelope(), **(shared or {}), "choices": [{**part, **(extra or {})}]}
        if self._usage_always:
            chunk["usage"] = self.usage()
        elif self._usage_wanted:
            chunk["usage"] = None
        return event(chunk)

    def _logprobs(self, text: Text) -> list[dict[str, Any]]:
        top = self._body.top_logprobs or 0
        as_ids = self._body.return_tokens_as_token_ids
        return content_entries(text.delta.tokens, self._tokenizer.token_bytes, top, as_ids=as_ids)
