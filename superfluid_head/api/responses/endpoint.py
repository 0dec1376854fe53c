"""POST /v1/responses, streamed and not; and the routes of a store that there is none of.

Owns the response object and the numbers of its events. The way there is chat's: the body becomes a chat body, and that one is judged,
rendered, placed and followed as any other. Nothing is kept: what would name an earlier response is refused, and none is found.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from superfluid_core.errors import SuperfluidError
from superfluid_head.api.body import read_as
from superfluid_head.api.choices import ChoiceEvent, Ended, Started, Text
from superfluid_head.api.errors import ApiError, from_error
from superfluid_head.api.logprobs import content_entries
from superfluid_head.api.prepare import Talk, prepare_talk, read_chat
from superfluid_head.api.responses.items import Items
from superfluid_head.api.responses.schemas import ResponsesRequest
from superfluid_head.api.responses.translate import NAMES, chat_members
from superfluid_head.api.run import Run, judge_caller
from superfluid_head.api.schemas.chat import ChatRequest
from superfluid_head.api.schemas.common import read_model
from superfluid_head.api.sse import (
    EventStream,
    Framing,
    StreamingReply,
    named_event,
    while_connected,
)
from superfluid_head.api.state import Head
from superfluid_head.text.delta import Delta


class ResponsesEndpoint:
    """The routes' handlers."""

    def __init__(self, head: Head) -> None:
        self._head = head

    async def post(self, request: Request) -> Response:
        """Answer an input in the shape of OpenAI responses; nothing is kept, so every request brings its whole input."""
        head = self._head
        echo, body = await read_as(request, head.limits, _read)
        head.inflight.judge()
        caller = judge_caller(head, request)
        talk = await while_connected(request, prepare_talk(head, body, caller, NAMES))
        run = _Run(head, talk, echo)
        if body.stream:
            return StreamingReply(run.stream, head.limits, Framing(last=None, failed=run.failure))
        return await while_connected(request, run.collect())

    async def stored(self, request: Request) -> Response:
        """Answer every route about an earlier response: none is kept."""
        del request
        words = "responses are not stored here; send the whole input with each request"
        raise ApiError(404, words, code="response_not_found", param="response_id")


class _Echo:
    """What a response tells of its request, as it was sent or by default."""

    def __init__(self, asked: ResponsesRequest, raw: dict[str, Any]) -> None:
        form = raw.get("text") or {}
        choice = raw.get("tool_choice")
        self.members = {
            "background": False,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "metadata": asked.metadata,
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning.effort, "summary": asked.reasoning.summary},
            "service_tier": "default",
            "store": False,
            "temperature": asked.temperature,
            "text": {**form, "format": form.get("format") or {"type": "text"}},
            "tool_choice": "auto" if choice is None else choice,
            "tools": [tool.given for tool in asked.tools],
            "top_logprobs": asked.top_logprobs,
            "top_p": asked.top_p,
            "truncation": asked.truncation,
            "user": raw.get("user"),
        }


def _read(members: dict[str, Any]) -> tuple[_Echo, ChatRequest]:
    asked = read_model(ResponsesRequest, members)
    return _Echo(asked, members), read_chat(chat_members(asked), NAMES)


class _Run(Run):
    """One accepted request, and the two shapes of its reply."""

    def __init__(self, head: Head, talk: Talk, echo: _Echo) -> None:
        super().__init__(head, talk.prepared, "response", "resp_")
        self._talk = talk
        self._echo = echo
        self._items = Items(talk.speech.dialect.id_chars, self._entries)
        self._status = "in_progress"
        self._error: dict[str, Any] | None = None
        self._number = 0
        if talk.speech.can_reason:
            self.tally.thoughts = {}

    async def collect(self) -> Response:
        """Answer all at once."""

        async def emit(happened: ChoiceEvent) -> None:
            self._hear(happened)

        await self.follow(self._talk.channels(keep_tokens=self._talk.body.logprobs), emit)
        content = json.dumps(self._response(), ensure_ascii=False, allow_nan=False).encode()
        return Response(content, 200, self.headers(), "application/json")

    async def stream(self, stream: EventStream) -> None:
        """Answer in events: created, in progress, the items, and one last word."""

        async def emit(happened: ChoiceEvent) -> None:
            events = self._hear(happened)
            if self._number == 0:
                first = {"response": {**self._response(), "status": "in_progress", "output": []}}
                for kind in ("response.created", "response.in_progress"):
                    await stream.put(self._numbered({"type": kind, **first}))
            for each in events:
                await stream.put(self._numbered(each))

        await self.follow(self._talk.channels(keep_tokens=self._talk.body.logprobs), emit)
        last = {"type": f"response.{self._status}", "response": self._response()}
        await stream.put(self._numbered(last))

    def failure(self, error: SuperfluidError) -> bytes:
        """Make the last event of a stream that failed: what was said so far, and why there is no more."""
        told = from_error(error)
        self._items.end(is_whole=False)
        self._status = "failed"
        self._error = {"code": told.code or "server_error", "message": told.message}
        return self._numbered({"type": "response.failed", "response": self._response()})

    def _hear(self, happened: ChoiceEvent) -> list[dict[str, Any]]:
        self.note(happened)
        match happened:
            case Text():
                return self._items.take(happened.delta)
            case Ended():
                is_whole = happened.finish != "length"
                self._status = "completed" if is_whole else "incomplete"
                return self._items.end(is_whole=is_whole)
            case Started():
                return []

    def _entries(self, delta: Delta) -> list[dict[str, Any]]:
        body = self._talk.body
        if not body.logprobs:
            return []
        token_bytes = self.prepared.text.tokenizer.token_bytes
        return content_entries(delta.tokens, token_bytes, body.top_logprobs or 0)

    def _numbered(self, each: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(each["type"], {**each, "sequence_number": number})

    def _response(self) -> dict[str, Any]:
        is_cut = self._status == "incomplete"
        is_over = self._status != "in_progress"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": self.head.clock.wall_s() if self._status == "completed" else None,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self.prepared.target.name,
            "output": self._items.output,
            **self._echo.members,
            "usage": self._usage() if is_over else None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.usage()
        thoughts = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": thoughts,
            "total_tokens": usage["total_tokens"],
        }
