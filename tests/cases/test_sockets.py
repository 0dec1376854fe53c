"""Public bug reports about what happens on the wire: O-10 silence behind proxies, O-12 IPv6, O-28 large bodies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from superfluid_core.limits import HttpLimits
from superfluid_head.api.body import parse_object
from superfluid_head.api.errors import ApiError
from superfluid_head.server import open_sockets
from tests.cases.fleet import asking
from tests.unit.head_api.conftest import Bench, LiveServer

MESSAGES: Any = [{"role": "user", "content": "hi"}]
PROXY_TIMEOUT_S = 0.6
BLOCKED_S_MAX = 1.0


def relay_one(client: socket.socket, port: int) -> None:
    """Pass bytes both ways as an impatient proxy does: a server that is silent for a while is cut off."""
    with client, socket.create_connection(("127.0.0.1", port)) as server:
        server.settimeout(PROXY_TIMEOUT_S)
        client.settimeout(5)
        head = b""
        while b"\r\n\r\n" not in head:
            head += client.recv(65_536)
        before, _, body = head.partition(b"\r\n\r\n")
        lines = before.lower().split(b"\r\n")
        size = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
        while len(body) < size:
            body += client.recv(65_536)
        server.sendall(before + b"\r\nconnection: close\r\n\r\n" + body)
        with contextlib.suppress(TimeoutError):
            while data := server.recv(65_536):
                client.sendall(data)


@contextlib.contextmanager
def proxied(port: int) -> Iterator[str]:
    """Stand before a port; yields the address to ask instead."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(0.1)
        closed = threading.Event()

        def serve() -> None:
            while not closed.is_set():
                with contextlib.suppress(TimeoutError):
                    relay_one(door.accept()[0], port)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{door.getsockname()[1]}"
        finally:
            closed.set()
            thread.join(10)


def test_o10_a_long_silence_is_survived_behind_a_proxy_that_cuts_silent_streams(
    make_bench: Any,
) -> None:
    bench = make_bench(limits=HttpLimits(silence_ms=150))
    bench.fleet.say("late", " but", " whole", wait_s=2 * PROXY_TIMEOUT_S)
    with (
        LiveServer(bench) as live,
        proxied(live.port) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client,
    ):
        chunks = list(client.chat.completions.create(model="org/m", messages=MESSAGES, stream=True))
        texts = [choice.delta.content for chunk in chunks for choice in chunk.choices]
        assert [text for text in texts if text] == ["late", " but", " whole"]
        assert len(chunks) == 5  # the role, three texts, the finish: comments are no events
        response = httpx.post(
            url + "/v1/chat/completions", json={"messages": MESSAGES, "stream": True}
        )
    fields = {line.partition(b":")[0] for line in response.content.split(b"\n") if line}
    assert fields == {b"", b"data"}
    assert response.content.count(b": ping\n\n") >= 3
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


def test_o10_such_a_proxy_does_cut_what_is_silent(make_bench: Any) -> None:
    bench = make_bench(limits=HttpLimits(silence_ms=60_000))
    bench.fleet.say("late", wait_s=2 * PROXY_TIMEOUT_S)
    with LiveServer(bench) as live, proxied(live.port) as url:
        body = {"messages": MESSAGES, "stream": True}
        with pytest.raises(httpx.HTTPError):
            httpx.post(url + "/v1/chat/completions", json=body)
    assert HttpLimits().silence_ms <= 15_000


def test_o10_every_token_leaves_at_once(make_bench: Any) -> None:
    bench = make_bench()
    bench.fleet.say("a", "b", "c", end=False, step_s=0.4)
    arrivals = []
    with LiveServer(bench) as live:
        body = {"messages": MESSAGES, "stream": True, "max_tokens": 3}
        with httpx.stream("POST", live.url + "/v1/chat/completions", json=body) as reply:
            for line in reply.iter_lines():
                if any(f'"{text}"' in line for text in "abc"):
                    arrivals.append(time.monotonic())  # noqa: PERF401 - the time of each
    assert len(arrivals) == 3
    assert arrivals[1] - arrivals[0] > 0.2
    assert arrivals[2] - arrivals[1] > 0.2


@pytest.mark.parametrize(
    ("host", "reached_by"),
    [
        ("::1", {"::1"}),
        ("::", {"::1", "127.0.0.1"}),
        ("127.0.0.1", {"127.0.0.1"}),
        ("localhost", {"127.0.0.1"}),
    ],
)
def test_o12_a_host_is_reached_over_the_families_that_it_means(
    host: str, reached_by: set[str]
) -> None:
    """The listening sockets alone: nobody answers on them."""
    opened = open_sockets([(host, 0)])
    try:
        for target in ("::1", "127.0.0.1"):
            ports = {one.getsockname()[1] for one in opened}
            reached = False
            for port in ports:
                with contextlib.suppress(ConnectionRefusedError):
                    socket.create_connection((target, port), timeout=5).close()
                    reached = True
            assert reached or target not in reached_by
            assert not reached or target in reached_by or host == "localhost"
    finally:
        for one in opened:
            one.close()


def test_o12_a_head_answers_at_a_bracketed_address(make_bench: Any) -> None:
    with LiveServer(make_bench(), "::1") as live:
        assert live.url.startswith("http://[::1]:")
        assert httpx.get(live.url + "/health").status_code == 200
        with openai.OpenAI(base_url=live.url + "/v1", api_key="k", max_retries=0) as client:
            answer = client.chat.completions.create(model="org/m", messages=MESSAGES)
        assert answer.choices[0].message.content == "Hello world"


def test_o12_a_node_may_listen_on_ipv6() -> None:
    async def main() -> None:
        async with asking(host="::1") as asked:
            reply = await asked.chat(max_tokens=4, ignore_eos=True)
            assert reply.json()["usage"]["completion_tokens"] == 4
            (node,) = asked.fleet.health().nodes
            assert str(node.address).startswith("[::1]:")

    asyncio.run(main())


# What takes long to parse: many bytes, many strings, many containers, many numbers, each as large as a body may be.
SIZE = HttpLimits().body_bytes_max - 100
LARGE = {
    "text": (b'{"a":"', b"x", b'"}'),
    "escapes": (b'{"a":"', b"\\n", b'"}'),
    "characters": (b'{"a":"', "é".encode(), b'"}'),
    "source": (b'{"a":"', b"x[1], {\\\\", b'"}'),
    "lists": (b'{"a":[', b"[],", b"1]}"),
    "pairs": (b'{"a":[', b"[1],", b"1]}"),
    "texts": (b'{"a":[', b'"x",', b"1]}"),
    "members": (b"{", b'"x":1,', b'"y":1}'),
    "fractions": (b'{"a":[', b"1.5,", b"1]}"),
}


def large(kind: str, size: int = SIZE) -> bytes:
    front, unit, back = LARGE[kind]
    return front + unit * (size // len(unit)) + back


@pytest.mark.parametrize("kind", LARGE)
def test_o28_no_body_holds_the_event_loop_for_long(kind: str) -> None:
    """Measured in the time of this thread: some 0.1 s on a quiet machine, and 3 s without the bounds."""
    data = large(kind, 3_600_000 if kind == "fractions" else SIZE)
    began = time.thread_time()
    with contextlib.suppress(ApiError):
        parse_object(data, HttpLimits().json_depth_max)
    assert time.thread_time() - began < BLOCKED_S_MAX / 2


def test_o28_what_counts_as_many_values_is_counted_outside_of_texts() -> None:
    prose = b'{"a":"' + b'[{,\\"x\\"}],\\\\' * 100_000 + b'"}'
    assert len(parse_object(prose, 64)["a"]) == 1_000_000
    ids = b'{"a":[' + b"17," * 200_000 + b"1]}"
    assert len(parse_object(ids, 64)["a"]) == 200_001
    for kind in ("lists", "texts", "members", "pairs", "fractions"):
        with pytest.raises(ApiError, match="too many values"):
            parse_object(large(kind), 64)
    for tail in (b"1e999", b"-1e999"):
        with pytest.raises(ApiError, match="too large") as caught:
            parse_object(b'{"a":[1,' + tail + b"]}", 64)
        assert caught.value.param == "a[1]"


class Watch:
    """How long the loop of a live server is busy at a stretch, in the time of its own thread."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.002)
            self.longest_s = max(self.longest_s, time.thread_time() - began)


def test_o28_health_and_other_streams_go_on_while_a_large_prompt_is_refused(
    make_bench: Any,
) -> None:
    bench: Bench = make_bench()
    bench.fleet.say("tick ", end=False, step_s=0.02)
    watch = Watch()
    seen: list[str] = []
    with LiveServer(bench) as live, httpx.Client(base_url=live.url, timeout=30) as client:
        loop_tasks: list[asyncio.Task[None]] = []
        live.call(lambda: loop_tasks.append(asyncio.get_running_loop().create_task(watch.run())))
        body = {"messages": MESSAGES, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()
            large = json.dumps({"messages": [{"role": "user", "content": "word " * 1_600_000}]})
            for _ in range(2):
                response = client.post("/v1/chat/completions", content=large)
                assert response.status_code == 400
                assert response.json()["error"]["code"] == "context_length_exceeded"
                assert client.get("/health").status_code == 200
                seen.append(next(line for line in lines if "tick" in line))
        live.call(loop_tasks[0].cancel)
    assert len(seen) == 2
    assert 0 < watch.longest_s < BLOCKED_S_MAX
