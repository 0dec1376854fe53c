"""Everything that a body can get wrong is a 400 of the API's shape, and the next request is served (O-15, O-22, O-23)."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any, ClassVar

import pytest

from superfluid_core.limits import HttpLimits
from superfluid_head.api import body as body_module
from superfluid_head.api.body import (
    CONTAINERS_MAX,
    FEW_MAX,
    LARGE_BYTES_MIN,
    SLICE_BYTES,
    parse_object,
    read_object,
)
from superfluid_head.api.errors import ApiError
from superfluid_head.text.pace import Pace

PATH = body_module.__file__


def error_of(response: Any) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return dict(body["error"])


BROKEN = [
    b'{"model":',
    b"",
    b"  ",
    b"[]",
    b"null",
    b'"x"',
    b'{"messages":"hi"}',
    b'{"messages":[{"role":"user","content":"emoji \\ud83d"}]}',
    b'{"messages":[{"role":"user","content":"\xff"}]}',
    b'{"messages":[{"role":"user","content":"x"}],"x":' + b"[" * 100 + b"]" * 100 + b"}",
    b"[" * 100_000,
    b'{"messages":[{"role":"user","content":"x"}],"seed":' + b"9" * 5_000 + b"}",
]


@pytest.mark.parametrize("body", BROKEN)
def test_a_broken_body_is_a_400_and_the_next_request_is_served(bench: Any, body: bytes) -> None:
    response = bench.raw_chat(body)
    assert response.status_code == 400, response.text
    assert error_of(response)["type"] == "invalid_request_error"
    assert bench.chat().status_code == 200


def test_a_lone_surrogate_is_named_and_a_pair_is_fine(bench: Any) -> None:
    lone = b'{"model":"org/m","messages":[{"role":"user","content":"\\ud83d"}]}'
    assert error_of(bench.raw_chat(lone))["param"] == "messages[0].content"
    pair = lone.replace(b"\\ud83d", b"\\ud83d\\ude00")
    assert bench.raw_chat(pair).status_code == 200


def test_a_byte_order_mark_and_a_nul_are_tolerated(bench: Any) -> None:
    body = json.dumps({"model": "org/m", "messages": [{"role": "user", "content": "a\0b"}]})
    assert bench.raw_chat(b"\xef\xbb\xbf" + body.encode()).status_code == 200
    assert bench.fleet.requests[-1].prompt[:9] == (*tuple(b"user:a\x00b" + b"")[:9], 257)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-encoding": "gzip"}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_media_types_are_judged(bench: Any, headers: dict[str, str], status: int) -> None:
    body = b'{"model":"org/m","messages":[{"role":"user","content":"x"}]}'
    assert bench.raw_chat(body, **headers).status_code == status


NUMBERS = ["NaN", "Infinity", "-Infinity", "-0.1", "2.1", "1e999", "true", '"0.5"', "[]", "{}"]


@pytest.mark.parametrize("number", NUMBERS)
def test_o23_a_temperature_that_is_no_number_in_range_is_refused(bench: Any, number: str) -> None:
    body = (
        f'{{"model":"org/m","messages":[{{"role":"user","content":"x"}}],"temperature":{number}}}'
    )
    response = bench.raw_chat(body.encode())
    assert response.status_code == 400
    assert "NaN" not in json.dumps(response.json()) or number == "NaN"
    assert bench.chat(temperature=None).status_code == 200


@pytest.mark.parametrize(
    "member",
    [
        '"top_p":NaN',
        '"min_p":NaN',
        '"repetition_penalty":NaN',
        '"presence_penalty":NaN',
        '"frequency_penalty":1e999',
        '"logit_bias":{"1":NaN}',
        '"logit_bias":{"1":1e999}',
        '"unknown":[1e999]',
    ],
)
def test_o23_no_number_that_is_not_finite_gets_in_anywhere(bench: Any, member: str) -> None:
    body = f'{{"model":"org/m","messages":[{{"role":"user","content":"x"}}],{member}}}'
    assert bench.raw_chat(body.encode()).status_code == 400


OPTIONAL = [
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "n",
    "stop",
    "stream",
    "stream_options",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "seed",
    "response_format",
    "tools",
    "tool_choice",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
    "chat_template",
    "chat_template_kwargs",
    "cache_salt",
    "model",
    "user",
    "add_generation_prompt",
    "continue_final_message",
    "structured_outputs",
    "parallel_tool_calls",
    "metadata",
]


def test_o15_null_is_absent_for_every_optional_member(bench: Any) -> None:
    response = bench.chat(**dict.fromkeys(OPTIONAL))
    assert response.status_code == 200, response.text
    for name in OPTIONAL:
        assert bench.chat(**{name: None}).status_code == 200, name


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "king", "content": "x"}]},
            "messages[1].role",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 257]}, "stop"),
        ({"stop": [3]}, "stop[0]"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_usage": "yes"}},
            "stream_options.include_usage",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"1000": 1}}, "logit_bias"),
        ({"stop_token_ids": [1000]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1000]}, "allowed_token_ids"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": 5_000}, "min_tokens"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**70}, "seed"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_a_wrong_member_is_a_400_that_names_it(
    bench: Any, members: dict[str, Any], param: str
) -> None:
    response = bench.chat(**members)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    assert not bench.fleet.requests


@pytest.mark.parametrize(
    "members",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"functions": [{"name": "f"}]},
        {"guided_whitespace_pattern": " "},
        {"chat_template": "x"},
        {"prompt_logprobs": 1},
        {"echo": True},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "x"}},
        {"priority": 1},
        {"documents": [{}]},
    ],
)
def test_what_is_not_honoured_is_refused_by_name_and_never_in_silence(
    bench: Any, members: dict[str, Any]
) -> None:
    response = bench.chat(**members)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == next(iter(members))
    assert error["code"] == "unsupported_value"


@pytest.mark.parametrize(
    "members",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"store": True, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto"},
        {"a_member_of_the_future": {"x": 1}},
        {"max_tokens": 16.0},
        {"n_predict": 4, "repeat_penalty": 1.1},
        {"top_k": 0},
        {"temperature": 0},
        {"messages": [{"role": "developer", "content": []}, {"role": "user", "content": ""}]},
    ],
)
def test_what_changes_nothing_or_is_unknown_is_accepted(
    bench: Any, members: dict[str, Any]
) -> None:
    assert bench.chat(**members).status_code == 200


def test_deep_nesting_is_judged_without_recursion() -> None:
    ok = b'{"x":' + b"[" * 62 + b"]" * 62 + b"}"
    assert parse_object(ok, 64)
    with pytest.raises(ApiError):
        parse_object(b'{"x":' + b"[" * 64 + b"]" * 64 + b"}", 64)


@pytest.mark.parametrize("shift", range(8))
@pytest.mark.parametrize("unit", ["\\\\", '\\"', "\\u00e9", "\\ud83d\\ude00", '[{,\\\\\\"', "日"])
def test_a_large_body_is_read_alike_wherever_it_is_cut(unit: str, shift: int) -> None:
    """What is counted is what stands outside of strings, though a slice begins within one or behind a backslash."""
    text = (
        '{"a":"' + "x" * shift + unit * (2 * SLICE_BYTES // len(unit)) + '","b":[1,2],"c":"\\\\"}'
    )
    data = text.encode()
    assert parse_object(data, 64) == json.loads(text)
    tail = b"," + b"[1]," * CONTAINERS_MAX + b"1]}"
    with pytest.raises(ApiError, match="too many values"):
        parse_object(data[:-1] + b',"d":[1' + tail, 64)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"a":"' + b"x" * LARGE_BYTES_MIN + b'\\ud83d"}', "unpaired surrogate"),
        (b'{"a":[' + b"1," * (FEW_MAX + 1) + b"NaN]}", "not valid JSON"),
        (b'{"a":[' + b"1," * (FEW_MAX - 1) + b"NaN]}", "a number that JSON does not know"),
        (b'{"a":[' + b"1," * (FEW_MAX + 1) + b"1e999]}", "too large"),
        (b'{"a":["\xff' + b"x" * LARGE_BYTES_MIN + b'"]}', "not valid UTF-8"),
    ],
)
def test_a_large_body_is_refused_in_words_too(body: bytes, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        parse_object(body, 64)
    assert caught.value.status == 400


def test_many_ids_are_judged_as_a_whole_and_one_wrong_one_is_named(bench: Any) -> None:
    ids = [17] * 70_000
    good = bench.send("POST", "/detokenize", json={"tokens": ids})
    assert good.status_code == 200
    assert len(good.json()["prompt"]) == len(ids)
    for wrong in (-1, 2**31, "x", True):
        bad = bench.send("POST", "/detokenize", json={"tokens": [*ids, wrong]})
        assert (bad.status_code, error_of(bad)["param"]) == (400, f"tokens[{len(ids)}]")
    assert bench.send("POST", "/detokenize", json={"tokens": [16.0]}).status_code == 200


def test_of_many_faults_one_is_told(bench: Any) -> None:
    bad = bench.chat(messages=[{"role": "user", "content": [{"type": "text", "text": 1}] * 3_000}])
    assert error_of(bad)["param"] == "messages[0].content[0].text"
    many = bench.chat(logit_bias={str(n): "x" for n in range(5_000)})
    assert error_of(many)["param"] == "logit_bias"


def test_work_beside_the_loop_pauses_longer_than_it_works() -> None:
    pace = Pace()
    began = time.monotonic()
    while time.monotonic() - began < 0.004:
        pass
    pace.rest()
    assert time.monotonic() - began > 0.012
    pace.rest()
    assert time.monotonic() - began < 1


def test_large_arguments_of_earlier_calls_are_read_and_too_many_values_refused(bench: Any) -> None:
    def turns(arguments: str) -> list[dict[str, Any]]:
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        words = {"role": "user", "content": "hi"}
        return [words, {"role": "assistant", "content": "x", "tool_calls": [call]}, words]

    text = json.dumps({"text": "a,[{" * LARGE_BYTES_MIN})
    assert error_of(bench.chat(messages=turns(text)))["code"] == "context_length_exceeded"
    many = json.dumps({"list": [1] * (FEW_MAX + 2)})
    refused = error_of(bench.chat(messages=turns(many)))
    assert (refused["param"], refused["message"][:13]) == ("messages", "the arguments")


class Posted:
    """A request whose body comes in parts."""

    headers: ClassVar[Mapping[str, str]] = {}
    scope: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    async def receive(self) -> dict[str, Any]:
        part = self._parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self._parts)}


@pytest.mark.parametrize("size", [100, 40 * LARGE_BYTES_MIN])
def test_a_large_body_is_put_together_in_the_thread_that_reads_it(size: int) -> None:
    parts = [b'{"a":"', *[b"x" * LARGE_BYTES_MIN] * (size // LARGE_BYTES_MIN), b'"}']
    joined: list[object] = []

    def watch(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ == "join" and frame.f_code.co_filename == PATH:
            joined.append(called)

    async def scenario() -> dict[str, Any]:
        request: Any = Posted(parts)
        sys.setprofile(watch)  # of this thread alone
        try:
            return await read_object(request, HttpLimits())
        finally:
            sys.setprofile(None)

    assert len(asyncio.run(scenario())["a"]) == size // LARGE_BYTES_MIN * LARGE_BYTES_MIN
    assert bool(joined) == (size < LARGE_BYTES_MIN)
