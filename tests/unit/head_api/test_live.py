"""The head behind a real socket: the official client, readers that leave or stall, bodies that never end, draining."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(live: Any) -> Any:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="k", max_retries=0) as made:
        yield made


def until(claim: Callable[[], bool], limit_s: float = 5.0) -> float:
    """Wait for `claim`; returns how long it took."""
    start = time.monotonic()
    while not claim():
        assert time.monotonic() - start < limit_s, "it never happened"
        time.sleep(0.005)
    return time.monotonic() - start


def test_the_official_client_reads_whole_answers_and_models(live: Any, client: Any) -> None:
    answer = client.chat.completions.create(model="org/m", messages=MESSAGES, n=2)
    assert [choice.message.content for choice in answer.choices] == ["Hello world"] * 2
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6
    assert [model.id for model in client.models.list()] == ["org/m"]
    assert client.models.retrieve("org/m").id == "org/m"
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert caught.value.request_id


def test_the_official_client_reads_raw_streams(live: Any, client: Any) -> None:
    live.bench.fleet.say("a", b"\xf0\x9f", b"\x98\x80", "b", "ST", "OP")
    stream = client.chat.completions.create(
        model="org/m", messages=MESSAGES, stream=True, stop="STOP", n=3,
        stream_options={"include_usage": True},
    )  # fmt: skip
    texts = {0: "", 1: "", 2: ""}
    usage: Any = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == dict.fromkeys(range(3), "a😀b")
    assert usage.completion_tokens == 18


def test_the_official_stream_helper_accepts_every_chunk(live: Any, client: Any) -> None:
    live.bench.fleet.say("one ", "two ", "three")
    with client.chat.completions.stream(
        model="org/m", messages=MESSAGES, n=3, logprobs=True, top_logprobs=1,
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert [choice.message.content for choice in final.choices] == ["one two three"] * 3
    assert final.usage.completion_tokens == 12
    assert [len(choice.logprobs.content) for choice in final.choices] == [3, 3, 3]


def test_the_official_client_raises_on_a_failed_stream(live: Any, client: Any) -> None:
    from superfluid_core.errors import GenerationError

    live.bench.fleet.say("a", end=False, error_last=GenerationError("x"))
    with pytest.raises(openai.APIError) as caught:
        list(client.chat.completions.create(model="org/m", messages=MESSAGES, stream=True))
    assert caught.value.code == "node_lost"


@pytest.mark.parametrize("stream", [True, False])
def test_o20_a_client_that_leaves_is_cancelled_within_a_second(live: Any, stream: bool) -> None:
    fleet = live.bench.fleet
    fleet.say("tick ", end=False, step_s=0.02)
    body = json.dumps({"messages": MESSAGES, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", live.port)) as raw:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body
        )
        until(lambda: fleet.running == 1)
        if stream:
            while b"tick" not in raw.recv(4_096):
                pass
    assert until(lambda: fleet.running == 0) < 1.0
    assert len(fleet.cancelled_ns) == 1
    fleet.say("fine")
    assert httpx.post(live.url + "/v1/chat/completions", json={"messages": MESSAGES}).is_success
    metrics = httpx.get(live.url + "/metrics").text
    assert (
        'superfluid_head_generations_total{class="agent",finish="cancelled",model="org/m"} 1.0'
        in metrics
    )


def test_a_client_that_leaves_while_it_waits_is_cancelled(live: Any) -> None:
    fleet = live.bench.fleet
    fleet.say("x", wait_s=30)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(live.url + "/v1/chat/completions", json={"messages": MESSAGES}, timeout=0.3)
    assert until(lambda: fleet.running == 0) < 1.0


def receive_all(raw: socket.socket) -> bytes:
    parts = []
    while data := raw.recv(65_536):
        parts.append(data)
    return b"".join(parts)


def test_a_body_beyond_the_limit_is_refused_while_it_still_arrives(
    make_bench: Any, serve: Any
) -> None:
    from superfluid_core.limits import HttpLimits

    bench = make_bench(limits=HttpLimits(body_bytes_max=1 << 20))
    piece = b"%x\r\n%s\r\n" % (65_536, b" " * 65_536)
    with serve(bench) as live, socket.create_connection(("127.0.0.1", live.port)) as raw:
        raw.settimeout(10)
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        sent = 0
        while sent < 300 and not _is_readable(raw):
            raw.sendall(piece)
            sent += 1
        reply = b""
        while not reply.endswith(b"}}"):
            reply += raw.recv(65_536)
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in reply.lower()
    assert b'"code": "request_too_large"' in reply
    assert sent < 300


def test_a_declared_length_beyond_the_limit_is_refused_without_reading(live: Any) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as raw:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99999999999\r\n\r\n"
        )
        assert raw.recv(4_096).startswith(b"HTTP/1.1 413 ")


def _is_readable(raw: socket.socket) -> bool:
    import select

    return bool(select.select([raw], [], [], 0)[0])


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\nx-big: " + b"x" * 40_000 + b"\r\n\r\n", 431),
        (
            b"GET /livez HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(101)) + b"\r\n",
            431,
        ),
        (b"GET /livez HTTP/1.1\r\nx-endless: " + b"x" * 80_000, 431),
        (b"this is not http\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n", 200),
    ],
)
def test_heads_are_bounded_and_refused_in_the_apis_shape(
    live: Any, head: bytes, status: int
) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as raw:
        raw.sendall(head)
        reply = receive_all(raw)
    assert reply.startswith(b"HTTP/1.1 %d " % status)
    if status != 200:
        assert set(json.loads(reply.partition(b"\r\n\r\n")[2])["error"]) == {
            "message", "type", "param", "code",
        }  # fmt: skip
    assert httpx.get(live.url + "/livez").is_success


def test_the_connection_stays_usable_after_a_bad_body(live: Any) -> None:
    with httpx.Client(base_url=live.url) as one:
        for _ in range(3):
            bad = one.post(
                "/v1/chat/completions", content=b"{", headers={"content-type": "application/json"}
            )
            assert bad.status_code == 400
            assert one.post("/v1/chat/completions", json={"messages": MESSAGES}).status_code == 200


def test_streams_finish_while_the_head_drains_and_what_is_left_is_cut_with_an_error(
    live: Any,
) -> None:
    fleet, inflight = live.bench.fleet, live.bench.head.inflight
    fleet.say("tick ", end=False, step_s=0.01)
    with httpx.stream(
        "POST", live.url + "/v1/chat/completions", json={"messages": MESSAGES, "stream": True}
    ) as reply:
        lines = reply.iter_lines()
        while "tick" not in next(lines):
            pass
        live.call(inflight.drain)
        until(lambda: httpx.get(live.url + "/readyz").status_code == 503)
        refused = httpx.post(live.url + "/v1/chat/completions", json={"messages": MESSAGES})
        assert refused.status_code == 503
        assert "tick" in next(line for line in lines if line)
        live.call(inflight.cut)
        rest = [line for line in lines if line]
    assert json.loads(rest[-1][6:])["error"]["code"] == "draining"
    assert until(lambda: inflight.count == 0) < 1.0


def test_a_reader_that_takes_nothing_is_dropped(make_bench: Any, serve: Any) -> None:
    from superfluid_core.limits import HttpLimits

    bench = make_bench(limits=HttpLimits(slow_client_ms=300))
    bench.fleet.say("x" * 60_000, end=False)
    with serve(bench) as live, socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        raw.connect(("127.0.0.1", live.port))
        body = json.dumps({"messages": MESSAGES, "stream": True}).encode()
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body
        )
        until(lambda: bench.fleet.running == 1)
        assert until(lambda: bench.fleet.running == 0) < 5.0
        assert not receive_all(raw).endswith(b"0\r\n\r\n")


def test_forty_streams_at_once_are_all_whole(live: Any) -> None:
    import concurrent.futures

    live.bench.fleet.say("ok ", b"\xf0\x9f", b"\x98\x80", "!", step_s=0.005)

    pool_client = httpx.Client(base_url=live.url, verify=False, trust_env=False)

    def one(_: int) -> str:
        found = ""
        body = {"messages": MESSAGES, "stream": True}
        with pool_client.stream("POST", "/v1/chat/completions", json=body) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    found += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        return found

    with pool_client, concurrent.futures.ThreadPoolExecutor(20) as pool:
        assert set(pool.map(one, range(40))) == {"ok 😀!"}


def test_small_replies_do_not_wait_for_acknowledgements(live: Any) -> None:
    with httpx.Client(base_url=live.url, trust_env=False) as one:
        one.get("/livez")
        times = []
        for _ in range(11):
            started = time.monotonic()
            assert one.get("/livez").is_success
            times.append(time.monotonic() - started)
    assert sorted(times)[5] < 0.035, "Nagle's algorithm and delayed acknowledgements add 40 ms"
