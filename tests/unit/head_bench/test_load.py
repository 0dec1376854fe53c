"""The bench's streaming client against servers in memory: what counts as an answer and what as a failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import httpx

from superfluid_core.clock import MS
from superfluid_head.bench.load import Answer, chat, chat_body, closed_loop, http_client
from superfluid_head.bench.pools import POOL_SIZE
from superfluid_head.bench.serve import figures


class TickingClock:
    """A clock that moves a millisecond with every look."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        self._now_ns += MS
        return self._now_ns

    def boot_ns(self) -> int:
        return self._now_ns

    def wall_s(self) -> int:
        return 0


def event(text: str | None = None, finish: str | None = None) -> str:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice], 'usage': None})}\n\n"


USAGE = 'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
GOOD = event("Hel") + ": ping\n\n" + event("lo") + event(finish="stop") + USAGE + "data: [DONE]\n\n"


async def in_pieces(body: str) -> AsyncIterator[bytes]:
    head, *events = body.split("data:")
    for piece in (head, *(f"data:{each}" for each in events)):
        if piece:
            yield piece.encode()


def ask(body: str, status: int = 200) -> Answer:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=in_pieces(body)))

    async def run() -> Answer:
        async with httpx.AsyncClient(transport=transport) as client:
            return await chat(client, "http://head", chat_body("m", "Hi", 4), TickingClock())

    return asyncio.run(run())


def test_a_whole_stream_is_a_complete_answer() -> None:
    answer = ask(GOOD)
    assert answer.is_complete
    assert (answer.text, answer.finish_reason) == ("Hello", "stop")
    assert (answer.prompt_tokens, answer.completion_tokens) == (3, 2)
    assert len(answer.at_ms) == 2
    assert answer.chars == [3, 5]
    assert answer.first_ms is not None
    assert answer.first_ms > 0
    assert answer.gaps_ms() == [1.0]


def test_a_stream_without_its_end_is_a_failure() -> None:
    answer = ask(event("Hel"))
    assert not answer.is_complete
    assert answer.error == "the stream ended without [DONE]"
    assert answer.text == "Hel"


def test_an_error_event_is_a_failure_with_its_words() -> None:
    answer = ask(
        event("Hel") + 'data: {"error": {"message": "node lost", "code": "node_lost"}}\n\n'
    )
    assert answer.error == "node lost"


def test_a_refusal_is_a_failure_with_its_status() -> None:
    answer = ask('{"error": {"message": "queue full"}}', status=429)
    assert answer.error is not None
    assert answer.error.startswith("429: ")


def test_a_closed_loop_keeps_its_concurrency_and_its_order() -> None:
    running, most = 0, 0

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        prompt = json.loads(request.content)["messages"][0]["content"]
        return httpx.Response(200, text=event(prompt) + event(finish="stop") + "data: [DONE]\n\n")

    async def run() -> list[Answer]:
        bodies = [chat_body("m", f"p{n}", 4) for n in range(20)]
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as client:
            return await closed_loop(client, "http://head", bodies, 3, TickingClock())

    answers = asyncio.run(run())
    assert [answer.text for answer in answers] == [f"p{n}" for n in range(20)]
    assert 1 < most <= 3


def test_failures_are_counted_and_give_no_tokens() -> None:
    found = figures([ask(GOOD), ask("{}", status=503)])
    assert found["failed"] == 1
    assert found["tok_s"] > 0


def test_many_requests_at_once_go_through_small_pools_that_keep_their_connections() -> None:
    opened = closed = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened, closed
        opened += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                await asyncio.sleep(0.05)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()
        await writer.wait_closed()
        closed += 1

    async def run() -> list[int]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            async with http_client(3 * POOL_SIZE + 1) as client:
                counts = []
                for _ in range(2):
                    replies = await asyncio.gather(*(client.get(url) for _ in range(48)))
                    assert {reply.text for reply in replies} == {"ok"}
                    counts.append(opened)
            while closed < opened:  # noqa: ASYNC110 - looks at what others count
                await asyncio.sleep(0.01)
        return counts

    assert asyncio.run(run()) == [48, 48]
