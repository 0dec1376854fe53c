"""`functions` and `function_call` of chat, by raw requests and through the official client: the shapes of before there were tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.cases.talk import cuts, talking
from tests.unit.head_api.conftest import Bench, LiveServer
from tests.unit.modelfiles.templates import QWEN_LIKE

FUNCTIONS: Any = [
    {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"name": "g"},
]  # fmt: skip
CALLS = 'I look. <tool_call>\n{"name": "f", "arguments": {"city": "Ulm"}}\n</tool_call><tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


@pytest.fixture
def hermes() -> Iterator[Bench]:
    with talking("hermes", QWEN_LIKE) as bench:
        bench.fleet.say(*cuts(CALLS, 4))
        yield bench


def both(bench: Bench, **members: Any) -> list[tuple[dict[str, Any], str]]:
    """Message and finish of every choice, in both modes, which agree."""
    whole = bench.chat(**members)
    assert whole.status_code == 200, whole.text
    streamed = bench.chat(**members, stream=True).text.split("\n\n")
    found: dict[int, list[Any]] = {}
    for frame in streamed[:-2]:
        for choice in json.loads(frame[6:])["choices"]:
            message, _ = mine = found.setdefault(choice["index"], [{"content": ""}, None])
            assert mine[1] is None
            mine[1] = choice["finish_reason"]
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            call = delta.get("function_call")
            if call is not None and "name" in call:
                assert "function_call" not in message
                message["function_call"] = dict(call)
            elif call is not None:
                message["function_call"]["arguments"] += call["arguments"]
    told = []
    for choice in whole.json()["choices"]:
        message = choice["message"]
        assert "tool_calls" not in message
        shown = {name: message[name] for name in ("content", "function_call") if name in message}
        shown["content"] = shown["content"] or ""
        told.append((shown, choice["finish_reason"]))
    assert [tuple(found[index]) for index in sorted(found)] == told
    return told


def test_a_function_is_called_once_and_told_in_the_old_shape(hermes: Bench) -> None:
    call = {"name": "f", "arguments": '{"city": "Ulm"}'}
    wanted = ({"content": "I look.", "function_call": call}, "function_call")
    assert both(hermes, functions=FUNCTIONS, n=2) == [wanted, wanted]
    prompt = bytes(hermes.fleet.requests[-1].prompt).decode()
    assert '"name": "f", "description": "d"' in prompt
    assert '"name": "g"' in prompt
    assert len(hermes.fleet.stops) == 4, "nothing is generated behind the one call"


def test_a_text_is_a_text_and_none_hides_the_functions(hermes: Bench) -> None:
    ((message, finish),) = both(hermes, functions=FUNCTIONS, function_call="none")
    assert (message, finish) == ({"content": CALLS}, "stop")
    assert "<tools>" not in bytes(hermes.fleet.requests[-1].prompt).decode()
    hermes.fleet.say("Hello")
    assert both(hermes, functions=FUNCTIONS, function_call="auto") == [({"content": "Hello"}, "stop")]  # fmt: skip
    assert both(hermes, functions=[], function_call="auto") == [({"content": "Hello"}, "stop")]


def test_a_named_function_is_enforced_by_a_grammar(hermes: Bench) -> None:
    hermes.fleet.say(*cuts('<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>', 5))
    ((message, finish),) = both(hermes, functions=FUNCTIONS, function_call={"name": "g"})
    assert (message["function_call"], finish) == ({"name": "g", "arguments": "{}"}, "function_call")
    grammar = hermes.fleet.requests[-1].grammar
    assert grammar is not None
    assert '\\"name\\": \\"g\\"' in grammar.text or '"g"' in grammar.text.replace("\\", "")


def test_a_call_that_breaks_off_is_none(hermes: Bench) -> None:
    hermes.fleet.say(*cuts(CALLS[:60], 5), end=False)
    ((message, finish),) = both(hermes, functions=FUNCTIONS, max_tokens=12)
    assert finish == "length"
    assert message["function_call"]["name"] == "f"


def test_earlier_calls_and_their_results_are_tool_messages_to_the_template(hermes: Bench) -> None:
    turns: list[Any] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"city": "Ulm"}'}},
        {"role": "function", "name": "f", "content": "rain"},
    ]  # fmt: skip
    new: list[Any] = [
        turns[0],
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": turns[1]["function_call"]}]},
        {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": "rain"},
    ]  # fmt: skip
    for messages in (turns, new):
        assert hermes.chat(messages=messages).status_code == 200
    old_prompt, new_prompt = (bytes(each.prompt) for each in hermes.fleet.requests)
    assert old_prompt == new_prompt
    assert b"rain" in old_prompt
    counted = hermes.send("POST", "/tokenize", json={"messages": turns})
    assert counted.json()["tokens"] == list(old_prompt)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"functions": FUNCTIONS, "tools": [{"type": "function", "function": FUNCTIONS[0]}]}, "functions"),
    ({"functions": FUNCTIONS, "tool_choice": "auto"}, "functions"),
    ({"functions": [*FUNCTIONS, FUNCTIONS[0]]}, "functions[2].name"),
    ({"functions": [{"name": "f g"}]}, "functions[0].name"),
    ({"functions": FUNCTIONS, "function_call": {"name": "h"}}, "function_call.name"),
    ({"functions": FUNCTIONS, "function_call": "required"}, "function_call"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"functions": [{"name": "f", "parameters": {"type": "object", "not": {}}}], "function_call": {"name": "f"}}, "functions"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}, "tool_calls": [{"id": "a", "function": {"name": "f"}}]}]}, "messages[0].function_call"),
]  # fmt: skip


@pytest.mark.parametrize(("members", "param"), REFUSED)
def test_what_is_wrong_is_named_by_its_old_name(
    hermes: Bench, members: dict[str, Any], param: str
) -> None:
    response = hermes.chat(**members)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert str(error["param"]).startswith(param), error
    assert "tools[" not in error["message"]
    assert not hermes.fleet.requests


def test_the_official_client_reads_both_modes(hermes: Bench) -> None:
    words: Any = [{"role": "user", "content": "hi"}]
    with LiveServer(hermes) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="x") as client:  # fmt: skip
        create: Any = client.chat.completions.create
        asked = {"model": "org/m", "messages": words, "functions": FUNCTIONS}
        choice = create(**asked).choices[0]
        assert choice.finish_reason == "function_call"
        assert choice.message.function_call.name == "f"
        said, name = "", ""
        for chunk in create(**asked, stream=True):
            call = chunk.choices[0].delta.function_call
            said += (call.arguments or "") if call else ""
            name += (call.name or "") if call else ""
        assert (name, said) == ("f", choice.message.function_call.arguments)
