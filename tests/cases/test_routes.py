"""Public bug reports that concern every POST route alike: broken bodies (O-22) and models that nobody serves (O-29)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from superfluid_head.app import routes
from tests.unit.head_api.conftest import Bench

# What each route that answers from a model needs beside `model`.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/messages": {"max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}]},
    "/api/generate": {"prompt": "hi"},
    "/api/embed": {"input": "hi"},
    "/api/embeddings": {"prompt": "hi"},
    "/api/show": {},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
    "/v1/prefixes": {"prompt": "hi"},
}
# Routes that act on something named in the path, or tell that nothing is stored; a body is no matter for them or optional.
OTHERS = (
    *("/v1/responses/{response}/cancel", "/v1/sessions/{session}/qos"),
    *("/v1/fleet/nodes/{node:path}/drain", "/v1/fleet/nodes/{node:path}/undrain"),
)
BROKEN = (
    *(b'{"model":', b"", b"[]", b"null", b'"x"', b'{"x": "\xff"}', b'{"model": NaN}', b"\xef\xbb\xbf{"),
    b'{"messages":"hi","prompt":{},"input":{},"tokens":"hi","model":[]}',
    b'{"messages":[{"role":"user","content":"emoji \\ud83d"}],"prompt":"\\ud83d","input":"\\ud83d","model":"\\ud83d"}',
    b'{"a":' * 200 + b"1" + b"}" * 200,
)  # fmt: skip


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.workers.close()


def posts(bench: Bench) -> set[str]:
    return {path for verbs, path, _ in routes(bench.head) if "POST" in verbs}


def send(bench: Bench, path: str, data: bytes, **headers: str) -> Any:
    sent = {"content-type": "application/json", **headers}
    return bench.send("POST", path, content=data, headers=sent)


def told(path: str, response: Any) -> str:
    """The words of an error; checks that it has the shape of its dialect."""
    assert response.headers["content-type"].startswith("application/json"), response.text
    body = response.json()
    if path.startswith("/api/"):
        assert list(body) == ["error"]
        return str(body["error"])
    error = body["error"]
    if path.startswith("/v1/messages"):
        assert body["type"] == "error"
        assert {"type", "message"} <= set(error)
    else:
        assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


def test_every_post_route_is_looked_at(bench: Bench) -> None:
    assert posts(bench) == {*BODIES, *OTHERS}


@pytest.mark.parametrize("path", BODIES)
def test_o22_a_broken_body_is_a_400_in_the_words_of_its_route(bench: Bench, path: str) -> None:
    for data in BROKEN:
        for stream in (b"", b',"stream":true}'):
            sent = data[:-1] + stream if stream and data.endswith(b"}") else data
            response = send(bench, path, sent)
            assert response.status_code == 400, (sent[:80], response.text)
            assert told(path, response)
    squeezed = send(bench, path, b"x", **{"content-encoding": "gzip"})
    assert squeezed.status_code == 415
    assert told(path, squeezed)


@pytest.mark.parametrize("path", OTHERS)
def test_o22_no_body_breaks_a_route_that_acts_on_something_named(bench: Bench, path: str) -> None:
    named = path.replace("{node:path}", "n1").replace("{session}", "x").replace("{response}", "x")
    for data in BROKEN:
        response = send(bench, named, data)
        assert response.status_code < 500, (data[:80], response.text)
        if response.status_code >= 400:
            assert told(path, response)
    bench.fleet.drains.clear()


@pytest.mark.parametrize("path", BODIES)
def test_o22_a_pair_of_surrogates_and_a_byte_order_mark_are_fine(bench: Bench, path: str) -> None:
    body = {"model": "org/m", **BODIES[path]}
    plain = send(bench, path, json.dumps(body).encode())
    text = json.dumps(body).replace('"hi"', '"\\ud83d\\ude00"').encode()
    for data in (text, b"\xef\xbb\xbf" + text):
        assert send(bench, path, data).status_code == plain.status_code
    assert plain.status_code == (400 if "embed" in path else 200), plain.text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["nope", "ORG/M", " org/m", "gpt-3.5-turbo"])
def test_o29_nobody_answers_for_a_model_that_is_not_served(
    bench: Bench, path: str, name: str
) -> None:
    bench.fleet.requests.clear()
    for stream in (False, True):
        response = bench.send("POST", path, json={**BODIES[path], "model": name, "stream": stream})
        assert response.status_code == 404, response.text
        assert name.strip() in told(path, response)
    assert not bench.fleet.requests


@pytest.mark.parametrize("path", BODIES)
def test_o29_the_only_model_may_be_left_out_or_is_asked_for(bench: Bench, path: str) -> None:
    for body in (
        {**BODIES[path], "stream": False},
        {**BODIES[path], "model": None, "stream": False},
    ):
        response = bench.send("POST", path, json=body)
        if response.status_code == 200 and "model" in response.json():
            assert response.json()["model"] == "org/m"
        else:
            assert response.status_code in (200, 400), response.text
    empty = bench.send("POST", path, json={**BODIES[path], "model": ""})
    assert empty.status_code in (400, 404), empty.text
