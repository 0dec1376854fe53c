"""A streaming client of any OpenAI-compatible server, with a time stamp per chunk.

Owns one chat and a closed loop of many of them. It judges nothing: it returns what came and when. A reply that ends
without `[DONE]`, with an error event or with another status than 200 is an Answer whose `error` says so: refused
requests count as failures everywhere in the bench. Chats go over `Streams`, which stamps bytes when they come; what they say is read
when the answer has ended, unless somebody watches it (`OnChunk`). Over TLS, and for clients of others, httpx carries them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any

import httpx
import orjson

from superfluid_core.clock import MS, Clock
from superfluid_head.bench.exchange import Heard
from superfluid_head.bench.pools import Pools
from superfluid_head.bench.streams import Events, Streams, is_plain, post_of

OnChunk = Callable[["Answer"], None]
REQUEST_SECONDS = 600.0
ERROR_CHARS_MAX = 300
PIECES_AT_ONCE = 16
"""How much of an ended answer is read before the event loop may stamp what came of others meanwhile: about a tenth of a millisecond."""


@dataclass(slots=True)
class Said:
    """All of one choice that a client can compare: whatever mode it was asked in."""

    text: str = ""
    reasoning: str = ""
    logprobs: list[Any] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    finish_reason: str | None = None

    def take(self, choice: dict[str, Any]) -> int:
        """Fold a chunk's choice in; say how many characters to read it brought."""
        delta = choice.get("delta", {})
        content, thought = delta.get("content"), delta.get("reasoning_content")
        self.text += content or ""
        self.reasoning += thought or ""
        self.logprobs += (choice.get("logprobs") or {}).get("content") or ()
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        brought = len(content or "") + len(thought or "")
        for call in delta.get("tool_calls") or ():
            made = self.calls.setdefault(call["index"], ["", ""])
            function = call.get("function", {})
            name, arguments = function.get("name") or "", function.get("arguments") or ""
            made[0] += name
            made[1] += arguments
            brought += len(name) + len(arguments)
        return brought


@dataclass(slots=True)
class Answer:
    """One reply as it came. `at_ms[i]` is the arrival of the i-th piece of text and `chars[i]` how much there was with it.

    `started_ms` is the sending of the request; `node` is for callers who know it.

    `text` is all choices' text in the order of arrival; `choices` keeps them apart, with everything else that was said.
    `endings` are the marks of an end in the order in which they came: finish, usage, error, done, refused, and late for text behind one.
    """

    started_ms: float
    ended_ms: float = 0.0
    text: str = ""
    at_ms: list[float] = field(default_factory=list)
    chars: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    node: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    choices: dict[int, Said] = field(default_factory=dict)
    request_id: str | None = None
    is_done: bool = False
    error: str | None = None
    endings: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return self.error is None and self.is_done and self.finish_reason is not None

    @property
    def first_ms(self) -> float | None:
        return self.at_ms[0] - self.started_ms if self.at_ms else None

    @property
    def usage(self) -> tuple[int, int]:
        """Prompt and completion tokens, as the server counted them."""
        return self.prompt_tokens, self.completion_tokens

    def gaps_ms(self) -> list[float]:
        return [b - a for a, b in pairwise(self.at_ms)]


def chat_body(model: str, prompt: str, max_tokens: int, **members: Any) -> dict[str, Any]:
    """Compose a streamed, greedy, seeded chat request with usage; `members` are added or win."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_completion_tokens": max_tokens,
        "temperature": 0,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        **members,
    }


class Client(httpx.AsyncClient):
    """httpx for what is asked now and then, with connections of our own for streamed chats."""

    def __init__(self, connections: int, headers: dict[str, str]) -> None:
        super().__init__(
            headers=headers,
            transport=Pools(connections),
            timeout=httpx.Timeout(REQUEST_SECONDS, connect=10.0),
            trust_env=False,
        )
        self.streams = Streams(connections)
        self.reading = asyncio.Lock()  # answers that end together are read one by one

    async def aclose(self) -> None:
        await self.streams.aclose()
        await super().aclose()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self.streams.aclose()
        await super().__aexit__(exc_type, exc_value, traceback)


def http_client(connections: int = 1024, api_key: str | None = None) -> Client:
    """Make a client for a server that the caller named; proxies of the environment are not for loopback."""
    return Client(connections, {"authorization": f"Bearer {api_key}"} if api_key else {})


def _take(answer: Answer, event: dict[str, Any], now_ms: float) -> bool:
    """Fold one event into `answer`; true when it brought text."""
    if event.get("error"):
        answer.endings.append("error")
        answer.error = str(event["error"].get("message", event["error"]))[:ERROR_CHARS_MAX]
        return False
    usage = event.get("usage")
    if usage:
        answer.endings.append("usage")
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens") or 0
    brought = False
    for choice in event.get("choices", ()):
        said = answer.choices.setdefault(choice.get("index", 0), Said())
        if chars := said.take(choice):
            answer.text += choice.get("delta", {}).get("content") or ""
            answer.at_ms.append(now_ms)
            answer.chars.append(chars + (answer.chars[-1] if answer.chars else 0))
            brought = True
            if answer.endings:
                answer.endings.append("late")
        if choice.get("finish_reason"):
            answer.endings.append("finish")
            answer.finish_reason = choice["finish_reason"]
    return brought


class _Reader:
    """Folds the events of a body into `answer`, as far as the body has come."""

    def __init__(self, answer: Answer, on_chunk: OnChunk | None) -> None:
        self.answer, self._on_chunk = answer, on_chunk
        self._events = Events()
        self.pieces = 0

    @property
    def is_live(self) -> bool:
        """Whether somebody watches the answer while it comes."""
        return self._on_chunk is not None

    def take(self, now_ns: int, piece: bytes) -> None:
        self.pieces += 1
        self._fold(now_ns, self._events.cut(piece))

    def end(self, now_ns: int) -> None:
        """Take a last line without an end too."""
        self._fold(now_ns, self._events.rest())

    def _fold(self, now_ns: int, events: list[bytes]) -> None:
        answer = self.answer
        for data in events:
            if data == b"[DONE]":
                answer.endings.append("done")
                answer.is_done = True
            elif _take(answer, orjson.loads(data), now_ns / MS) and self._on_chunk is not None:
                self._on_chunk(answer)


def _refuse(answer: Answer, status: int, body: bytes) -> None:
    answer.endings.append("refused")
    answer.error = f"{status}: {body.decode('utf-8', 'replace')[:ERROR_CHARS_MAX]}"


async def _by_httpx(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], clock: Clock, reader: _Reader
) -> None:
    answer = reader.answer
    async with client.stream("POST", url, json=body) as response:
        answer.request_id = response.headers.get("x-request-id")
        if response.status_code != httpx.codes.OK:
            _refuse(answer, response.status_code, await response.aread())
            return
        async for piece in response.aiter_bytes():
            reader.take(clock.now_ns(), piece)
        reader.end(clock.now_ns())


async def _by_streams(
    client: Client, url: str, body: dict[str, Any], clock: Clock, reader: _Reader
) -> None:
    """Hear it and then read it, or read it as it comes. Raises the error that ended it, when all before is read."""
    answer = reader.answer

    def read(heard: Heard) -> None:
        answer.request_id = heard.headers.get("x-request-id")
        if heard.status == httpx.codes.OK:
            for now_ns, piece in heard.pieces[reader.pieces :]:
                reader.take(now_ns, piece)

    request = post_of(url, body, client.headers.raw)
    heard = await client.streams.ask(url, request, clock, read if reader.is_live else None)
    answer.request_id = heard.headers.get("x-request-id")
    answer.ended_ms = heard.ended_ns / MS
    if heard.status == httpx.codes.OK:
        async with client.reading:
            while reader.pieces < len(heard.pieces):
                for now_ns, piece in heard.pieces[reader.pieces : reader.pieces + PIECES_AT_ONCE]:
                    reader.take(now_ns, piece)
                await asyncio.sleep(0)
    if heard.failure is not None:
        raise heard.failure
    if heard.status == httpx.codes.OK:
        reader.end(heard.ended_ns)
    else:
        _refuse(answer, heard.status, heard.body)


async def chat(
    client: httpx.AsyncClient,
    url: str,
    body: dict[str, Any],
    clock: Clock,
    on_chunk: OnChunk | None = None,
) -> Answer:
    """One streamed chat. `on_chunk` is called after every piece of text; it must not block."""
    answer = Answer(started_ms=clock.now_ns() / MS)
    reader = _Reader(answer, on_chunk)
    url = f"{url}/v1/chat/completions"
    try:
        if isinstance(client, Client) and is_plain(url):
            await _by_streams(client, url, body, clock, reader)
        else:
            await _by_httpx(client, url, body, clock, reader)
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]
    answer.ended_ms = answer.ended_ms or clock.now_ns() / MS
    if answer.error is None and not answer.is_done:
        answer.error = "the stream ended without [DONE]"
    return answer


async def closed_loop(
    client: httpx.AsyncClient,
    url: str,
    bodies: Sequence[dict[str, Any]],
    concurrency: int,
    clock: Clock,
) -> list[Answer]:
    """Send every body, `concurrency` at a time, each as soon as another ended; answers in the order of `bodies`."""
    answers: dict[int, Answer] = {}
    waiting = iter(range(len(bodies)))

    async def client_loop() -> None:
        for index in waiting:
            answers[index] = await chat(client, url, bodies[index], clock)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(bodies))):
            tasks.create_task(client_loop())
    return [answers[index] for index in range(len(bodies))]
