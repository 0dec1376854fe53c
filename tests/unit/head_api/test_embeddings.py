"""POST /v1/embeddings (OX-1): four forms of input, two encodings, order, counts, refusals; over nodes, through the official client."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from typing import Any

import httpx
import openai
import pytest

from superfluid_core.errors import CapacityError, ErrorCode
from tests.cases.fleet import asking
from tests.unit.head_api.conftest import WINDOW, Bench, LiveServer


def ask(bench: Bench, **members: Any) -> httpx.Response:
    body = {"model": "org/m", "input": "hi", "pooling": "mean", **members}
    return bench.send("POST", "/v1/embeddings", json=body)


def vectors_of(response: httpx.Response) -> list[list[float]]:
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["object"] == "list"
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    assert {entry["object"] for entry in answer["data"]} == {"embedding"}
    return [entry["embedding"] for entry in answer["data"]]


def test_every_form_of_input_gives_flat_vectors_of_length_one_in_order(bench: Bench) -> None:
    (text,) = vectors_of(ask(bench, input="hi"))
    (ids,) = vectors_of(ask(bench, input=[104, 105]))
    several = vectors_of(ask(bench, input=["ho", "hi", "hi"]))
    listed = vectors_of(ask(bench, input=[[104, 111], [104, 105]]))
    assert text == ids == several[1] == several[2] == listed[1]
    assert several[0] == listed[0] != text
    assert abs(math.hypot(*text) - 1.0) < 1e-6
    assert vectors_of(ask(bench, pooling="last")) != [text]
    answer = ask(bench, input=["abc", "de"]).json()
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert answer["model"] == "org/m"


def test_both_encodings_hold_the_same_values(bench: Bench) -> None:
    (floats,) = vectors_of(ask(bench))
    (packed,) = vectors_of(ask(bench, encoding_format="base64"))
    data = base64.b64decode(str(packed))
    assert list(struct.unpack(f"<{len(data) // 4}f", data)) == floats


def test_the_end_is_kept_of_a_text_that_is_to_be_cut(bench: Bench) -> None:
    long = "x" * WINDOW + "hi"
    ids = list(long.encode())
    assert ask(bench, input=ids).status_code == 400
    assert vectors_of(ask(bench, input=ids, truncate_prompt_tokens=2)) == vectors_of(ask(bench))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": [[1], []]}, "input[1]"),
    ({"input": ["a", 1]}, "input"),
    ({"input": {"a": 1}}, "input"),
    ({"input": [[True]]}, "input[0]"),
    ({"input": ["a"] * 2_049}, "input"),
    ({"input": [[1], [10_000]]}, "input[1]"),
    ({"input": [[1], [1] * (WINDOW + 1)]}, "input[1]"),
    ({"input": "x" * 50_000}, "input"),
    ({"encoding_format": "md5"}, "encoding_format"),
    ({"dimensions": 8}, "dimensions"),
    ({"dimensions": 0}, "dimensions"),
    ({"pooling": "max"}, "pooling"),
    ({"pooling": None}, "model"),
]


@pytest.mark.parametrize(("members", "param"), REFUSED)
def test_what_cannot_be_embedded_is_refused_by_name(
    bench: Bench, members: dict[str, Any], param: str
) -> None:
    response = ask(bench, **members)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text
    assert not bench.fleet.embeds


def test_an_unknown_model_is_not_found_and_a_failure_keeps_its_code(bench: Bench) -> None:
    for name in ("nope", "ORG/M", " org/m", ""):
        unknown = ask(bench, model=name)
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
    busy = CapacityError("busy", code=ErrorCode.OVERLOADED, retry_after_ms=2_000)
    bench.fleet.say("x", error_first=busy)
    response = ask(bench, input=["a", "b", "c"])
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    assert bench.head.inflight.count == 0
    bench.head.inflight.drain()
    assert ask(bench).json()["error"]["code"] == "draining"


def test_the_operator_may_say_how_states_are_pooled(make_bench: Any) -> None:
    bench = make_bench(embedding_pooling="last")
    assert vectors_of(ask(bench, pooling=None)) == vectors_of(ask(bench, pooling="last"))
    assert bench.fleet.embeds[0].pooling == "last"


def test_ollamas_routes_give_the_same_vectors(bench: Bench) -> None:
    expected = vectors_of(ask(bench, input=["hi", "ho"]))
    body = {"model": "org/m:latest", "input": ["hi", "ho"], "pooling": "mean"}
    answer = bench.send("POST", "/api/embed", json=body).json()
    assert answer["embeddings"] == expected
    assert (answer["model"], answer["prompt_eval_count"]) == ("org/m", 4)
    old = {"model": "org/m", "prompt": "hi", "pooling": "mean"}
    assert bench.send("POST", "/api/embeddings", json=old).json() == {"embedding": expected[0]}
    refused = bench.send("POST", "/api/embed", json={"model": "org/m", "input": "hi"})
    assert refused.status_code == 400
    assert list(refused.json()) == ["error"]
    assert bench.send("POST", "/api/embed", json={**body, "model": "nope"}).status_code == 404


def test_the_official_client_reads_vectors_in_the_encoding_that_it_asks_for(
    live: LiveServer,
) -> None:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="k", max_retries=0) as client:
        options: Any = {"model": "org/m", "input": ["hi", "ho"], "extra_body": {"pooling": "mean"}}
        packed = client.embeddings.create(**options)
        floats = client.embeddings.create(**options, encoding_format="float")
        assert [entry.embedding for entry in packed.data] == [
            entry.embedding for entry in floats.data
        ]
        assert isinstance(packed.data[0].embedding[0], float)
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="org/m", input="hi")


def test_texts_are_embedded_on_nodes_while_they_generate() -> None:
    """Real nodes, links and loops; the engine is simulated. Chats go on, each vector is its text's own."""

    async def run() -> None:
        async with asking() as asked:
            texts = [f"text {n}" for n in range(30)]
            members = {"input": texts, "pooling": "mean"}
            chat, first, second = await asyncio.gather(
                asked.chat(max_tokens=20),
                asked.post("/v1/embeddings", **members),
                asked.post("/v1/embeddings", **members),
            )
            assert chat.status_code == 200
            assert vectors_of(first) == vectors_of(second)
            assert len({tuple(vector) for vector in vectors_of(first)}) == 30
            long = await asked.post("/v1/embeddings", input="x" * 2_000, pooling="mean")
            assert len(vectors_of(long)[0]) == 64
            asked.nodes[0].node.agent.drain(60_000)
            refused = await asked.post("/v1/embeddings", **members)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] in ("draining", "no_worker")

    asyncio.run(run())
