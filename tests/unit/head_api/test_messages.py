"""POST /v1/messages and its count, by raw requests and through Anthropic's own client: shapes, order of events, errors, refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import jiter
import pytest

from superfluid_core.errors import CapacityError, ErrorCode, GenerationError
from superfluid_head.access.keys import KeyRing, Principal
from tests.cases.talk import cuts, talking
from tests.unit.head_api.conftest import SEPARATOR, WINDOW, Bench, LiveServer

if TYPE_CHECKING:  # 1.4 s of every worker's time, of which one alone runs this file
    import anthropic

TOOLS: Any = [
    {
        "name": name,
        "description": "d",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    for name in ("f", "g")
]
THOUGHT = '<think>hm</think>Look. <tool_call>\n{"name": "f", "arguments": {"city": "Ulm"}}\n</tool_call><tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


def body_of(**members: Any) -> dict[str, Any]:
    words = [{"role": "user", "content": "hi"}]
    return {"model": "org/m", "max_tokens": 100, "messages": words, **members}


def ask(bench: Bench, **members: Any) -> httpx.Response:
    return bench.send("POST", "/v1/messages?beta=true", json=body_of(**members))


def count(bench: Bench, **members: Any) -> httpx.Response:
    body = body_of(**members)
    del body["max_tokens"]
    return bench.send("POST", "/v1/messages/count_tokens", json=body)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Every event; its name is its type, and comments are none."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for frame in response.text.split("\n\n"):
        if frame and not frame.startswith(":"):
            name, data = frame.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def fold(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Put a message together as a strict client does."""
    assert events[0]["type"] == "message_start"
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == []
    assert message["stop_reason"] is None
    assert events[-1] == {"type": "message_stop"}
    assert events[-2]["type"] == "message_delta"
    inputs: dict[int, list[str]] = {}
    is_open = False
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                _add(message["content"][-1], event["delta"], inputs.setdefault(event["index"], []))
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                is_open = False
            case _:
                assert event["type"] == "ping"
    assert not is_open
    for index, parts in inputs.items():
        if parts:
            said = "".join(parts).encode()
            message["content"][index]["input"] = jiter.from_json(said, partial_mode=True)
    message.update(events[-2]["delta"])
    message["usage"] = events[-2]["usage"]
    return message


def _add(block: dict[str, Any], delta: dict[str, Any], inputs: list[str]) -> None:
    match delta["type"]:
        case "input_json_delta":
            inputs.append(delta["partial_json"])
        case kind:
            member = kind.removesuffix("_delta")
            block[member] += delta[member]


def both(bench: Bench, **members: Any) -> dict[str, Any]:
    """Ask in both modes and check that they agree but for ids that are drawn."""
    response = ask(bench, **members)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    streamed = fold(events_of(ask(bench, **members, stream=True)))
    for message in (whole, streamed):
        assert message.pop("id").startswith("msg_")
        for block in message["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id").startswith("toolu_")
    assert whole == streamed
    return whole


def test_an_answer_has_the_shape_of_a_message_in_both_modes(bench: Bench) -> None:
    for stream in (False, True):
        told = ask(bench, stream=stream).headers
        assert told["request-id"] == told["x-request-id"]
    message = both(bench)
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "org/m",
        "content": [{"type": "text", "text": "Hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 8,
            "output_tokens": 3,
            "cache_read_input_tokens": 3,
            "cache_creation_input_tokens": 0,
        },
    }


def test_thoughts_text_and_calls_are_blocks_in_the_order_in_which_they_were_written() -> None:
    with talking("qwen3") as bench:
        bench.fleet.say(*cuts(THOUGHT, 3))
        message = both(bench, tools=TOOLS, thinking={"type": "adaptive"})
        thinking, text, first, second = message["content"]
        assert thinking["thinking"] == "hm"
        assert len(thinking["signature"]) == 64
        assert text == {"type": "text", "text": "Look."}
        assert first == {"type": "tool_use", "name": "f", "input": {"city": "Ulm"}}
        assert second == {"type": "tool_use", "name": "g", "input": {}}
        assert message["stop_reason"] == "tool_use"


def test_every_reason_to_stop_has_its_name(bench: Bench) -> None:
    stopped = both(bench, stop_sequences=["lo w"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "lo w")
    assert stopped["content"] == [{"type": "text", "text": "Hel"}]
    cut = both(bench, max_tokens=1)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    assert cut["usage"]["output_tokens"] == 1
    bench.fleet.say()
    assert both(bench)["content"] == []


def test_a_call_that_was_cut_off_is_not_made_up() -> None:
    with talking("hermes") as bench:
        bench.fleet.say(*cuts(THOUGHT.partition("Look. ")[2], 4))
        response = ask(bench, tools=TOOLS, max_tokens=12)
        message = response.json()
        assert message["stop_reason"] == "max_tokens"
        assert [block.get("input") for block in message["content"]] in ([], [{}])


def test_at_most_one_call_where_parallel_ones_are_off_and_none_where_tools_are() -> None:
    with talking("hermes") as bench:
        bench.fleet.say(*cuts(THOUGHT.partition("Look. ")[2], 4))
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        message = both(bench, tools=TOOLS, tool_choice=choice)
        assert [block["type"] for block in message["content"]] == ["tool_use"]
        message = both(bench, tools=TOOLS, tool_choice={"type": "none"})
        assert [block["type"] for block in message["content"]] == ["text"]


def test_a_history_of_blocks_reaches_the_template_in_order() -> None:
    template = "{% for m in messages %}[{{ m.role }}|{{ m.reasoning_content or '' }}|{{ m.content }}|{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %}|{{ m.tool_call_id or '' }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    history = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "c"},
            {"type": "tool_use", "id": "u1", "name": "f", "input": {"city": "Ulm"}},
            {"type": "tool_use", "id": "u2", "name": "g", "input": {"city": "Bonn"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "u1", "content": [{"type": "text", "text": "r"}]},
            {"type": "tool_result", "tool_use_id": "u2", "content": "no", "is_error": True},
            {"type": "text", "text": "d"},
        ]},
    ]  # fmt: skip
    system = [{"type": "text", "text": "s1"}, {"type": "text", "text": "s2"}]
    with talking("hermes", template) as bench:
        asked = ask(bench, messages=history, system=system, tools=TOOLS)
        assert asked.status_code == 200, asked.text
        prompt = bytes(bench.fleet.requests[-1].prompt).decode()
        assert prompt == (
            "[system||s1\ns2||][user||a\nb||][assistant|t|c|fUlmgBonn|]"
            "[tool||r||u1][tool||Error: no||u2][user||d||]>"
        )
        counted = count(bench, messages=history, system=system, tools=TOOLS)
        assert counted.json() == {"input_tokens": asked.json()["usage"]["input_tokens"]}


def test_a_last_turn_of_the_assistant_is_continued(bench: Bench) -> None:
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "He"}]
    message = both(bench, messages=history)
    prompt = bench.fleet.requests[-1].prompt
    assert bytes(prompt[-2:]) == b"He"
    assert count(bench, messages=history).json()["input_tokens"] == len(prompt)
    assert message["content"] == [{"type": "text", "text": "Hello world"}]


def test_thinking_is_the_templates_matter_and_sampling_is_passed_on(bench: Bench) -> None:
    members = {"temperature": 0.5, "top_p": 0.25, "top_k": 7}
    assert ask(bench, **members, thinking={"type": "disabled"}).status_code == 200
    sampling = bench.fleet.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    template = "{{ 'on' if enable_thinking else 'off' }}{{ messages[0].content }}"
    with talking("qwen3", template) as other:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        assert ask(other, thinking=thinking, max_tokens=2000).status_code == 200
        assert bytes(other.fleet.requests[-1].prompt) == b"onhi"
        assert ask(other, thinking={"type": "disabled"}).status_code == 200
        assert bytes(other.fleet.requests[-1].prompt) == b"offhi"


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_call_that_breaks_off_is_as_long_in_both_modes(cut: int) -> None:
    """By the budget, and by a control token behind which nothing of it can follow."""
    call = '<tool_call>\n{"name": "f", "arguments": {"city": "Ulm", "deep": {"n": [1.5, "x"]}}}\n</tool_call>'
    tokens = cuts(call[: call.index("{", 20) + cut], 1)
    with talking("hermes") as bench:
        bench.fleet.say(*tokens, end=False)
        short = both(bench, tools=TOOLS, max_tokens=len(tokens))
        bench.fleet.say(*tokens, SEPARATOR, "x")
        broken = both(bench, tools=TOOLS)
    assert (short["stop_reason"], broken["stop_reason"]) == ("max_tokens", "end_turn")
    assert short["content"][0] == broken["content"][0]
    given = short["content"][0]["input"]
    assert given in ({}, {"city": "Ulm"}) or given["deep"] in (
        {},
        {"n": []},
        {"n": [1]},
        {"n": [1.5]},
        {"n": [1.5, "x"]},
    )


def test_a_number_that_overflows_is_the_largest_in_an_object() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"city": [1e999, -1e999]}}\n</tool_call>'
    with talking("hermes") as bench:
        bench.fleet.say(*cuts(call, 3))
        (block,) = ask(bench, tools=TOOLS).json()["content"]
    assert block["input"] == {"city": [sys.float_info.max, -sys.float_info.max]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": WINDOW + 1}, "maximum context length"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, "tool_use"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "{}"}]}]}, "input"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, "results must follow"),
    ({"messages": [{"role": "assistant", "content": ""}]}, "say nothing"),
    ({"temperature": 1.5}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"stop_sequences": [""]}, "stop"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"tools": [{"name": "f g", "input_schema": {}}]}, "name"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "two tools"),
    ({"tool_choice": {"type": "any"}}, "needs tools"),
    ({"tool_choice": {"type": "tool", "name": "h"}, "tools": TOOLS}, "'h'"),
    ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "name"),
    ({"thinking": {"type": "enabled"}}, "budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "below max_tokens"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"output_format": {"type": "json_schema", "schema": {"type": "strin"}}}, "strin"),
]  # fmt: skip


@pytest.mark.parametrize(("members", "words"), REFUSED)
def test_what_cannot_be_honoured_is_refused_in_anthropics_shape(
    bench: Bench, members: dict[str, Any], words: str
) -> None:
    with talking("hermes") as other:
        for stream in (False, True):
            response = ask(other, **members, stream=stream)
            assert response.status_code == 400, response.text
            told = response.json()
            assert set(told) == {"type", "error", "request_id"}
            assert told["type"] == "error"
            assert told["error"]["type"] == "invalid_request_error"
            assert words in told["error"]["message"]
            assert told["request_id"] == response.headers["x-request-id"]
        assert not other.fleet.requests


def test_failures_of_every_kind_have_their_type(make_bench: Any) -> None:
    bench = make_bench(keys=KeyRing([("k" * 16, Principal("one"))]))
    for path in ("/v1/messages", "/v1//messages/", "/v1/messages/count_tokens"):
        refused = bench.send("POST", path, json=body_of())
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
    key = {"x-api-key": "k" * 16}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for name in ("nope", "ORG/M", " org/m", ""):
            unknown = bench.send("POST", path, json=body_of(model=name), headers=key)
            assert unknown.status_code == 404, (path, name)
            assert unknown.json()["error"]["type"] == "not_found_error"
    assert bench.send("GET", "/v1/messages", headers=key).status_code == 405
    assert bench.send("GET", "/v1/messages/x", headers=key).json()["type"] == "error"
    full = CapacityError("full", code=ErrorCode.QUEUE_FULL, retry_after_ms=1_500)
    gone = CapacityError("no worker", code=ErrorCode.NO_WORKER)
    for error, status, kind in (
        (full, 429, "rate_limit_error"),
        (gone, 503, "overloaded_error"),
        (GenerationError("x", code=ErrorCode.INTERNAL), 500, "api_error"),
    ):
        bench.fleet.say("x", error_first=error)
        for stream in (False, True):
            body = body_of(stream=stream)
            failed = bench.send("POST", "/v1/messages", json=body, headers=key)
            assert failed.status_code == status
            assert failed.json()["error"]["type"] == kind
            assert status == 500 or failed.headers["retry-after"]


def test_a_stream_that_fails_says_so_and_claims_no_end(bench: Bench) -> None:
    lost = GenerationError("10.0.0.7 went away", code=ErrorCode.NODE_LOST)
    bench.fleet.say("Hel", end=False, error_last=lost)
    response = ask(bench, stream=True)
    events = events_of(response)
    assert [event["type"] for event in events][-1] == "error"
    assert "message_stop" not in [event["type"] for event in events]
    assert events[-1]["error"]["type"] == "overloaded_error"
    assert "10.0.0.7" not in response.text


# --- through the official client


@pytest.fixture
def client() -> Iterator[tuple[Bench, anthropic.Anthropic]]:
    import anthropic

    with (
        talking("qwen3") as bench,
        LiveServer(bench) as server,
        anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as made,
    ):
        yield bench, made


def test_the_official_client_reads_messages_whole_raw_and_with_its_helper(
    client: tuple[Bench, anthropic.Anthropic],
) -> None:
    bench, made = client
    bench.fleet.say(*cuts(THOUGHT, 4))
    options: Any = {
        "model": "org/m",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": TOOLS,
    }
    whole = made.messages.create(**options)
    kinds = [block.type for block in whole.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.stop_reason == "tool_use"
    raw = [event.type for event in made.messages.create(**options, stream=True)]
    assert raw[0] == "message_start"
    assert raw[-2:] == ["message_delta", "message_stop"]
    with made.messages.stream(**options) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == "Look."
    assert [block.type for block in final.content] == kinds
    calls: Any = [block for block in final.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": "Ulm"}, {}]
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = made.beta.messages.count_tokens(
        model="org/m", messages=options["messages"], tools=TOOLS
    )
    assert counted.input_tokens == whole.usage.input_tokens


def test_the_official_client_raises_its_own_errors(
    client: tuple[Bench, anthropic.Anthropic],
) -> None:
    import anthropic

    bench, made = client
    options: Any = {"model": "org/m", "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(anthropic.NotFoundError) as unknown:
        made.messages.create(**{**options, "model": "nope"}, max_tokens=5)
    assert unknown.value.request_id
    with pytest.raises(anthropic.BadRequestError):
        made.messages.create(**options, max_tokens=WINDOW + 1)
    lost = GenerationError("x", code=ErrorCode.NODE_LOST)
    bench.fleet.say("Hel", end=False, error_last=lost)
    with (
        pytest.raises(anthropic.APIStatusError),
        made.messages.stream(**options, max_tokens=9) as stream,
    ):
        stream.get_final_message()
