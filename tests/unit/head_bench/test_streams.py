"""The bench's own client over real sockets: what it hears, when it connects anew, and how it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from superfluid_core.clock import SystemClock
from superfluid_head.bench.exchange import Deadlines, Heard
from superfluid_head.bench.load import Answer, Client, OnChunk, chat, chat_body, http_client
from superfluid_head.bench.loops import run
from superfluid_head.bench.streams import Events, Outcome, Streams, post_of, request_of, stream_all
from tests.unit.head_bench.raw_server import (
    CHUNKED,
    GOOD,
    HEAD,
    SECONDS,
    Peer,
    Server,
    answering,
    chunk,
    chunked,
    ending,
    event,
    sized,
    with_server,
)  # fmt: skip

CLOCK = SystemClock()


async def ask(client: Client, url: str, on_chunk: OnChunk | None = None) -> Answer:
    return await chat(client, url, chat_body("m", "Grüße", 4), CLOCK, on_chunk)


def answer_of(script: Callable[[Peer], Awaitable[None]], on_chunk: OnChunk | None = None) -> Answer:
    answers: list[Answer] = []

    async def body(server: Server) -> None:
        async with http_client() as client:
            answers.append(await ask(client, server.url, on_chunk))

    with_server(script, body)
    return answers[0]


@pytest.mark.parametrize("reply", [chunked(*GOOD), sized(b"".join(GOOD))])
def test_an_answer_is_the_same_wherever_its_bytes_are_parted(reply: bytes) -> None:
    seen: list[Answer] = []

    async def script(peer: Peer) -> None:
        while await peer.request():
            at = len(peer.asked)
            peer.writer.write(reply[:at])
            await peer.writer.drain()
            await asyncio.sleep(0.0005)
            peer.writer.write(reply[at:])

    async def body(server: Server) -> None:
        async with http_client() as client:
            seen.extend([await ask(client, server.url) for _ in range(len(reply) - 1)])
            assert len(server.peers) == 1

    with_server(script, body)
    assert all(each.is_complete and each.text == "Héllo" for each in seen), seen
    assert {len(each.at_ms) for each in seen} == {2}
    assert all(each.started_ms <= each.at_ms[0] <= each.ended_ms for each in seen)


def test_a_byte_at_a_time_is_an_answer_too() -> None:
    answer = answer_of(answering(*(bytes((each,)) for each in chunked(*GOOD))))
    assert answer.is_complete
    assert answer.text == "Héllo"


def test_an_answer_that_ends_with_its_connection_is_whole() -> None:
    answer = answer_of(ending(HEAD, b"\r\n", *GOOD))
    assert answer.is_complete
    assert answer.request_id == "r-1"


def test_an_interim_answer_is_passed_over() -> None:
    assert answer_of(answering(b"HTTP/1.1 100 Continue\r\n\r\n", chunked(*GOOD))).is_complete


def test_an_answer_that_is_cut_keeps_what_came_before() -> None:
    cut = chunk(event("lost"))[:-9]
    answer = answer_of(ending(CHUNKED, chunk(event("Hi")), cut))
    assert answer.text == "Hi"
    assert answer.request_id == "r-1"
    assert answer.error is not None
    assert answer.error.startswith("RemoteProtocolError: ")


def test_a_connection_that_is_reset_is_told_as_such() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.writer.write(CHUNKED + chunk(event("Hi")))
        await peer.writer.drain()
        await asyncio.sleep(0.05)
        peer.writer.get_extra_info("socket").setsockopt(1, 13, b"\x01\0\0\0\0\0\0\0")  # linger: 0 s
        peer.writer.transport.abort()

    answer = answer_of(script)
    assert answer.text == "Hi"
    assert answer.error is not None
    assert answer.error.startswith("ReadError: ")


def test_an_answer_without_its_last_mark_is_a_failure() -> None:
    answer = answer_of(answering(chunked(event("Hi"))))
    assert answer.error == "the stream ended without [DONE]"
    assert answer.text == "Hi"


def test_a_refusal_says_its_status_and_its_words() -> None:
    words = b'{"error": {"message": "queue full"}}'
    answer = answer_of(answering(sized(words, "429 Too Many Requests")))
    assert answer.error == f"429: {words.decode()}"
    assert answer.endings == ["refused"]


def test_what_is_not_http_is_an_error() -> None:
    answer = answer_of(ending(b"SSH-2.0-OpenSSH_9\r\n"))
    assert answer.error is not None
    assert answer.error.startswith("RemoteProtocolError: ")


def test_nobody_there_is_an_error() -> None:
    async def scenario() -> Answer:
        async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
        async with http_client() as client:
            return await ask(client, f"http://127.0.0.1:{port}")

    error = run(scenario()).error
    assert error is not None
    assert error.startswith("ConnectError: ")


def test_a_watcher_hears_every_piece_when_it_comes() -> None:
    heard: list[str] = []
    goes_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.writer.write(CHUNKED + chunk(GOOD[0]))
        await goes_on.wait()  # set by the watcher: the rest comes only when it has seen this
        peer.writer.write(b"".join(map(chunk, (*GOOD[1:], b""))))

    def on_chunk(answer: Answer) -> None:
        heard.append(answer.text)
        assert answer.request_id == "r-1"
        goes_on.set()

    assert answer_of(script, on_chunk).is_complete
    assert heard == ["Hé", "Héllo"]


def test_a_watcher_that_raises_is_heard_and_drops_the_connection() -> None:
    is_left: list[bool] = []

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.writer.write(CHUNKED + chunk(GOOD[0]))
        is_left.append(await peer.is_left())

    def on_chunk(_: Answer) -> None:
        raise LookupError

    async def body(server: Server) -> None:
        async with http_client() as client:
            with pytest.raises(LookupError):
                await ask(client, server.url, on_chunk)
            while not is_left:  # noqa: ASYNC110 - the server sets no event
                await asyncio.sleep(0.01)

    with_server(script, body)
    assert is_left == [True]


def test_a_cancelled_chat_leaves_at_once_and_gives_its_place_back() -> None:
    is_left: list[bool] = []

    async def script(peer: Peer) -> None:
        await peer.request()
        if peer.number:
            peer.writer.write(chunked(*GOOD))
            return
        peer.writer.write(CHUNKED + chunk(GOOD[0]))
        is_left.append(await peer.is_left())

    async def body(server: Server) -> None:
        async with http_client(1) as client:
            begun = asyncio.Event()
            task = asyncio.get_running_loop().create_task(
                ask(client, server.url, lambda _: begun.set())
            )
            await begun.wait()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            while not is_left:  # noqa: ASYNC110 - the server sets no event
                await asyncio.sleep(0.01)
            assert (await ask(client, server.url)).is_complete

    with_server(script, body)
    assert is_left == [True]


def test_connections_are_used_again_and_no_more_than_allowed_at_once() -> None:
    async def body(server: Server) -> None:
        async with http_client(3) as client:
            for _ in range(2):
                answers = await asyncio.gather(*(ask(client, server.url) for _ in range(9)))
                assert all(each.is_complete for each in answers)
        assert len(server.peers) == 3
        assert sum(len(peer.asked) for peer in server.peers) == 18

    with_server(answering(chunked(*GOOD)), body)


def closing_when_idle(*, is_answering: bool) -> Callable[[Peer], Awaitable[None]]:
    """Close the first connection when its second request is there, after some of an answer or with none of it."""

    async def script(peer: Peer) -> None:
        while await peer.request():
            if peer.number == 0 and len(peer.asked) == 2:
                peer.writer.write(CHUNKED[:9] if is_answering else b"")
                return
            peer.writer.write(chunked(*GOOD))

    return script


@pytest.mark.parametrize("is_answering", [True, False])
def test_nothing_is_asked_again_that_was_lost_on_a_used_connection(is_answering: bool) -> None:
    """Whoever judges a server counts it, however likely it is that the connection was only resting too long."""

    async def body(server: Server) -> None:
        async with http_client() as client:
            assert (await ask(client, server.url)).is_complete
            error = (await ask(client, server.url)).error
            assert error is not None
            assert error.startswith("RemoteProtocolError: ")
        assert len(server.peers) == 1

    with_server(closing_when_idle(is_answering=is_answering), body)


def test_nothing_is_asked_again_on_a_fresh_connection() -> None:
    async def body(server: Server) -> None:
        async with http_client() as client:
            error = (await ask(client, server.url)).error
            assert error is not None
            assert error.startswith("RemoteProtocolError: ")
        assert len(server.peers) == 1

    with_server(ending(), body)


def test_a_connection_closed_while_it_rests_is_not_used() -> None:
    async def body(server: Server) -> None:
        async with http_client() as client:
            assert (await ask(client, server.url)).is_complete
            server.peers[0].writer.close()
            await asyncio.sleep(0.05)
            assert (await ask(client, server.url)).is_complete
        assert [len(peer.asked) for peer in server.peers] == [1, 1]

    with_server(answering(chunked(*GOOD)), body)


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\n", b"garbage"])
def test_a_connection_with_more_on_it_than_an_answer_is_not_used_again(more: bytes) -> None:
    async def body(server: Server) -> None:
        async with http_client() as client:
            assert (await ask(client, server.url)).is_complete
            assert (await ask(client, server.url)).is_complete
        assert len(server.peers) == 2

    with_server(answering(chunked(*GOOD) + more), body)


async def heard_within(server: Server, deadlines: Deadlines) -> Heard:
    streams = Streams(1, deadlines)
    try:
        return await streams.ask(server.url, post_of(server.url, {}), CLOCK)
    finally:
        await streams.aclose()


@pytest.mark.parametrize(
    ("deadlines", "words"),
    [
        (Deadlines(silent_s=0.05), "nothing came for 0.05 s"),
        (Deadlines(total_s=0.05), "the answer was not whole after 0.05 s"),
    ],
)
def test_an_answer_that_stops_is_given_up(deadlines: Deadlines, words: str) -> None:
    is_left: list[bool] = []

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.writer.write(CHUNKED + chunk(b"data: 1"))
        is_left.append(await peer.is_left())

    async def body(server: Server) -> None:
        heard = await heard_within(server, deadlines)
        assert isinstance(heard.failure, httpx.ReadTimeout)
        assert str(heard.failure) == words
        assert heard.body == b"data: 1"

    with_server(script, body)


def test_an_answer_that_goes_on_outlives_the_deadline_of_silence() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.writer.write(CHUNKED)
        for _ in range(40):
            peer.writer.write(chunk(b"x"))
            await asyncio.sleep(0.05)
        peer.writer.write(chunk(b""))

    async def body(server: Server) -> None:
        heard = await heard_within(server, Deadlines(silent_s=1.0))
        assert heard.failure is None
        assert heard.body == b"x" * 40

    with_server(script, body)


def test_waiting_for_a_place_has_a_deadline() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.is_left()

    async def body(server: Server) -> None:
        streams = Streams(1, Deadlines(silent_s=0.05, total_s=SECONDS))
        request = post_of(server.url, {})
        heard = await asyncio.gather(*(streams.ask(server.url, request, CLOCK) for _ in range(2)))
        kinds = {type(each.failure) for each in heard}
        assert httpx.ReadTimeout in kinds
        assert kinds <= {httpx.ReadTimeout, httpx.PoolTimeout}
        await streams.aclose()

    with_server(script, body)


def test_closing_the_client_ends_what_is_under_way() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.writer.write(CHUNKED + chunk(GOOD[0]))
        await peer.is_left()

    async def body(server: Server) -> None:
        client, begun = http_client(), asyncio.Event()
        task = asyncio.get_running_loop().create_task(
            ask(client, server.url, lambda _: begun.set())
        )
        await begun.wait()
        await client.aclose()
        assert (await task).error is not None

    with_server(script, body)


def test_a_request_says_what_httpx_would() -> None:
    headers = [(b"Authorization", b"Bearer k"), (b"Accept-Encoding", b"gzip"), (b"X-Own", b"1")]
    text = post_of("http://[::1]:80/base/v1/chat?q=1", {"a": "ü"}, headers)
    head, _, body = text.partition(b"\r\n\r\n")
    assert body == '{"a":"ü"}'.encode()
    assert head.split(b"\r\n") == [
        b"POST /base/v1/chat?q=1 HTTP/1.1",
        b"host: [::1]:80",
        b"content-type: application/json",
        b"content-length: 10",
        b"connection: keep-alive",
        b"Authorization: Bearer k",
        b"X-Own: 1",
    ]


def test_a_header_cannot_begin_another_one() -> None:
    with pytest.raises(ValueError, match="line end"):
        post_of("http://h/", {}, [(b"x", b"1\r\ny: 2")])


@pytest.mark.parametrize("size", range(1, 12))
def test_events_are_cut_the_same_in_pieces_of_any_size(size: int) -> None:
    data = b": ping\n\ndata: 1\r\n\r\nevent: x\ndata:2\n\ndata: end"
    events, found = Events(), list[bytes]()
    for at in range(0, len(data), size):
        found += events.cut(data[at : at + size])
    assert [*found, *events.rest()] == [b"1", b"2", b"end"]


def outcomes(script: Callable[[Peer], Awaitable[None]], count: int) -> list[Outcome]:
    found: list[Outcome] = []

    async def body(server: Server) -> None:
        requests = [request_of(server.url, {"n": n}, "key") for n in range(count)]
        found.extend(await stream_all(server.url, requests, CLOCK))
        assert all(b"authorization: Bearer key" in peer.asked[0] for peer in server.peers)
        assert len(server.peers) == count

    with_server(script, body)
    return found


def test_counted_answers_have_a_connection_each() -> None:
    for outcome in outcomes(answering(chunked(*GOOD)), 5):
        assert outcome.is_whole
        assert outcome.chunks == 3
        assert outcome.first_ms is not None
        assert outcome.first_ms > 0


def test_counted_answers_that_fail_say_why() -> None:
    (cut,) = outcomes(answering(chunked(*GOOD[:2])), 1)
    assert cut.error == "the stream ended without [DONE]"
    (refused,) = outcomes(answering(sized(b"full", "503 Busy")), 1)
    assert refused.error == "refused: 503 b'full'"
