"""POST /v1/messages, streamed and not, and POST /v1/messages/count_tokens.

Owns the shapes of the replies. The way there is chat's: the body becomes a chat body, and that one is judged, rendered, placed and
followed as any other, so tools, stops, constraints and usage are the same on both routes.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from superfluid_core.errors import SuperfluidError
from superfluid_head.api.anthropic.blocks import Blocks, stop_of
from superfluid_head.api.anthropic.schemas import CountRequest, MessagesRequest
from superfluid_head.api.anthropic.translate import NAMES, chat_members, generation_members
from superfluid_head.api.body import read_as
from superfluid_head.api.choices import ChoiceEvent, Ended, Started, Text
from superfluid_head.api.errors import from_error
from superfluid_head.api.prepare import Talk, count_prompt, prepare_talk, read_chat
from superfluid_head.api.run import Run, judge_caller
from superfluid_head.api.schemas.chat import ChatRequest
from superfluid_head.api.schemas.common import read_model
from superfluid_head.api.shapes import REQUEST_HEADER, anthropic_body
from superfluid_head.api.sse import (
    EventStream,
    Framing,
    StreamingReply,
    named_event,
    while_connected,
)
from superfluid_head.api.state import Head


class MessagesEndpoint:
    """The routes' handlers."""

    def __init__(self, head: Head) -> None:
        self._head = head

    async def post(self, request: Request) -> Response:
        """Answer a conversation in the shape of Anthropic messages."""
        head = self._head
        body = await read_as(request, head.limits, _read)
        head.inflight.judge()
        caller = judge_caller(head, request)
        talk = await while_connected(request, prepare_talk(head, body, caller, NAMES))
        run = _Run(head, talk)
        if body.stream:
            name = (REQUEST_HEADER.encode("ascii"), caller.request_id.encode("ascii"))
            framing = Framing(last=None, failed=run.failure, extra=(name,))
            return StreamingReply(run.stream, head.limits, framing)
        return await while_connected(request, run.collect())

    async def count(self, request: Request) -> Response:
        """Count the tokens that a conversation takes, tools and system text with it."""
        head = self._head
        body = await read_as(request, head.limits, _read_counted)
        _, count = await while_connected(request, count_prompt(head, body))
        return JSONResponse({"input_tokens": count})


def _read(members: dict[str, Any]) -> ChatRequest:
    return read_chat(generation_members(read_model(MessagesRequest, members)), NAMES)


def _read_counted(members: dict[str, Any]) -> ChatRequest:
    return read_chat(chat_members(read_model(CountRequest, members)), NAMES)


class _Run(Run):
    """One accepted request, and the two shapes of its reply."""

    def __init__(self, head: Head, talk: Talk) -> None:
        super().__init__(head, talk.prepared, "messages", "msg_")
        self._talk = talk
        self._blocks = Blocks(talk.speech.dialect.id_chars)
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._is_begun = False
        if talk.speech.can_reason:
            self.tally.thoughts = {}

    async def collect(self) -> Response:
        """Answer all at once."""

        async def emit(happened: ChoiceEvent) -> None:
            self._hear(happened)

        await self.follow(self._talk.channels(), emit)
        whole = self._message(self._blocks.content, self._usage())
        content = json.dumps(whole, ensure_ascii=False, allow_nan=False).encode()
        headers = {**self.headers(), REQUEST_HEADER: self.prepared.caller.request_id}
        return Response(content, 200, headers, "application/json")

    async def stream(self, stream: EventStream) -> None:
        """Answer in events: the message's start, its blocks, its end."""

        async def emit(happened: ChoiceEvent) -> None:
            events = self._hear(happened)
            if not self._is_begun:
                self._is_begun = True
                start = {"type": "message_start", "message": self._message([], self._usage())}
                events = [start, {"type": "ping"}, *events]
            for each in events:
                await stream.put(named_event(each["type"], each))

        await self.follow(self._talk.channels(), emit)
        delta = {"type": "message_delta", "delta": self._stop, "usage": self._usage()}
        await stream.put(named_event("message_delta", delta))
        await stream.put(named_event("message_stop", {"type": "message_stop"}))

    def failure(self, error: SuperfluidError) -> bytes:
        """Make the last event of a stream that failed."""
        request = self.prepared.caller.request_id
        return named_event("error", anthropic_body(from_error(error), request))

    def _hear(self, happened: ChoiceEvent) -> list[dict[str, Any]]:
        self.note(happened)
        match happened:
            case Text():
                return self._blocks.take(happened.delta)
            case Ended():
                self._stop = stop_of(happened, self.prepared.requests[0].max_output)
                return self._blocks.end()
            case Started():
                return []

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.prepared.target.name,
            "content": content,
            **self._stop,
            "usage": usage,
        }

    def _usage(self) -> dict[str, Any]:
        """Count the whole prompt as input; what of it was cached is told beside it."""
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "cache_read_input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_creation_input_tokens": 0,
        }
