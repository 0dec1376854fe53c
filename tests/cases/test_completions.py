"""Public bug reports as they concern /v1/completions, sampling members and tokens; each named by its case."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases.fleet import asking
from tests.unit.head_api.conftest import EOS, SEPARATOR, Bench

POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.workers.close()


def whole(bench: Bench, **members: Any) -> dict[str, Any]:
    response = bench.complete(**members)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def streamed(bench: Bench, **members: Any) -> tuple[str, str, dict[str, Any]]:
    """Text, finish and usage of the one choice of a stream."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = bench.complete(**members, **options)
    assert response.status_code == 200, response.text
    lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    finishes = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(finishes) == 1
    assert all(choice["text"] or choice["finish_reason"] for choice in choices)
    return "".join(choice["text"] for choice in choices), finishes[0], chunks[-1]["usage"]


def agree(bench: Bench, **members: Any) -> tuple[str, str, dict[str, Any]]:
    """Ask in both modes, which say the same."""
    reply = whole(bench, **members)
    choice = reply["choices"][0]
    found = (choice["text"], choice["finish_reason"], reply["usage"])
    assert streamed(bench, **members) == found
    return found


def refusal(bench: Bench, **members: Any) -> dict[str, Any]:
    response = bench.complete(**members)
    assert response.status_code == 400, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


def test_o01_an_emoji_over_several_tokens_is_one_character(bench: Bench) -> None:
    bench.fleet.say("ok ", b"\xf0\x9f", b"\x98", b"\x80", "!")
    assert agree(bench)[0] == "ok 😀!"


def test_o02_nothing_of_a_stop_string_is_sent_and_usage_ends_with_it(bench: Bench) -> None:
    bench.fleet.say("ABC", "DE", "FG", "HI", "J", "K")
    text, finish, usage = agree(bench, stop=["DEFGHIJ"])
    assert (text, finish, usage["completion_tokens"]) == ("ABC", "stop", 5)


def test_o03_text_that_was_held_comes_out_when_generation_ends(bench: Bench) -> None:
    bench.fleet.say("UNO ", "DUE ", "TRE")
    assert agree(bench, stop=["TRE\nAAAA"])[:2] == ("UNO DUE TRE", "stop")
    assert agree(bench, stop=["TRE\nAAAA"], max_tokens=3)[:2] == ("UNO DUE TRE", "length")


def test_o04_a_stop_may_spell_a_special_token_that_is_not_shown(bench: Bench) -> None:
    bench.fleet.say("Fine.", SEPARATOR, "\n", "more")
    assert agree(bench, stop=["<|sep|>\n", "</s>"])[:2] == ("Fine.", "stop")


def test_o06_usage_counts_tokens_and_is_the_same_in_both_modes(bench: Bench) -> None:
    bench.fleet.say("a", "b", b"\xf0\x9f", b"\x98\x80", "c", "TR", "d")
    _, finish, usage = agree(bench, stop=["TRE"], max_tokens=20)
    assert (finish, usage["completion_tokens"]) == ("stop", 8)
    _, finish, usage = agree(bench, ignore_eos=True, max_tokens=7)
    assert (finish, usage["completion_tokens"]) == ("length", 7)
    assert usage["total_tokens"] == usage["prompt_tokens"] + 7


def test_o07_a_completion_ends_with_words_of_the_api_only(bench: Bench) -> None:
    bench.fleet.say("x")
    assert agree(bench)[1] == "stop"
    assert agree(bench, max_tokens=1)[1] == "length"


def test_o15_max_tokens_null_is_sixteen(bench: Bench) -> None:
    bench.fleet.say("x", end=False)
    members = {"prompt": "test", "temperature": 0, "max_tokens": None}
    assert whole(bench, **members)["usage"]["completion_tokens"] == 16


def test_o16_a_prompt_that_is_too_long_is_a_400_in_both_modes_and_asks_nobody(
    bench: Bench,
) -> None:
    bench.fleet.requests.clear()
    for prompt in ("x" * 4_146, [120] * 4_146):
        first = refusal(bench, prompt=prompt)
        assert first == refusal(bench, prompt=prompt, stream=True)
        assert first["code"] == "context_length_exceeded"
        assert "4096" in first["message"]
        assert "4146" in first["message"]
    assert not bench.fleet.requests


def test_o17_there_are_always_exactly_n_choices_of_every_prompt(bench: Bench) -> None:
    bench.fleet.say("x", "y")
    for n in (1, 4, 8):
        reply = whole(bench, prompt=["a", "b", "c"], n=n, temperature=1, max_tokens=8)
        assert [choice["index"] for choice in reply["choices"]] == list(range(3 * n))
        assert all(choice["finish_reason"] for choice in reply["choices"])
        assert reply["usage"]["completion_tokens"] == 9 * n


def test_o18_a_seeded_completion_is_the_same_alone_and_beside_others() -> None:
    async def main() -> None:
        async with asking() as asked:
            members = {"seed": 42, "temperature": 0.8, "max_tokens": 16, "ignore_eos": True}
            alone = (await asked.complete(**members, return_token_ids=True)).json()["choices"][0]
            async with asyncio.TaskGroup() as group:
                again = group.create_task(asked.complete(**members, return_token_ids=True))
                batch = group.create_task(asked.complete(["z", "hi"], **members))
                group.create_task(asked.complete("hi", max_tokens=16))
            assert again.result().json()["choices"][0]["token_ids"] == alone["token_ids"]
            assert batch.result().json()["choices"][1]["text"] == alone["text"]

    asyncio.run(main())


def test_o19_legacy_logprobs_name_every_token_and_the_best_beside_it(bench: Bench) -> None:
    bench.fleet.say("ab", "c")
    lists = whole(bench, logprobs=2)["choices"][0]["logprobs"]
    assert lists["tokens"] == ["ab", "c"]
    assert all(len(best) >= 2 for best in lists["top_logprobs"])
    assert "".join(lists["tokens"]) == "abc"


BROKEN = (
    *(b'{"model":', b"", b"[]", b"null", b'"x"', b"\xff", b'{"model": "org/m", "prompt": 1e999}'),
    b'{"model": "org/m", "prompt": "emoji \\ud83d", "tokens": ["\\ud83d"], "messages": "hi"}',
)


@pytest.mark.parametrize("path", POSTS)
def test_o22_a_broken_body_is_a_400_with_the_known_shape(bench: Bench, path: str) -> None:
    for data in BROKEN:
        response = bench.send(
            "POST", path, content=data, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400, (data, response.text)
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    gzip = bench.send("POST", path, content=b"x", headers={"content-encoding": "gzip"})
    assert gzip.status_code == 415
    paired = b'{"model": "org/m", "prompt": "\\ud83d\\ude00"}'
    assert bench.send("POST", "/v1/completions", content=paired).status_code == 200


NUMBERS = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    "frequency_penalty",
)


@pytest.mark.parametrize("name", NUMBERS)
def test_o23_numbers_that_are_none_are_refused_and_the_next_request_is_served(
    bench: Bench, name: str
) -> None:
    for value in ("NaN", "Infinity", "-Infinity", "1e999", '"0.5"', "true", "[]", "-3", "101"):
        data = f'{{"model": "org/m", "prompt": "x", "{name}": {value}}}'.encode()
        response = bench.send("POST", "/v1/completions", content=data)
        assert response.status_code == 400, (name, value, response.text)
        assert "NaN" not in response.text
    biased = b'{"model": "org/m", "prompt": "x", "logit_bias": {"5": NaN}}'
    assert bench.send("POST", "/v1/completions", content=biased).status_code == 400
    assert whole(bench, **{name: None})["choices"]


def test_o25_salts_keep_prefixes_apart_and_an_empty_one_is_refused(bench: Bench) -> None:
    bench.fleet.requests.clear()
    for salt in ("t1", "t2", None, "t1"):
        whole(bench, cache_salt=salt)
    salts = [request.cache_salt for request in bench.fleet.requests]
    assert salts[0] == salts[3]
    assert len(set(salts)) == 3
    assert refusal(bench, cache_salt="")["param"] == "cache_salt"


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("name", ["nope", "ORG/M", " org/m", ""])
def test_o29_an_unknown_model_is_a_404_on_every_route(bench: Bench, path: str, name: str) -> None:
    body = {"model": name, "prompt": "x", "tokens": [1]}
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": "x"}]
    response = bench.send("POST", path, json=body)
    assert response.status_code == 404, response.text
    assert response.json()["error"]["param"] == "model"


def test_o29_the_only_model_may_be_left_out_and_is_named_in_the_reply(bench: Bench) -> None:
    response = bench.send("POST", "/v1/completions", json={"prompt": "x"})
    assert response.json()["model"] == "org/m"


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"logit_bias": {"99999999": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stop_token_ids": [99_999_999]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1_000]}, "allowed_token_ids"),
    ],
)
def test_ox4_ids_outside_the_vocabulary_never_reach_a_node(
    bench: Bench, members: dict[str, Any], param: str
) -> None:
    bench.fleet.requests.clear()
    assert refusal(bench, **members)["param"] == param
    assert not bench.fleet.requests


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"n": 129}, "n"),
        ({"best_of": 129}, "best_of"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": ["x"] * 5_000}, "prompt"),
        ({"prompt": ["x"] * 64, "n": 3}, "prompt"),
        ({"min_tokens": 20, "max_tokens": None}, "min_tokens"),
        ({"min_tokens": 5_000}, "min_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
    ],
)
def test_i1_i2_i3_one_request_cannot_ask_for_a_crowd_or_the_impossible(
    bench: Bench, members: dict[str, Any], param: str
) -> None:
    assert refusal(bench, **members)["param"] == param


def test_best_of_shows_the_answer_whose_tokens_were_likeliest_on_average() -> None:
    async def main() -> None:
        async with asking() as asked:
            members = {"seed": 9, "max_tokens": 6, "ignore_eos": True}
            every = (await asked.complete(n=4, logprobs=0, **members)).json()
            means = [sum(choice["logprobs"]["token_logprobs"]) for choice in every["choices"]]
            ranked = sorted(range(4), key=lambda at: -means[at])
            best = (await asked.complete(n=2, best_of=4, **members)).json()
            shown = [choice["text"] for choice in best["choices"]]
            assert shown == [every["choices"][at]["text"] for at in ranked[:2]]
            assert best["usage"]["completion_tokens"] == 24

    asyncio.run(main())


def test_stop_token_ids_end_a_completion_and_are_its_reason(bench: Bench) -> None:
    bench.fleet.say("a", "b", "c")
    choice = whole(bench, stop_token_ids=[98])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", 98)
    assert whole(bench)["choices"][0]["stop_reason"] is None


# --- tokens


def test_tokenize_speaks_both_dialects_and_detokenize_reads_back(bench: Bench) -> None:
    def post(path: str, **body: Any) -> dict[str, Any]:
        response = bench.send("POST", path, json=body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    for text in ("", "hi", "  leading\n", "é 😀", "\u0000x"):
        ids = list(text.encode())
        assert post("/tokenize", prompt=text)["tokens"] == ids
        assert post("/tokenize", content=text) == {"tokens": ids}
        assert post("/detokenize", tokens=ids) == {"prompt": text, "content": text}
    found = post("/tokenize", prompt="aé", return_token_strs=True)
    assert found == {
        "count": 3,
        "max_model_len": 4_096,
        "tokens": [97, 195, 169],
        "token_strs": ["a", "\\xc3", "\\xa9"],
    }
    pieces = post("/tokenize", content="é", with_pieces=True)["tokens"]
    assert pieces == [{"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    marked = post("/tokenize", content="<|sep|>", parse_special=True)["tokens"]
    assert marked == [SEPARATOR]
    plain = post("/tokenize", content="<|sep|>", parse_special=False)["tokens"]
    assert plain == list(b"<|sep|>")
    assert post("/detokenize", tokens=[97, EOS])["prompt"] == "a<|im_end|>"


def test_the_count_of_messages_is_that_of_usage(bench: Bench) -> None:
    messages = [{"role": "user", "content": "count me"}, {"role": "assistant", "content": "yes"}]
    body = {"messages": messages, "model": "org/m"}
    counted = bench.send("POST", "/tokenize", json=body).json()
    used = bench.send("POST", "/v1/chat/completions", json=body).json()
    assert counted["count"] == used["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "content": "y"}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1_000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_wrong_questions_about_tokens_are_400s_that_name_the_member(
    bench: Bench, path: str, body: dict[str, Any], param: str
) -> None:
    response = bench.send("POST", path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
