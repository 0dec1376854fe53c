"""Chat completions over a scripted fleet: both modes agree in text, usage and finish; O-01..O-06, O-16, O-19, O-29."""

from __future__ import annotations

import json
from typing import Any

import pytest

from superfluid_core.errors import CapacityError, ErrorCode, GenerationError, InvalidRequestError

EOS = 256
SEPARATOR = 257


def events(response: Any) -> list[Any]:
    """The data of each event, [DONE] as a string; checks the framing."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    found: list[Any] = []
    for frame in response.content.split(b"\n\n")[:-1]:
        assert frame.isascii()
        if frame == b": ping":
            continue
        assert frame.startswith(b"data: ")
        assert b"\n" not in frame
        data = frame[6:].decode()
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def both(bench: Any, **members: Any) -> tuple[dict[str, Any], list[Any]]:
    whole = bench.chat(**members)
    assert whole.status_code == 200, whole.text
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = bench.chat(**{**members, **options})
    assert streamed.status_code == 200, streamed.text
    chunks = events(streamed)
    assert chunks[-1] == "[DONE]"
    answer = whole.json()
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"] == answer["usage"]
    for choice in answer["choices"]:
        mine = [
            c for chunk in chunks[:-2] for c in chunk["choices"] if c["index"] == choice["index"]
        ]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(c["delta"].get("content", "") for c in mine)
        assert text == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"]:
            entries = [e for c in mine if c["logprobs"] for e in c["logprobs"]["content"]]
            assert entries == choice["logprobs"]["content"]
    assert all(chunk["usage"] is None for chunk in chunks[:-2])
    assert len({(c["id"], c["created"], c["model"]) for c in chunks[:-1]}) == 1
    return answer, chunks


def content(answer: dict[str, Any], choice: int = 0) -> str:
    return str(answer["choices"][choice]["message"]["content"])


def test_a_plain_answer_has_the_documented_shape(bench: Any) -> None:
    answer, _ = both(bench)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "org/m"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt = len(b"user:hi") + 1
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "total_tokens": prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_o01_an_emoji_cut_over_tokens_is_one_delta(bench: Any) -> None:
    bench.fleet.say("ok ", b"\xf0\x9f", b"\x98", b"\x80", "!")
    answer, chunks = both(bench)
    assert content(answer) == "ok 😀!"
    deltas = [c["choices"][0]["delta"].get("content") for c in chunks[:-2]]
    assert deltas == ["", "ok ", "😀", "!", None]


def test_o02_a_stop_string_stays_inside_and_usage_ends_at_its_last_token(bench: Any) -> None:
    bench.fleet.say("ABC", "DE", "FG", "HI", "J", "K")
    answer, _ = both(bench, stop=["DEFGHIJ"])
    assert content(answer) == "ABC"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == "DEFGHIJ"
    assert answer["usage"]["completion_tokens"] == 5
    assert bench.fleet.stops == [5, 5]


@pytest.mark.parametrize(("members", "finish"), [({}, "stop"), ({"max_tokens": 3}, "length")])
def test_o03_held_text_is_delivered_when_the_generation_ends(
    bench: Any, members: dict[str, Any], finish: str
) -> None:
    bench.fleet.say("UNO ", "DUE ", "TRE")
    answer, _ = both(bench, stop=["TRE\nAAAA"], **members)
    assert content(answer) == "UNO DUE TRE"
    assert answer["choices"][0]["finish_reason"] == finish


def test_o04_a_stop_that_spells_a_special_token_works(bench: Any) -> None:
    bench.fleet.say("Fine.", SEPARATOR, "\n", "more", " and more")
    answer, _ = both(bench, stop=["<|sep|>\n", "</s>"])
    assert content(answer) == "Fine."
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_o06_usage_counts_tokens_and_is_the_same_in_both_modes(bench: Any) -> None:
    bench.fleet.say("a", "b", b"\xf0\x9f", b"\x98\x80", "c", "ST", "d")
    answer, _ = both(bench, stop=["STOP"])
    assert content(answer) == "ab😀cSTd"
    assert answer["usage"]["completion_tokens"] == 8
    answer, _ = both(bench, stop=["STOP"], ignore_eos=True, max_tokens=7)
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["choices"][0]["finish_reason"] == "length"


def test_ignored_ends_of_text_are_not_rendered_and_do_not_end(bench: Any) -> None:
    bench.fleet.say("a")
    answer, _ = both(bench, ignore_eos=True, max_tokens=5)
    assert content(answer) == "aaa"
    answer, _ = both(bench, ignore_eos=True, max_tokens=4, skip_special_tokens=False)
    assert content(answer) == "a<|im_end|>a<|im_end|>"


def test_a_stop_id_of_the_request_ends_and_is_named(bench: Any) -> None:
    bench.fleet.say("a", "b", "c")
    token = bench.tokenizer.piece("b")
    answer, _ = both(bench, stop_token_ids=[token])
    assert content(answer) == "a"
    assert answer["choices"][0]["stop_reason"] == token
    assert answer["usage"]["completion_tokens"] == 2
    answer, _ = both(bench, stop=["c"], include_stop_str_in_output=True)
    assert content(answer) == "abc"


def test_every_sampling_member_reaches_the_fleet(bench: Any) -> None:
    sent = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": -1, "presence_penalty": 1,
        "frequency_penalty": -1, "repetition_penalty": 1.2, "logit_bias": {"7": -100, "3": 5},
        "logprobs": True, "top_logprobs": 2, "min_tokens": 2, "max_completion_tokens": 9, "max_tokens": 5,
        "stop_token_ids": [9, 8], "allowed_token_ids": [5, 4], "bad_words": ["no"], "ignore_eos": True,
        "cache_salt": "s",
    }  # fmt: skip
    assert bench.chat(**sent).status_code == 200
    request = bench.fleet.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.5,
        0.9,
        40,
        0.1,
    )
    assert sampling.seed == 2**64 - 1
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert sampling.repetition_penalty == 1.2
    assert sampling.logit_bias == ((3, 5.0), (7, -100.0))
    assert sampling.allowed_token_ids == (4, 5)
    assert sampling.bad_words == (tuple(b"no"), tuple(b" no"))
    assert sampling.logprobs == 2
    assert (request.min_output, request.max_output) == (2, 9)
    assert request.stop_ids == (8, 9)
    assert request.ignore_eos
    assert request.tenant == "anonymous"
    assert len(request.cache_salt) == 16
    bench.chat()
    assert bench.fleet.requests[-1].cache_salt != request.cache_salt
    assert bench.fleet.requests[-1].sampling.seed != bench.fleet.requests[-2].sampling.seed


def test_a_tiny_temperature_is_greedy_and_an_unset_budget_is_the_rest_of_the_window(
    bench: Any,
) -> None:
    bench.chat(temperature=1e-9)
    assert bench.fleet.requests[-1].sampling.is_greedy
    assert bench.fleet.requests[-1].max_output == 4_096 - 8


def test_n_choices_are_complete_and_their_roles_come_in_ascending_order(bench: Any) -> None:
    bench.fleet.say("x", "y", step_s=0.001)
    answer, chunks = both(bench, n=5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4]
    assert [chunk["choices"][0]["index"] for chunk in chunks[:5]] == [0, 1, 2, 3, 4]
    assert answer["usage"]["completion_tokens"] == 15
    assert answer["usage"]["prompt_tokens"] == 8
    assert [request.choice for request in bench.fleet.requests[:5]] == [0, 1, 2, 3, 4]
    assert len({request.sampling.seed for request in bench.fleet.requests[:5]}) == 1


def test_o19_logprobs_ride_with_their_text_in_the_documented_shape(bench: Any) -> None:
    bench.fleet.say("ok", b"\xf0\x9f", b"\x98\x80")
    answer, chunks = both(bench, logprobs=True)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["ok", "\\xf0\\x9f", "\\x98\\x80"]
    assert all(entry["top_logprobs"] == [] for entry in entries)
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == content(answer)
    sizes = [len((c["choices"][0]["logprobs"] or {"content": []})["content"]) for c in chunks[:-2]]
    assert sizes == [0, 1, 2, 0]
    answer, _ = both(bench, logprobs=True, top_logprobs=3)
    best = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [entry["logprob"] for entry in best] == [-0.5, -1.0, -9999.0]


def test_continuous_usage_is_cumulative_and_monotone(bench: Any) -> None:
    bench.fleet.say("a", "b", "c")
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(bench.chat(stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert counts == [0, 1, 2, 3, 4, 4]


def test_without_include_usage_no_chunk_speaks_of_usage(bench: Any) -> None:
    chunks = events(bench.chat(stream=True))
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_continue_final_message_ends_the_prompt_inside_the_last_message(bench: Any) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer"}]
    assert bench.chat(messages=turns, continue_final_message=True).status_code == 200
    assert bytes(bench.fleet.requests[-1].prompt[-10:]) == b"The answer"


@pytest.mark.parametrize("stream", [False, True])
def test_o16_a_prompt_that_is_too_long_is_a_400_in_both_modes(bench: Any, stream: bool) -> None:
    for size in (4_096 + 50, 2_000_000):
        messages = [{"role": "user", "content": "x" * size}]
        response = bench.chat(messages=messages, stream=stream)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "messages"
        assert "maximum context length is 4096 tokens" in error["message"]
    response = bench.chat(max_tokens=4_096, stream=stream)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "8 tokens" in response.json()["error"]["message"]
    assert "4096 tokens of output" in response.json()["error"]["message"]
    assert not bench.fleet.requests


@pytest.mark.parametrize("name", ["nope", "Org/m", " org/m", "", "m"])
def test_o29_an_unknown_model_is_a_404(bench: Any, name: str) -> None:
    response = bench.chat(model=name)
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_a_missing_model_is_the_only_one_and_is_an_error_when_there_are_two(bench: Any) -> None:
    assert bench.chat(model=None).json()["model"] == "org/m"
    other = type(bench.fleet.served[0])(**{**vars(bench.fleet.served[0]), "name": "other"})
    bench.fleet.served.append(other)
    response = bench.chat(model=None)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"
    assert bench.chat(model="other").json()["model"] == "other"


def test_a_model_whose_tokenizer_is_not_ours_is_not_served_with_the_wrong_one(bench: Any) -> None:
    bench.fleet.served[0].text = "another-text"
    response = bench.chat()
    assert response.status_code == 503
    assert "retry-after" in response.headers


def test_the_templates_own_words_reach_the_caller(bench: Any) -> None:
    response = bench.chat(messages=[{"role": "user", "content": "refuse me"}])
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "template_error")
    assert error["message"] == "no such roles"


FAILURES = [
    (CapacityError("full", code=ErrorCode.QUEUE_FULL, retry_after_ms=2_500), 429, "3"),
    (CapacityError("none", code=ErrorCode.NO_WORKER), 503, "1"),
    (CapacityError("busy", retry_after_ms=900_000), 503, "120"),
    (GenerationError("node 10.0.0.1 was lost"), 503, "1"),
    (GenerationError("x", code=ErrorCode.DEADLINE_EXCEEDED), 408, None),
    (GenerationError("x", code=ErrorCode.REQUEST_QUARANTINED, retryable=False), 500, None),
    (InvalidRequestError("bad", code=ErrorCode.INVALID_GRAMMAR), 400, None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("failure", "status", "retry"), FAILURES)
def test_a_failure_before_the_first_byte_is_a_status_in_both_modes(
    bench: Any, failure: Any, status: int, retry: str | None, stream: bool
) -> None:
    bench.fleet.say("a", error_first=failure)
    response = bench.chat(stream=stream, n=2)
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry
    assert response.json()["error"]["code"] == failure.code.value
    assert "10.0.0.1" not in response.text
    if status == 500:
        assert response.headers["x-should-retry"] == "false"


def test_a_failure_after_the_first_byte_is_an_event_and_no_done(bench: Any) -> None:
    bench.fleet.say("a", "b", end=False, error_last=GenerationError("lost"))
    found = events(bench.chat(stream=True))
    assert found[-1]["error"]["code"] == "node_lost"
    assert "[DONE]" not in found
    assert all(c["finish_reason"] is None for chunk in found[:-1] for c in chunk["choices"])
    assert bench.chat().status_code == 503


def test_silence_is_filled_with_comments(make_bench: Any) -> None:
    from superfluid_core.limits import HttpLimits

    bench = make_bench(limits=HttpLimits(silence_ms=30))
    bench.fleet.say("a", "b", wait_s=0.1, step_s=0.1)
    response = bench.chat(stream=True)
    assert response.status_code == 200
    assert response.content.startswith(b": ping\n\n")
    assert response.content.count(b": ping\n\n") >= 4
    assert events(response)[-1] == "[DONE]"


def test_draining_refuses_new_generations_and_readiness_but_not_liveness(bench: Any) -> None:
    assert bench.send("GET", "/readyz").status_code == 200
    bench.head.inflight.drain()
    response = bench.chat()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "draining"
    assert response.headers["connection"] == "close"
    assert bench.send("GET", "/readyz").status_code == 503
    assert bench.send("GET", "/livez").status_code == 200
