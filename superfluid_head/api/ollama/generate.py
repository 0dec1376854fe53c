"""POST /api/chat and /api/generate: lines of JSON, or one object where the stream is switched off.

Owns the shapes of the replies and their durations. Both routes take the way of chat, and a raw prompt that of completions; silence is
broken by a line that adds nothing, since readers of lines know no comments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from superfluid_core.clock import Clock
from superfluid_core.errors import SuperfluidError
from superfluid_core.session import QosClass
from superfluid_head.api.body import read_as
from superfluid_head.api.choices import ChoiceEvent, Ended, Started, Text
from superfluid_head.api.completions import prepare_completion
from superfluid_head.api.errors import ApiError, from_error, invalid
from superfluid_head.api.logprobs import content_entries
from superfluid_head.api.ollama.catalog import served_name
from superfluid_head.api.ollama.options import NAMES, judge_window
from superfluid_head.api.ollama.schemas import Asking, ChatBody, GenerateBody
from superfluid_head.api.ollama.times import time_text
from superfluid_head.api.ollama.translate import chat_members, prompt_members, raw_members
from superfluid_head.api.ollama.turn import Turn
from superfluid_head.api.prepare import prepare_talk, read_chat, renamed
from superfluid_head.api.prompts import judge_completion
from superfluid_head.api.run import Caller, Prepared, Run, channels_of, judge_caller
from superfluid_head.api.schemas.common import read_model, reads
from superfluid_head.api.schemas.completions import CompletionRequest
from superfluid_head.api.shapes import ollama_body
from superfluid_head.api.sse import EventStream, Framing, StreamingReply, while_connected
from superfluid_head.api.state import Head
from superfluid_head.text.channel import Channel
from superfluid_head.text.chat import output_budget

NDJSON = b"application/x-ndjson"

Work = Callable[[Caller], Coroutine[Any, Any, "_Asked"]]
Put = Callable[[dict[str, Any]], dict[str, Any]]
"""Puts a message into the members of a line."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that nothing can refuse any more but the fleet, and what reads and words its answer."""

    prepared: Prepared
    channels: list[Channel]
    put: Put
    id_chars: int = 0
    can_reason: bool = False
    top: int | None = None


class OllamaEndpoint:
    """The two routes' handlers."""

    def __init__(self, head: Head) -> None:
        self._head = head

    async def chat(self, request: Request) -> Response:
        """Answer a conversation in the shape of Ollama, as lines of JSON."""
        body = await read_as(request, self._head.limits, reads(ChatBody))
        body = body.model_copy(update={"model": self._judge(body)})
        if not body.messages:
            return self._loaded(body, _as_message)
        return await self._answer(request, self._talk(body, chat_members(body), _as_message), body)

    async def generate(self, request: Request) -> Response:
        """Continue a prompt in the shape of Ollama, as lines of JSON."""
        body = await read_as(request, self._head.limits, reads(GenerateBody))
        body = body.model_copy(update={"model": self._judge(body)})
        if not body.prompt and not body.suffix:
            return self._loaded(body, _as_response)
        if body.raw or body.suffix:
            return await self._answer(request, self._raw(raw_members(body)), body)
        work = self._talk(body, prompt_members(body), _as_response)
        return await self._answer(request, work, body)

    def _judge(self, body: Asking) -> str:
        """Find the model that is meant, and hold it against the window that is asked for."""
        target, _ = self._head.target(served_name(self._head, body.model))
        judge_window(body.options, target.window)
        return target.name

    def _loaded(self, body: Asking, put: Put) -> Response:
        """Answer a request without words: models are always loaded here."""
        line = _line(self._head.clock, body.model or "", put({"role": "assistant", "content": ""}))
        line |= {"done": True, "done_reason": "load"}
        if not body.stream:
            return JSONResponse(line)
        return Response(_bytes(line), media_type=NDJSON.decode())

    async def _answer(self, request: Request, work: Work, body: Asking) -> Response:
        head = self._head
        head.inflight.judge()
        is_middle = isinstance(body, GenerateBody) and bool(body.suffix)
        caller = judge_caller(head, request, QosClass.COMPLETION if is_middle else None)
        run = _Run(head, await while_connected(request, work(caller)))
        if body.stream:
            framing = Framing(NDJSON, run.nothing, None, _failed)
            return StreamingReply(run.stream, head.limits, framing)
        return await while_connected(request, run.collect())

    def _talk(self, body: Asking, members: dict[str, Any], put: Put) -> Work:
        """Take the way of chat."""
        chat = read_chat(members, NAMES)

        async def prepare(caller: Caller) -> _Asked:
            talk = await prepare_talk(self._head, chat, caller, NAMES)
            if body.think and not talk.speech.can_reason:
                raise invalid("this model does not think", param="think")
            return _Asked(
                talk.prepared,
                talk.channels(keep_tokens=body.logprobs),
                put,
                talk.speech.dialect.id_chars,
                talk.speech.can_reason,
                body.top_logprobs if body.logprobs else None,
            )

        return prepare

    def _raw(self, members: dict[str, Any]) -> Work:
        """Take the way of completions. Raises ApiError 400 in Ollama's names."""
        is_bounded = members.get("max_tokens") is not None
        try:
            completion = read_model(CompletionRequest, members)
            given = judge_completion(completion, self._head.limits.choices_max)
        except ApiError as error:
            raise renamed(error, NAMES) from None

        async def prepare(caller: Caller) -> _Asked:
            asked = await prepare_completion(self._head, completion, given, caller)
            prepared = asked.prepared if is_bounded else _unbounded(asked.prepared)
            keep = completion.logprobs is not None
            channels = channels_of(prepared, completion, keep_tokens=keep)
            return _Asked(prepared, channels, _as_response, top=completion.logprobs)

        return prepare


class _Run(Run):
    """One accepted request, and the two shapes of its reply."""

    def __init__(self, head: Head, asked: _Asked) -> None:
        super().__init__(head, asked.prepared, "ollama", "ollama-")
        self._asked = asked
        self._turn = Turn(asked.id_chars)
        self._done: dict[str, Any] = {}
        self._entries: list[dict[str, Any]] = []
        if asked.can_reason:
            self.tally.thoughts = {}

    async def collect(self) -> Response:
        """Answer all at once."""

        async def emit(happened: ChoiceEvent) -> None:
            self._hear(happened)

        await self.follow(self._asked.channels, emit)
        whole = self._told(self._turn.whole, self._entries) | self._done
        return Response(_bytes(whole), 200, self.headers(), "application/json")

    async def stream(self, stream: EventStream) -> None:
        """Answer in lines; the last one has the counts and says that it is."""

        async def emit(happened: ChoiceEvent) -> None:
            for line in self._hear(happened):
                await stream.put(_bytes(line))

        await self.follow(self._asked.channels, emit)
        await stream.put(_bytes(self._told({"role": "assistant", "content": ""}) | self._done))

    def nothing(self) -> bytes:
        """Make a line that adds nothing."""
        return _bytes(self._told({"role": "assistant", "content": ""}))

    def _hear(self, happened: ChoiceEvent) -> list[dict[str, Any]]:
        self.note(happened)
        match happened:
            case Text():
                lines = [self._told(message) for message in self._turn.take(happened.delta)]
                entries = self._logprobs(happened)
                if entries:
                    lines = lines or [json.loads(self.nothing())]
                    lines[-1]["logprobs"] = entries
                    self._entries += entries
                return lines
            case Ended():
                self._done = self._ended(happened)
                return [self._told(message) for message in self._turn.end()]
            case Started():
                return []

    def _logprobs(self, happened: Text) -> list[dict[str, Any]]:
        top = self._asked.top
        if top is None:
            return []
        token_bytes = self.prepared.text.tokenizer.token_bytes
        return content_entries(happened.delta.tokens, token_bytes, top)

    def _told(self, message: dict[str, Any], entries: Any = None) -> dict[str, Any]:
        line = _line(self.head.clock, self.prepared.target.name, self._asked.put(message))
        return {**line, "logprobs": entries} if entries else line

    def _ended(self, end: Ended) -> dict[str, Any]:
        now_ns, tally = self.head.clock.now_ns(), self.tally
        first_ns = tally.first_ns or now_ns
        return {
            "done": True,
            "done_reason": "length" if end.finish == "length" else "stop",
            "total_duration": now_ns - tally.began_ns,
            "load_duration": 0,
            "prompt_eval_count": self.prepared.prompt_tokens,
            "prompt_eval_duration": first_ns - tally.began_ns,
            "eval_count": sum(tally.counts.values()),
            "eval_duration": now_ns - first_ns,
        }


def _as_message(message: dict[str, Any]) -> dict[str, Any]:
    return {"message": message}


def _as_response(message: dict[str, Any]) -> dict[str, Any]:
    made = {"response": message["content"]}
    return {**made, "thinking": message["thinking"]} if "thinking" in message else made


def _line(clock: Clock, model: str, members: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "created_at": time_text(clock.wall_s()), **members, "done": False}


def _bytes(line: dict[str, Any]) -> bytes:
    return json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _failed(error: SuperfluidError) -> bytes:
    return _bytes(ollama_body(from_error(error)))


def _unbounded(prepared: Prepared) -> Prepared:
    """Give every choice the rest of the window, where nothing bounds it."""
    window = prepared.target.window
    requests = tuple(
        replace(one, max_output=output_budget(window, len(one.prompt), None, "prompt"))
        for one in prepared.requests
    )
    return replace(prepared, requests=requests)
