"""The corpus of malformed requests against a real socket: refusals in the API's shape, never a 500, and the next request is served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from superfluid_core.limits import HttpLimits
from superfluid_head.app import routes
from tests.unit.head_api.conftest import chat_body
from tests.unit.head_api.malformed import requests

AT_ONCE = 24
REPLY = re.compile(rb"HTTP/1\.1 (\d{3})[^\r\n]*\r\n((?:[^\r\n]+\r\n)*)\r\n", re.DOTALL)
OPEN = (b"/livez", b"/readyz", b"/health", b"/ping")


async def answer_to(port: int, data: bytes) -> bytes:
    """Send it and read until the server closes, or has said all that it has to say."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = bytearray()
    try:
        writer.write(data)
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(3):
                while not is_whole(bytes(received)):
                    more = await reader.read(65_536)
                    if not more:
                        break
                    received += more
    finally:
        writer.transport.abort()
    return bytes(received)


def parts(received: bytes) -> tuple[int, dict[bytes, bytes], bytes] | None:
    """Status, headers and body of the first final answer."""
    while found := REPLY.match(received):
        body = received[found.end() :]
        if found[1] != b"100":
            lines = (line.partition(b":") for line in found[2].split(b"\r\n"))
            return int(found[1]), {name.lower(): value.strip() for name, _, value in lines}, body
        received = body
    return None


def is_whole(received: bytes) -> bool:
    found = parts(received)
    if found is None:
        return False
    _, headers, body = found
    if b"content-length" in headers:
        return len(body) >= int(headers[b"content-length"])
    return b"transfer-encoding" not in headers or body.endswith(b"0\r\n\r\n")


def fault(received: bytes) -> str | None:
    """What is wrong with an answer; no answer and a closed line are right."""
    found = parts(received)
    if found is None:
        return f"answered {received[:80]!r}" if received else None
    status, headers, body = found
    if status >= 500 and status != 503:
        return f"status {status}"
    if status < 400 or b"content-length" not in headers:
        return None
    if b"x-request-id" not in headers:
        return "no request id"
    if body[: int(headers[b"content-length"])] == b"":
        return None  # a reply to HEAD
    error = json.loads(body[: int(headers[b"content-length"])])
    error = (
        error if "type" not in error else {"error": {"code": None, "param": None, **error["error"]}}
    )
    if isinstance(error["error"], str):
        return None if error["error"] else "no words"
    is_shaped = set(error) == {"error"} and set(error["error"]) == {
        "message",
        "type",
        "param",
        "code",
    }
    return None if is_shaped and error["error"]["message"] else f"shape of {body[:200]!r}"


async def send(port: int, corpus: Sequence[tuple[str, bytes, bool]]) -> dict[str, str]:
    """Send all of them; return what is wrong with the answers, by name."""
    room, faults = asyncio.Semaphore(AT_ONCE), {}

    async def one(name: str, data: bytes) -> None:
        async with room:
            wrong = fault(await answer_to(port, data))
        if wrong is not None:
            faults[name] = wrong

    async with asyncio.TaskGroup() as group:
        for name, data, _ in corpus:
            group.create_task(one(name, data))
    return faults


@pytest.mark.slow
def test_no_malformed_request_is_a_500_and_the_next_good_one_is_served(
    make_bench: Any, serve: Any
) -> None:
    bench = make_bench(limits=HttpLimits(header_ms=400, body_ms=400))
    paths = [
        path
        for verbs, path, _ in routes(bench.head)
        if "POST" in verbs
        and "{" not in path
        and path.startswith(("/v1", "/tokenize", "/detokenize", "/api"))
    ]
    faults: dict[str, str] = {}
    with serve(bench) as live:
        host = b"127.0.0.1:%d" % live.port
        corpus = list(requests(host, paths))
        for start in range(0, len(corpus), 250):
            faults |= asyncio.run(send(live.port, corpus[start : start + 250]))
            good = httpx.post(
                f"{live.url}/v1/chat/completions", json=chat_body(max_tokens=2), trust_env=False
            )
            assert good.status_code == 200
    assert len(corpus) >= 600
    assert not faults
