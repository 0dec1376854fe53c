"""Reported cases on every generating and embedding route at once: O-15, O-16, O-20, in each dialect's shape; and the key."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from superfluid_head.access.keys import KeyRing, Principal
from superfluid_head.text.dialects.detect import DialectChoice
from tests.cases.fleet import asking
from tests.unit.head_api.conftest import WINDOW, Bench, LiveServer

WORDS = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": WORDS},
    "/v1/completions": {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi", "pooling": "mean"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": WORDS, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": WORDS},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
    "/api/chat": {"messages": WORDS},
    "/api/generate": {"prompt": "hi"},
    "/api/embed": {"input": "hi", "pooling": "mean"},
    "/api/embeddings": {"prompt": "hi", "pooling": "mean"},
    "/api/show": {},
}
STREAMED = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate")


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.workers.close()


def words_of(path: str, response: httpx.Response) -> str:
    """The words of an error, which has its route's shape and nothing else."""
    assert response.headers["content-type"] == "application/json"
    told = response.json()
    if path.startswith("/api/"):
        assert list(told) == ["error"]
        return str(told["error"])
    if path.startswith("/v1/messages"):
        assert (set(told), told["type"]) == ({"type", "error", "request_id"}, "error")
        assert set(told["error"]) == {"type", "message"}
    else:
        assert set(told) == {"error"}
        assert set(told["error"]) == {"message", "type", "param", "code"}
    return str(told["error"]["message"])


def test_every_route_wants_the_key_and_says_so_in_its_shape() -> None:
    bench = Bench(keys=KeyRing([("k" * 16, Principal("one"))]))
    with contextlib.closing(bench.workers):
        for path, members in ROUTES.items():
            body = {"model": "org/m", **members}
            refused = bench.send("POST", path, json=body)
            assert refused.status_code == 401
            assert words_of(path, refused)
            for headers in ({"x-api-key": "k" * 16}, {"authorization": "bearer  " + "k" * 16}):
                answered = bench.send("POST", path, json=body, headers=headers)
                assert answered.status_code == 200, (path, answered.text)


NULLS: dict[str, tuple[str, ...]] = {
    "/v1/responses": (
        *("instructions", "max_output_tokens", "max_tool_calls", "temperature", "top_p", "top_logprobs", "tools"),
        *("tool_choice", "parallel_tool_calls", "text", "reasoning", "include", "truncation", "metadata", "stream"),
        *("stream_options", "store", "user", "previous_response_id", "conversation", "background", "prompt"),
    ),
    "/v1/messages": (
        *("system", "tools", "tool_choice", "thinking", "output_config", "output_format", "stop_sequences"),
        *("temperature", "top_p", "top_k", "stream", "metadata", "mcp_servers", "container"),
    ),
    "/api/chat": ("tools", "format", "options", "think", "keep_alive", "logprobs", "top_logprobs"),
    "/api/generate": ("suffix", "system", "raw", "format", "options", "think", "images", "context", "template"),
    "/v1/embeddings": ("encoding_format", "dimensions", "user", "truncate_prompt_tokens"),
}  # fmt: skip


@pytest.mark.parametrize("path", NULLS)
def test_o15_null_is_absent_for_every_optional_member(bench: Bench, path: str) -> None:
    body = {"model": "org/m", **ROUTES[path], **dict.fromkeys(NULLS[path])}
    response = bench.send("POST", path, json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", STREAMED)
def test_what_is_ours_may_be_said_in_every_dialect_and_a_template_in_none(
    bench: Bench, path: str
) -> None:
    body = {"model": "org/m", **ROUTES[path], "stream": False}
    ours = {"seed": 7, "cache_salt": "a", "chat_template_kwargs": {"x": 1}}
    assert bench.send("POST", path, json={**body, **ours}).status_code == 200
    salted = bench.fleet.requests[-1]
    assert salted.sampling.seed == 7
    assert bench.send("POST", path, json=body).status_code == 200
    assert bench.fleet.requests[-1].cache_salt != salted.cache_salt
    wrongs: list[dict[str, Any]] = [
        {"seed": "x"},
        {"cache_salt": ""},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": "x"},
        {"chat_template": "{{ messages }}"},
    ]
    for wrong in wrongs:
        refused = bench.send("POST", path, json={**body, **wrong})
        assert refused.status_code == 400, (wrong, refused.text)
        assert next(iter(wrong)) in words_of(path, refused)


@pytest.mark.parametrize("path", STREAMED)
def test_o16_a_prompt_that_is_too_long_is_a_plain_400_in_every_dialect(
    bench: Bench, path: str
) -> None:
    long = "x" * (WINDOW + 50)
    name = next(name for name in ("messages", "input", "prompt") if name in ROUTES[path])
    value: Any = [{"role": "user", "content": long}] if name == "messages" else long
    verdicts = set()
    for stream in (False, True):
        body = {"model": "org/m", **ROUTES[path], name: value, "stream": stream}
        response = bench.send("POST", path, json=body)
        assert response.status_code == 400
        verdicts.add(words_of(path, response))
    assert len(verdicts) == 1
    assert f"maximum context length is {WINDOW} tokens" in verdicts.pop()
    assert not bench.fleet.requests


def test_o20_a_reader_that_leaves_ends_its_generation_and_sessions_show_it_until_then() -> None:
    bench = Bench()
    bench.fleet.say("Hello", " world", end=False, step_s=0.02)

    async def run(url: str, path: str) -> None:
        async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False) as client:
            body = {"model": "org/m", **ROUTES[path], "stream": True}
            async with client.stream("POST", path, json=body) as response:
                assert response.status_code == 200
                lines = (
                    response.aiter_lines()
                )  # dropped, it would close the connection at a moment of its own
                for _ in range(8):
                    await anext(lines)
                (session,) = (await client.get("/v1/sessions")).json()["data"]
                assert session["model"] == "org/m"
                assert session["stream"] is True
            for _ in range(100):
                if not bench.fleet.running:
                    return
                await asyncio.sleep(0.02)
            pytest.fail(f"{path}: still running")

    with contextlib.closing(bench.workers), LiveServer(bench) as server:
        for path in STREAMED:
            asyncio.run(run(server.url, path))
    assert bench.head.inflight.count == 0


def test_calls_that_are_required_are_enforced_in_every_dialect() -> None:
    """An engine that draws noise, real nodes, one grammar: its call is what each dialect tells."""
    schema = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    flat = {"type": "function", "name": "f", "parameters": schema}
    tool = {"name": "f", "input_schema": schema}
    asks: list[tuple[str, dict[str, Any]]] = [
        ("/v1/messages", {"messages": WORDS, "max_tokens": 300, "tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}),
        ("/v1/responses", {"input": "hi", "tools": [flat], "tool_choice": "required", "parallel_tool_calls": False}),
        ("/v1/messages", {"messages": WORDS, "max_tokens": 300, "output_format": {"type": "json_schema", "schema": schema}}),
        ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_schema", "name": "s", "schema": schema}}}),
        ("/api/chat", {"messages": WORDS, "stream": False, "format": schema}),
        ("/api/generate", {"prompt": "hi", "stream": False, "format": schema, "raw": True}),
    ]  # fmt: skip

    async def run() -> list[Any]:
        async with asking(head={"dialects": DialectChoice("hermes")}) as asked:
            answers = [await asked.post(path, **members) for path, members in asks]
            assert [answer.status_code for answer in answers] == [200] * len(asks)
            return [answer.json() for answer in answers]

    called, responded, said, written, chatted, generated = asyncio.run(run())
    assert called["stop_reason"] == "tool_use"
    assert called["content"]
    values = [block["input"] for block in called["content"]]
    values += [json.loads(item["arguments"]) for item in responded["output"]]
    texts = (said["content"][0]["text"], written["output"][0]["content"][0]["text"])
    values += [json.loads(text) for text in texts]
    values += [json.loads(chatted["message"]["content"]), json.loads(generated["response"])]
    assert len(values) >= len(asks)
    assert all(list(value) == ["on"] and type(value["on"]) is bool for value in values)
