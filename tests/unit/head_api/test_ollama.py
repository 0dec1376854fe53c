"""Ollama's routes: lines and whole replies that agree, options, tools, thinking, raw prompts, lists of models, refusals."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from superfluid_core.errors import CapacityError, ErrorCode, GenerationError
from superfluid_core.limits import HttpLimits
from superfluid_head.access.keys import KeyRing, Principal
from tests.cases.talk import TOOLS, cuts, talking
from tests.unit.head_api.conftest import WINDOW, Bench

THOUGHT = '<think>hm</think>Look. <tool_call>\n{"name": "f", "arguments": {"city": "Ulm"}}\n</tool_call><tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def chat(bench: Bench, **members: Any) -> httpx.Response:
    body = {"model": "org/m", "messages": [{"role": "user", "content": "hi"}], **members}
    return bench.send("POST", "/api/chat", json=body)


def generate(bench: Bench, **members: Any) -> httpx.Response:
    return bench.send("POST", "/api/generate", json={"model": "org/m", "prompt": "hi", **members})


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.split("\n")[:-1]]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    return lines


def bare(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls", [])
    assert all(call["id"].startswith("call_") for call in calls)
    return {**message, "tool_calls": [call["function"] for call in calls]}


def both(bench: Bench, **members: Any) -> dict[str, Any]:
    """Ask in both modes and check that they agree but for times and drawn ids."""
    whole = chat(bench, **members, stream=False).json()
    lines = lines_of(chat(bench, **members))
    joined: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in lines:
        assert line["message"].pop("role") == "assistant"
        for name, value in line["message"].items():
            joined[name] = joined[name] + value if name in joined else value
    assert bare(joined) == bare(whole["message"])
    last = {**lines[-1], "message": whole["message"]}
    for name in (*DURATIONS, "created_at"):
        assert last.pop(name) is not None
        whole.pop(name)
    assert last == whole
    return {**whole, "message": bare(whole["message"])}


def test_a_chat_is_lines_by_default_and_one_object_on_demand(bench: Bench) -> None:
    whole = both(bench)
    assert whole == {
        "model": "org/m",
        "message": {"role": "assistant", "content": "Hello world", "tool_calls": []},
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": len(bench.fleet.requests[-1].prompt),
        "eval_count": 3,
    }
    answer = chat(bench, stream=False).json()
    assert all(isinstance(answer[name], int) and answer[name] >= 0 for name in DURATIONS)
    assert answer["total_duration"] >= answer["eval_duration"]
    assert answer["created_at"].endswith("Z")
    assert both(bench, options={"num_predict": 1})["done_reason"] == "length"


def test_thoughts_and_calls_are_members_of_messages_and_arguments_are_objects() -> None:
    with talking("qwen3") as bench:
        bench.fleet.say(*cuts(THOUGHT, 3))
        message = both(bench, tools=TOOLS, think=True)["message"]
        assert (message["thinking"], message["content"]) == ("hm", "Look.")
        assert message["tool_calls"] == [
            {"index": 0, "name": "f", "arguments": {"city": "Ulm"}},
            {"index": 1, "name": "g", "arguments": {}},
        ]
        assert generate(bench, stream=False).json()["thinking"] == "hm"
        inside = both(bench, tools=TOOLS, options={"num_predict": 14})
        assert (inside["done_reason"], inside["message"]["tool_calls"]) == ("length", [])


def test_a_history_reaches_the_template_with_calls_and_results_joined() -> None:
    template = "{% for m in messages %}[{{ m.role }}|{{ m.reasoning_content or '' }}|{{ m.content }}|{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.city }}{{ c.id }}{% endfor %}|{{ m.tool_call_id or '' }}]{% endfor %}{{ 'T' if enable_thinking else 'N' }}"
    history = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [
            {"function": {"name": "f", "arguments": {"city": "Ulm"}}},
            {"function": {"name": "g", "arguments": {"city": "Bonn"}}},
        ]},
        {"role": "tool", "tool_name": "g", "content": "2"},
        {"role": "tool", "content": "1"},
    ]  # fmt: skip
    with talking("qwen3", template) as bench:
        assert chat(bench, messages=history, tools=TOOLS, think=True).status_code == 200
        assert bytes(bench.fleet.requests[-1].prompt).decode() == (
            "[system||s||][user||a||][assistant|t||fUlmcall_2_0gBonncall_2_1|]"
            "[tool||2||call_2_1][tool||1||call_2_0]T"
        )
        assert generate(bench, system="s", think=False).status_code == 200
        assert bytes(bench.fleet.requests[-1].prompt) == b"[system||s||][user||hi||]N"


def test_a_prompt_is_answered_through_the_template_or_raw(bench: Bench) -> None:
    lines = lines_of(generate(bench))
    assert "".join(line["response"] for line in lines) == "Hello world"
    assert bytes(bench.fleet.requests[-1].prompt[:-1]) == b"user:hi"
    raw = generate(bench, raw=True, stream=False, options={"stop": ["wor"]}).json()
    assert (raw["response"], raw["done_reason"]) == ("Hello ", "stop")
    assert bytes(bench.fleet.requests[-1].prompt) == b"hi"
    assert bench.fleet.requests[-1].max_output == WINDOW - 2
    generate(bench, raw=True, options={"num_predict": 5})
    assert bench.fleet.requests[-1].max_output == 5


def test_options_are_mapped_or_have_no_effect(bench: Bench) -> None:
    options = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "seed": 3, "repeat_penalty": 1.5,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_ctx": WINDOW, "num_gpu": 1,
        "num_predict": -1, "mirostat": 0, "num_thread": None,
    }  # fmt: skip
    assert chat(bench, options=options, keep_alive="5m").status_code == 200
    sampling = bench.fleet.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.25)
    assert (sampling.min_p, sampling.seed, sampling.repetition_penalty) == (0.125, 3, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)


def test_log_probabilities_ride_with_their_text(bench: Bench) -> None:
    whole = chat(bench, logprobs=True, top_logprobs=1, stream=False).json()
    assert [entry["token"] for entry in whole["logprobs"]] == ["Hello", " world"]
    lines = lines_of(generate(bench, logprobs=True, top_logprobs=1, raw=True))
    told = [entry for line in lines for entry in line.get("logprobs", [])]
    assert told == whole["logprobs"]


def test_a_request_without_words_asks_for_the_model(bench: Bench) -> None:
    assert lines_of(chat(bench, messages=[], keep_alive=0))[0]["done_reason"] == "load"
    whole = generate(bench, prompt="", stream=False).json()
    assert (whole["response"], whole["done"], whole["done_reason"]) == ("", True, "load")
    assert not bench.fleet.requests


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"options": {"mirostat": 2}}, "options.mirostat"),
    ("chat", {"options": {"wonder": 1}}, "options.wonder"),
    ("chat", {"options": {"temperature": 3}}, "options.temperature"),
    ("chat", {"options": {"num_predict": 0}}, "options.num_predict"),
    ("chat", {"options": {"num_ctx": WINDOW + 1}}, "maximum context length"),
    ("chat", {"options": {"num_ctx": "8"}}, "options.num_ctx"),
    ("chat", {"options": []}, "options"),
    ("chat", {"format": "yaml"}, "format"),
    ("chat", {"format": {"type": "strin"}}, "strin"),
    ("chat", {"think": True}, "think"),
    ("chat", {"stream": "no"}, "stream"),
    ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
    ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "role"),
    ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]}, "arguments"),
    ("chat", {"tools": [{"type": "function"}]}, "tools[0].function"),
    ("chat", {"messages": [{"role": "user", "content": "x" * (WINDOW + 9)}]}, "maximum context length"),
    ("generate", {"images": ["aGk="]}, "images"),
    ("generate", {"template": "x"}, "template"),
    ("generate", {"context": [1, 2]}, "context"),
    ("generate", {"suffix": "x"}, "fill-in-the-middle"),
    ("generate", {"raw": True, "system": "x"}, "system"),
    ("generate", {"raw": True, "think": True}, "think"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "members", "words"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(
    route: str, members: dict[str, Any], words: str
) -> None:
    with talking("hermes") as bench:
        response = (chat if route == "chat" else generate)(bench, **members)
        assert response.status_code == 400, response.text
        told = response.json()
        assert list(told) == ["error"]
        assert words in told["error"]
        assert not bench.fleet.requests


def test_failures_are_one_member_before_the_first_byte_and_a_line_behind_it(bench: Bench) -> None:
    full = CapacityError("full", code=ErrorCode.QUEUE_FULL, retry_after_ms=1_500)
    bench.fleet.say("x", error_first=full)
    refused = chat(bench)
    assert (refused.status_code, refused.json()) == (429, {"error": "full"})
    lost = GenerationError("10.0.0.7 went away", code=ErrorCode.NODE_LOST)
    bench.fleet.say("Hel", end=False, error_last=lost)
    lines = chat(bench).text.split("\n")[:-1]
    assert set(json.loads(lines[-1])) == {"error"}
    assert "10.0.0.7" not in lines[-1]


def test_silence_is_broken_by_lines_that_add_nothing(make_bench: Any) -> None:
    bench = make_bench(limits=HttpLimits(silence_ms=20))
    bench.fleet.say("Hello", wait_s=0.1)
    lines = lines_of(chat(bench))
    assert len(lines) >= 4
    assert "".join(line["message"]["content"] for line in lines) == "Hello"


def test_models_are_listed_and_shown_by_the_names_that_are_served(bench: Bench) -> None:
    (card,) = bench.send("GET", "/api/tags").json()["models"]
    assert (card["name"], card["model"]) == ("org/m", "org/m")
    assert card["digest"] == "fake-text"
    assert card["details"]["family"] == "unknown"
    (running,) = bench.send("GET", "/api/ps").json()["models"]
    assert running["context_length"] == WINDOW
    assert bench.send("GET", "/api/version").json() == {"version": "9.9"}
    shown = bench.send("POST", "/api/show", json={"model": "org/m:latest"}).json()
    assert shown["capabilities"] == ["completion"]
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == WINDOW
    with talking("qwen3", "{{ messages }}") as other:
        shown = other.send("POST", "/api/show", json={"name": "org/m"}).json()
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["template"] == "{{ messages }}"
    assert chat(bench, model="org/m:latest", stream=False).json()["model"] == "org/m"


def test_keys_guard_every_route_and_unknown_models_are_not_found(make_bench: Any) -> None:
    bench = make_bench(keys=KeyRing([("k" * 16, Principal("one"))]))
    key = {"authorization": "Bearer " + "k" * 16}
    for verb, path in (
        ("POST", "/api/chat"),
        ("POST", "/api/generate"),
        ("POST", "/api/show"),
        ("GET", "/api/tags"),
        ("GET", "/api//ps/"),
        ("GET", "/api/version"),
    ):
        refused = bench.send(verb, path, json={"model": "org/m", "prompt": "x"})
        assert refused.status_code == 401
        assert list(refused.json()) == ["error"]
        if verb == "POST":
            for name in ("nope", "ORG/M", " org/m", "", "org/m:other"):
                body = {
                    "model": name,
                    "prompt": "x",
                    "messages": [{"role": "user", "content": "x"}],
                }
                unknown = bench.send(verb, path, json=body, headers=key)
                assert unknown.status_code == 404, (path, name)
                assert list(unknown.json()) == ["error"]
        assert bench.send("DELETE", path, headers=key).status_code == 405
    assert bench.send("POST", "/api/pull", json={}, headers=key).json() == {
        "error": "no such route"
    }
