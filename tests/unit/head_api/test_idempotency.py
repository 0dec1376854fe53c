"""`idempotency-key`: join, replay, mismatch, and what is not kept."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from superfluid_core.clock import SECOND
from superfluid_core.errors import CapacityError, ErrorCode, GenerationError
from superfluid_head.access.keys import KeyRing, Principal
from superfluid_head.access.replies import ANSWER_BYTES_MAX, ANSWERS_MAX, KEPT_S, Answers
from superfluid_head.api import idempotency
from tests.unit.head_api.conftest import Bench, chat_body

KEYS = KeyRing(
    [
        ("sk-alice-123456", Principal("alice", max_concurrent=1)),
        ("sk-robert-12345", Principal("bob")),
    ]
)
PATH = "/v1/chat/completions"


async def post(
    bench: Bench, key: str = "k-1", who: str = "sk-alice-123456", path: str = PATH, **members: Any
) -> httpx.Response:
    headers = {"idempotency-key": key, "x-api-key": who}
    return await bench.asend("POST", path, json=chat_body(**members), headers=headers)


@pytest.fixture
def bench(make_bench: Any) -> Bench:
    made: Bench = make_bench(keys=KEYS)
    return made


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_comes_again_gets_the_first_ones_answer(
    bench: Bench, *, stream: bool
) -> None:
    async def all_of_it() -> None:
        first = await post(bench, stream=stream)
        again = await post(bench, stream=stream)
        assert first.status_code == again.status_code == 200
        assert first.content == again.content
        assert "idempotent-replayed" not in first.headers
        assert again.headers["idempotent-replayed"] == "true"
        assert first.headers["content-type"] == again.headers["content-type"]
        assert first.headers["x-request-id"] != again.headers["x-request-id"]
        other = await post(bench, key="k-2", stream=stream)
        assert other.content != first.content

    asyncio.run(all_of_it())
    assert len(bench.fleet.requests) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_comes_again_meanwhile_joins_and_needs_no_slot(
    bench: Bench, *, stream: bool
) -> None:
    bench.fleet.say(*("ab" * 20), step_s=0.005)

    async def all_of_it() -> list[httpx.Response]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(post(bench, stream=stream)) for _ in range(5)]
        return [task.result() for task in tasks]

    replies = asyncio.run(all_of_it())
    assert {reply.status_code for reply in replies} == {200}
    assert len({reply.content for reply in replies}) == 1
    assert len(bench.fleet.requests) == 1
    assert bench.head.quotas.in_flight("alice") == 0


def test_another_body_or_route_under_the_same_key_is_a_mismatch_and_other_callers_never_meet(
    bench: Bench,
) -> None:
    async def all_of_it() -> None:
        assert (await post(bench)).status_code == 200
        for differs in ({"max_tokens": 2}, {"path": "/v1/messages", "max_tokens": 2}):
            refused = await post(bench, **differs)
            assert refused.status_code == 422
        assert (await post(bench, max_tokens=2)).json()["error"]["code"] == "idempotency_mismatch"
        ran = len(bench.fleet.requests)
        assert (await post(bench, who="sk-robert-12345")).status_code == 200
        assert len(bench.fleet.requests) == ran + 1
        assert (await post(bench, key="a b")).status_code == 400
        assert (await post(bench, key="x" * 256)).status_code == 400

    asyncio.run(all_of_it())


def test_what_failed_is_tried_anew(bench: Bench) -> None:
    full = CapacityError("full", code=ErrorCode.QUEUE_FULL)
    lost = GenerationError("lost", code=ErrorCode.NODE_LOST)

    async def all_of_it() -> None:
        bench.fleet.say("x", error_first=full)
        assert (await post(bench)).status_code == 429
        bench.fleet.say("x", "y", end=False, error_last=lost)
        broken = await post(bench, stream=True)
        assert json.loads(broken.text.strip().splitlines()[-1][6:])["error"]["code"] == "node_lost"
        bench.fleet.say("fine")
        whole = await post(bench, stream=True)
        assert "fine" in whole.text
        assert (await post(bench, stream=True)).content == whole.content
        assert (await post(bench, key="bad", model="nope")).status_code == 404
        assert (await post(bench, key="bad", model="org/m")).status_code == 200

    asyncio.run(all_of_it())
    assert len(bench.fleet.requests) == 4


class Line:
    """A client that leaves when told."""

    def __init__(self, body: bytes) -> None:
        self.parts = [body]
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def ask(self, bench: Bench) -> None:
        await bench.app(scope(), self.receive, self.send)

    async def receive(self) -> dict[str, Any]:
        if self.parts:
            return {"type": "http.request", "body": self.parts.pop(), "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)


def scope() -> dict[str, Any]:
    headers = [
        (b"host", b"127.0.0.1"),
        (b"x-api-key", b"sk-alice-123456"),
        (b"idempotency-key", b"k-1"),
    ]
    return {
        "type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(), "query_string": b"", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8453), "scheme": "http", "http_version": "1.1",
        "root_path": "",
    }  # fmt: skip


def test_a_reader_that_left_finds_its_answer_when_it_comes_back(bench: Bench) -> None:
    bench.fleet.say(*("ab" * 30), step_s=0.005)
    line = Line(json.dumps(chat_body(stream=True)).encode())

    async def all_of_it() -> httpx.Response:
        async with asyncio.TaskGroup() as group:
            group.create_task(line.ask(bench))
            for _ in range(1_000):
                await asyncio.sleep(0.002)
                if len(line.sent) > 3:
                    break
            line.gone.set()
            await asyncio.sleep(0.02)
            headers = {"idempotency-key": "k-1", "x-api-key": "sk-alice-123456"}
            body = json.dumps(chat_body(stream=True)).encode()
            return await bench.asend("POST", PATH, content=body, headers=headers)

    reply = asyncio.run(all_of_it())
    assert reply.text.endswith("data: [DONE]\n\n")
    assert reply.text.count('"content":"a"') == 30
    assert len(bench.fleet.requests) == 1


def test_nobody_comes_back_and_the_run_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "GRACE_S", 0.05)
    bench.fleet.say("x", step_s=0.005, end=False)
    line = Line(json.dumps(chat_body(stream=True, max_tokens=3_000)).encode())

    async def all_of_it() -> None:
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            group.create_task(line.ask(bench))
            await asyncio.sleep(0.05)
            line.gone.set()

    asyncio.run(all_of_it())
    assert bench.fleet.running == 0
    assert bench.head.quotas.in_flight("alice") == 0
    assert len(bench.fleet.cancelled_ns) == 1


def answer(book: Answers, key: str, now_ns: int, size: int = 10) -> None:
    whose = ("a", key)
    made = book.begin(whose, b"d", now_ns)
    book.add(whose, made, {"type": "http.response.start", "status": 200})
    book.add(whose, made, {"type": "http.response.body", "body": b"x" * size, "more_body": False})
    book.end(whose, made)


def test_the_book_is_bounded_in_time_number_and_bytes() -> None:
    book = Answers()
    answer(book, "old", 0)
    assert book.find(("a", "old"), KEPT_S * SECOND - 1) is not None
    assert book.find(("a", "old"), KEPT_S * SECOND) is None
    for number in range(ANSWERS_MAX + 50):
        answer(book, f"n{number}", SECOND)
    assert len(book) == ANSWERS_MAX
    assert book.find(("a", "n0"), SECOND) is None
    assert book.find(("a", f"n{ANSWERS_MAX + 49}"), SECOND) is not None
    for number in range(20):
        answer(book, f"big{number}", SECOND, ANSWER_BYTES_MAX // 2)
    assert len(book) < 20
    answer(book, "huge", SECOND, ANSWER_BYTES_MAX + 1)
    assert book.find(("a", "huge"), SECOND) is None
