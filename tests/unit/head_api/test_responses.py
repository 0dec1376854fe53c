"""POST /v1/responses (OX-2): the object in both modes, the full order of events, what is refused; by raw requests and the official client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from superfluid_core.errors import CapacityError, ErrorCode, GenerationError
from superfluid_core.session import QosClass
from tests.cases.talk import cuts, talking
from tests.unit.head_api.conftest import WINDOW, Bench, LiveServer

TOOLS: Any = [
    {
        "type": "function",
        "name": name,
        "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    }
    for name in ("f", "g")
]
THOUGHT = '<think>hm</think>Look. <tool_call>\n{"name": "f", "arguments": {"city": "Ulm"}}\n</tool_call><tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


def ask(bench: Bench, **members: Any) -> httpx.Response:
    return bench.send("POST", "/v1/responses", json={"model": "org/m", "input": "hi", **members})


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Every event, by its name; numbers go up by one from 0."""
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = []
    for frame in response.text.split("\n\n"):
        if frame and not frame.startswith(":"):
            name, data = frame.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            assert event["sequence_number"] == len(found)
            found.append(event)
    return found


def fold(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Check the order of the events against the grammar of section 7 and the final object; return the latter."""
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    for event in events[:2]:
        assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
        assert event["response"]["usage"] is None
    final: dict[str, Any] = events[-1]["response"]
    assert kinds[-1] == f"response.{final['status']}"
    at = 2
    for index, item in enumerate(final["output"]):
        added = events[at]
        assert (added["type"], added["output_index"]) == ("response.output_item.added", index)
        assert (added["item"]["id"], added["item"]["status"]) == (item["id"], "in_progress")
        end = kinds.index("response.output_item.done", at)
        _check_item(item, kinds[at + 1 : end], events[at + 1 : end])
        assert events[end]["item"] == item
        assert all(event["output_index"] == index for event in events[at : end + 1])
        assert all(event["item_id"] == item["id"] for event in events[at + 1 : end])
        at = end + 1
    assert at == len(events) - 1
    return final


def _check_item(item: dict[str, Any], kinds: list[str], events: list[dict[str, Any]]) -> None:
    joined = "".join(event.get("delta", "") for event in events)
    match item["type"]:
        case "message":
            deltas = ["response.output_text.delta"] * (len(kinds) - 3)
            assert kinds == [
                "response.content_part.added",
                *deltas,
                "response.output_text.done",
                "response.content_part.done",
            ]
            assert events[0]["part"]["text"] == ""
            assert joined == events[-2]["text"] == item["content"][0]["text"]
            assert events[-1]["part"] == item["content"][0]
            logprobs = [each for event in events[1:-2] for each in event["logprobs"]]
            assert logprobs == events[-2]["logprobs"] == item["content"][0]["logprobs"]
        case "function_call":
            kind = "response.function_call_arguments"
            assert kinds == [f"{kind}.delta"] * (len(kinds) - 1) + [f"{kind}.done"]
            assert joined == events[-1]["arguments"] == item["arguments"]
        case other:
            assert other == "reasoning"
            kind = "response.reasoning_text"
            assert kinds == [f"{kind}.delta"] * (len(kinds) - 1) + [f"{kind}.done"]
            assert joined == events[-1]["text"] == item["content"][0]["text"]


def bare(response: dict[str, Any]) -> dict[str, Any]:
    """Everything but what is drawn or timed."""
    made = {**response, "output": [dict(item) for item in response["output"]]}
    prefixes = {"message": "msg_", "function_call": "fc_", "reasoning": "rs_"}
    assert made.pop("id").startswith("resp_")
    for item in made["output"]:
        assert item.pop("id").startswith(prefixes[item["type"]])
        assert item.pop("call_id", "call_").startswith("call_")
    for name in ("created_at", "completed_at"):
        made.pop(name)
    return made


def both(bench: Bench, **members: Any) -> dict[str, Any]:
    """Ask in both modes and check that they agree."""
    response = ask(bench, **members)
    assert response.status_code == 200, response.text
    whole = bare(response.json())
    assert bare(fold(events_of(ask(bench, **members, stream=True)))) == whole
    return whole


def test_an_answer_has_the_shape_of_a_response_in_both_modes(bench: Bench) -> None:
    made = both(bench, metadata={"a": "b"}, instructions="be", max_output_tokens=50, user="u")
    assert made["status"] == "completed"
    assert made["object"] == "response"
    assert made["model"] == "org/m"
    assert made["error"] is made["incomplete_details"] is made["previous_response_id"] is None
    assert made["metadata"] == {"a": "b"}
    assert (made["instructions"], made["max_output_tokens"]) == ("be", 50)
    assert (made["temperature"], made["top_p"], made["tools"]) == (1.0, 1.0, [])
    assert (made["tool_choice"], made["parallel_tool_calls"]) == ("auto", True)
    assert made["text"] == {"format": {"type": "text"}}
    assert made["store"] is False
    part = {"type": "output_text", "text": "Hello world", "annotations": [], "logprobs": []}
    assert made["output"] == [
        {"type": "message", "status": "completed", "role": "assistant", "content": [part]}
    ]
    prompt = len(bench.fleet.requests[-1].prompt)
    assert made["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 3,
    }


@pytest.mark.parametrize("size", [1, 4, 1_000])
def test_thoughts_text_and_calls_are_items_in_the_order_in_which_they_were_written(
    size: int,
) -> None:
    with talking("qwen3") as bench:
        bench.fleet.say(*cuts(THOUGHT, size))
        made = both(bench, tools=TOOLS)
        kinds = [item["type"] for item in made["output"]]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert made["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
        assert made["output"][1]["content"][0]["text"] == "Look."
        calls = [(item["name"], item["arguments"]) for item in made["output"][2:]]
        assert calls == [("f", '{"city": "Ulm"}'), ("g", "{}")]
        assert made["tools"] == TOOLS


def test_a_budget_that_ran_out_leaves_the_response_incomplete() -> None:
    with talking("hermes") as bench:
        bench.fleet.say("Hello", " world")
        cut = both(bench, max_output_tokens=1)
        assert (cut["status"], cut["incomplete_details"]) == (
            "incomplete",
            {"reason": "max_output_tokens"},
        )
        assert cut["output"][0]["status"] == "incomplete"
        assert cut["usage"]["output_tokens"] == 1
        bench.fleet.say(*cuts(THOUGHT.partition("Look. ")[2], 4))
        inside = both(bench, tools=TOOLS, max_output_tokens=14)
        assert inside["status"] == "incomplete"
        assert all(item["status"] == "incomplete" for item in inside["output"][-1:])


def test_an_answer_of_nothing_is_an_empty_message(bench: Bench) -> None:
    bench.fleet.say()
    made = both(bench)
    assert made["status"] == "completed"
    assert made["output"][0]["content"][0]["text"] == ""


def test_log_probabilities_ride_with_their_text(bench: Bench) -> None:
    made = both(bench, top_logprobs=2)
    logprobs = made["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["Hello", " world"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
    made = both(bench, include=["message.output_text.logprobs"])
    assert made["output"][0]["content"][0]["logprobs"][0]["top_logprobs"] == []


def test_a_history_of_items_reaches_the_template_in_order() -> None:
    template = "{% for m in messages %}[{{ m.role }}|{{ m.reasoning_content or '' }}|{{ m.content }}|{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.id }}{% endfor %}|{{ m.tool_call_id or '' }}]{% endfor %}>"
    history = [
        {"role": "user", "content": "a"},
        {"role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "u1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "u2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "u1", "output": "r"},
        {"type": "function_call_output", "call_id": "u2", "output": [{"type": "input_text", "text": "s"}]},
    ]  # fmt: skip
    with talking("hermes", template) as bench:
        asked = ask(bench, input=history, instructions="be", tools=TOOLS)
        assert asked.status_code == 200, asked.text
        assert bytes(bench.fleet.requests[-1].prompt).decode() == (
            "[system||be||][user||a||][system||b||][assistant|t|c|fu1gu2|]"
            "[tool||r||u1][tool||s||u2]>"
        )


def test_what_an_answer_holds_can_be_sent_back_as_input() -> None:
    with talking("qwen3") as bench:
        bench.fleet.say(*cuts(THOUGHT, 5))
        output = ask(bench, tools=TOOLS).json()["output"]
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "1"}
            for item in output
            if item["type"] == "function_call"
        ]
        bench.fleet.say("Fine.")
        history = [{"role": "user", "content": "hi"}, *output, *results]
        assert both(bench, input=history, tools=TOOLS)["output"][0]["type"] == "message"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 1}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments"),
    ({"input": "x" * (WINDOW + 50)}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": WINDOW + 1}, "input"),
    ({"temperature": 3}, "temperature"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "name": "f g"}]}, "tools[0].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "h"}, "tools": TOOLS}, "tool_choice.name"),
    ({"tool_choice": {"type": "file_search"}, "tools": TOOLS}, "tool_choice.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"truncation": "left"}, "truncation"),
]


@pytest.mark.parametrize(("members", "param"), REFUSED)
def test_what_cannot_be_honoured_is_refused_in_the_names_of_this_route(
    members: dict[str, Any], param: str
) -> None:
    with talking("hermes") as bench:
        for stream in (False, True):
            response = ask(bench, **members, stream=stream)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == param, response.text
        assert not bench.fleet.requests


def test_nothing_is_stored_and_an_unknown_model_is_not_found(bench: Bench) -> None:
    for verb, path in (
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1/input_items"),
    ):
        assert bench.send(verb, path).status_code == 404, path
    for name in ("nope", "ORG/M", " org/m", ""):
        unknown = ask(bench, model=name)
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "model_not_found"
    assert ask(bench, model=None).json()["model"] == "org/m"


def test_failures_before_the_first_byte_are_errors_and_behind_it_a_failed_response(
    bench: Bench,
) -> None:
    full = CapacityError("full", code=ErrorCode.QUEUE_FULL, retry_after_ms=1_500)
    bench.fleet.say("x", error_first=full)
    for stream in (False, True):
        assert ask(bench, stream=stream).status_code == 429
    lost = GenerationError("10.0.0.7 went away", code=ErrorCode.NODE_LOST)
    bench.fleet.say("Hel", end=False, error_last=lost)
    response = ask(bench, stream=True)
    events = events_of(response)
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "node_lost")
    assert failed["output"][0]["content"][0]["text"] == "Hel"
    assert "10.0.0.7" not in response.text


def test_headers_of_service_work_on_every_dialect(bench: Bench) -> None:
    """Class, tenant and session are those of the one path that all routes share."""
    words = [{"role": "user", "content": "hi"}]
    for path, members in (
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": words, "max_tokens": 9}),
    ):
        body = {"model": "org/m", **members}
        headers = {"x-superfluid-qos": "background"}
        answered = bench.send("POST", path, json=body, headers=headers)
        assert answered.status_code == 200, answered.text
        assert bench.fleet.requests[-1].qos is QosClass.BACKGROUND
        assert answered.headers["x-superfluid-warm"] == "3"
        wrong = bench.send("POST", path, json=body, headers={"x-superfluid-qos": "best"})
        assert wrong.status_code == 400
    metrics = bench.send("GET", "/metrics").text
    assert 'route="/v1/responses"' in metrics
    assert 'route="/v1/messages"' in metrics


def test_the_official_client_reads_responses_whole_raw_and_with_its_helper() -> None:
    with talking("qwen3") as bench, LiveServer(bench) as server:
        bench.fleet.say(*cuts(THOUGHT, 4))
        with openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0) as client:
            options: Any = {"model": "org/m", "input": "hi", "tools": TOOLS}
            whole = client.responses.create(**options)
            assert whole.output_text == "Look."
            assert [item.type for item in whole.output][2:] == ["function_call"] * 2
            raw: list[Any] = list(client.responses.create(**options, stream=True))
            assert [event.sequence_number for event in raw] == list(range(len(raw)))
            assert raw[-1].type == "response.completed"
            with client.responses.stream(**options) as stream:
                seen = [event.type for event in stream]
                final = stream.get_final_response()
            assert seen[-1] == "response.completed"
            assert final.output_text == "Look."
            calls: Any = [item for item in final.output if item.type == "function_call"]
            assert [call.arguments for call in calls] == ['{"city": "Ulm"}', "{}"]
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve("resp_1")
            with pytest.raises(openai.BadRequestError):
                client.responses.create(model="org/m", input="x", previous_response_id="resp_1")
