"""Tool calls as reported cases: O-07, O-09, O-11, O-14; what the head must get right about them in both modes."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import openai
import pytest

from superfluid_head.text.dialects.detect import DialectChoice
from tests.cases.talk import TOOLS, both, cuts, talking
from tests.unit.head_api.conftest import Bench, LiveServer
from tests.unit.head_text.dialect_samples import SAMPLES, Sample
from tests.unit.head_text.dialect_samples import TOOLS as SAMPLE_TOOLS
from tests.unit.modelfiles.templates import QWEN_LIKE

SAN = '<tool_call>\n{"name": "f", "arguments": {"city": "San Francisco, CA", "unit": "c"}}\n</tool_call>'
EMPTY = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


def test_o07_a_call_ends_with_one_finish_chunk_that_says_tool_calls() -> None:
    with talking("hermes") as bench:
        bench.fleet.say(*cuts(SAN, 4))
        answers = both(bench, tools=TOOLS)
        assert answers.messages[0].finish == "tool_calls"
        finishes = [c["finish_reason"] for chunk in answers.chunks for c in chunk["choices"]]
        assert [finish for finish in finishes if finish] == ["tool_calls"]


def test_o07_plain_text_ends_with_stop_and_the_budget_with_length() -> None:
    with talking("hermes") as bench:
        bench.fleet.say("Hello", " world")
        assert both(bench, tools=TOOLS).messages[0].finish == "stop"
        assert both(bench, tools=TOOLS, max_tokens=1).messages[0].finish == "length"
        bench.fleet.say(*cuts(SAN, 4))
        inside = both(bench, tools=TOOLS, max_tokens=12).messages[0]
        assert inside.finish == "length"


def test_o07_prose_where_a_call_was_asked_for_is_content_and_no_empty_list() -> None:
    """The grammar makes it impossible; should an engine do it all the same, nothing is made up."""
    with talking("hermes") as bench:
        bench.fleet.say("I would rather not.")
        answer = bench.chat(tools=TOOLS, tool_choice="auto").json()["choices"][0]
        assert answer["finish_reason"] == "stop"
        assert answer["message"]["content"] == "I would rather not."
        assert "tool_calls" not in answer["message"]


@pytest.mark.parametrize("size", [1, 3, 7, 1_000])
def test_o09_streamed_arguments_join_to_the_object_that_was_written(size: int) -> None:
    with talking("hermes") as bench:
        bench.fleet.say(*cuts(SAN + "\n" + EMPTY, size))
        answers = both(bench, tools=TOOLS)
        message = answers.messages[0]
        assert message.names == ["f", "g"]
        assert message.arguments == [{"city": "San Francisco, CA", "unit": "c"}, {}]
        assert message.calls[1]["function"]["arguments"] == "{}"
        assert message.finish == "tool_calls"
        assert answers.whole["choices"][0]["message"]["content"] is None


def test_o09_a_cut_at_the_comma_between_members_changes_nothing() -> None:
    with talking("hermes") as bench:
        head, comma, tail = SAN.partition('", "')
        bench.fleet.say(head, comma, tail)
        assert both(bench, tools=TOOLS).messages[0].arguments[0]["unit"] == "c"


def test_o11_two_calls_have_their_own_indexes_and_ids_and_the_response_one_id() -> None:
    with talking("hermes") as bench:
        bench.fleet.say("Look.\n", *cuts(SAN, 5), "\n", *cuts(EMPTY, 5))
        answers = both(bench, tools=TOOLS, n=2)
        assert len(answers.messages) == 2
        for message in answers.messages:
            assert message.content == "Look."
            assert message.names == ["f", "g"]
            assert message.finish == "tool_calls"
        ids = [call["id"] for message in answers.messages for call in message.calls]
        assert len(set(ids)) == 4
        assert all(call.startswith("call_") for call in ids)


def test_o14_a_missing_a_null_and_an_empty_content_beside_calls_render_alike() -> None:
    call = {
        "id": "6b17b9368",
        "type": "function",
        "function": {"name": "get_n", "arguments": "{}"},
    }
    turns: list[dict[str, Any]] = [{"content": None}, {}, {"content": ""}]
    prompts = []
    with talking("qwen3", QWEN_LIKE) as bench:
        for turn in turns:
            messages = [
                {"role": "user", "content": "n?"},
                {"role": "assistant", "tool_calls": [call], **turn},
                {"role": "tool", "tool_call_id": "6b17b9368", "content": "42.69"},
            ]
            assert bench.chat(messages=messages).status_code == 200
            prompts.append(bytes(bench.fleet.requests[-1].prompt).decode())
    assert len(set(prompts)) == 1
    assert '<tool_call>\n{"name": "get_n", "arguments": {}}\n</tool_call>' in prompts[0]
    assert "<tool_response>\n42.69\n</tool_response>" in prompts[0]


def test_what_the_server_answers_is_taken_back_as_history() -> None:
    with talking("qwen3", QWEN_LIKE) as bench:
        bench.fleet.say(*cuts("<think>hm</think>" + SAN, 6))
        message = bench.chat(tools=TOOLS).json()["choices"][0]["message"]
        call = message["tool_calls"][0]["id"]
        messages = [
            {"role": "user", "content": "w?"},
            message,
            {"role": "tool", "tool_call_id": call, "content": [{"type": "text", "text": "21 C"}]},
        ]
        response = bench.chat(messages=messages, tools=TOOLS)
        assert response.status_code == 200
        prompt = bytes(bench.fleet.requests[-1].prompt).decode()
        assert '"city": "San Francisco, CA"' in prompt
        assert '"name": "f"' in prompt.partition("</tools>")[0]
        bench.chat(messages=messages, tools=TOOLS, tool_choice="none")
        assert "<tools>" not in bytes(bench.fleet.requests[-1].prompt).decode()


def test_with_tool_choice_none_markup_is_plain_content() -> None:
    with talking("hermes") as bench:
        bench.fleet.say(*cuts(EMPTY, 3))
        message = both(bench, tools=TOOLS, tool_choice="none").messages[0]
        assert (message.content, message.calls, message.finish) == (EMPTY, [], "stop")


@pytest.mark.parametrize(
    "sample", [each for each in SAMPLES if each.calls], ids=lambda each: each.name
)
def test_without_parallel_calls_generation_ends_with_the_first_one(sample: Sample) -> None:
    """In every format, at the token that completes the call: nothing of what follows is asked for, counted or delivered."""
    calls, reasoning = sample.dialect.calls or "none", sample.dialect.reasoning or "none"
    tools = [
        {"type": "function", "function": {"name": tool.name, "parameters": {"type": "object"}}}
        for tool in SAMPLE_TOOLS.values()
    ]
    tokens = cuts(sample.text, 3)
    bench = Bench(dialects=DialectChoice("none", calls, reasoning))
    with contextlib.closing(bench.workers):
        bench.fleet.say(*tokens, "more", " and", " more", *tokens)
        members: dict[str, Any] = {"tools": tools, "logprobs": True, "max_tokens": 2_000}
        answers = both(bench, **members, parallel_tool_calls=False, return_token_ids=True)
        (message,), used = answers.messages, answers.usage["completion_tokens"]
        free = both(bench, **members).messages[0]
    assert (len(message.calls), message.finish) == (1, "tool_calls")
    assert message.bare()[2] == free.bare()[2][:1]
    assert free.reasoning.startswith(message.reasoning)
    assert free.content.startswith(message.content)
    assert bench.fleet.stops == [used, used]
    assert used <= len(tokens)
    assert len(message.logprobs) == used == len(answers.whole["choices"][0]["token_ids"])


def test_without_parallel_calls_the_second_one_is_not_delivered() -> None:
    with talking("hermes") as bench:
        bench.fleet.say(*cuts(SAN + EMPTY, 9))
        message = both(bench, tools=TOOLS, parallel_tool_calls=False).messages[0]
        assert (message.names, message.content, message.finish) == (["f"], "", "tool_calls")


def test_a_call_that_breaks_off_is_never_flagged_as_one() -> None:
    with talking("hermes") as bench:
        bench.fleet.say(*cuts(SAN[:60], 5))
        message = both(bench, tools=TOOLS).messages[0]
        assert message.finish == "stop"
        with pytest.raises(json.JSONDecodeError):
            assert message.arguments
        bench.fleet.say(*cuts(SAN[:20], 5))
        message = both(bench, tools=TOOLS).messages[0]
        assert (message.finish, message.calls, message.content) == ("stop", [], SAN[:20])


def test_stop_strings_look_at_content_only() -> None:
    with talking("qwen3") as bench:
        bench.fleet.say(*cuts("<think>a STOP b</think>Yes STOPPED", 2))
        message = both(bench, tools=TOOLS, stop=["STOP"]).messages[0]
        assert (message.reasoning, message.content) == ("a STOP b", "Yes ")
        stopped = '<tool_call>{"name": "f", "arguments": {"city": "STOP"}}</tool_call>'
        bench.fleet.say(*cuts(stopped, 2))
        message = both(bench, tools=TOOLS, stop=["STOP", "</tool_call>"]).messages[0]
        assert message.arguments == [{"city": "STOP"}]
        assert message.finish == "tool_calls"


def test_logprobs_ride_with_the_text_that_they_belong_to() -> None:
    text = "<think>ab</think>cd" + EMPTY
    with talking("qwen3") as bench:
        bench.fleet.say(*cuts(text, 3))
        answers = both(bench, tools=TOOLS, logprobs=True)
        spelled = b"".join(bytes(entry["bytes"]) for entry in answers.messages[0].logprobs)
        assert spelled.decode() == text


def test_ids_follow_the_model_where_its_template_prescribes_them() -> None:
    with talking("kimi_k2") as bench:
        bench.fleet.say(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
            '{"city": "P"}', "<|tool_call_end|><|tool_calls_section_end|>",
        )  # fmt: skip
        assert both(bench, tools=TOOLS).messages[0].calls[0]["id"] == "functions.f:0"
    with talking("mistral") as bench:
        bench.fleet.say('[TOOL_CALLS][{"name": "f", "arguments": {}}]')
        made = both(bench, tools=TOOLS).messages[0].calls[0]["id"]
        assert len(made) == 9
        assert made.isalnum()


def test_markers_that_are_hidden_special_tokens_are_still_heard() -> None:
    with talking("mistral_v11") as bench:
        ids = {bench.tokenizer.piece(marker) for marker in ("[TOOL_CALLS]", "[ARGS]")}
        bench.tokenizer.special_ids = bench.tokenizer.special_ids | ids
        bench.fleet.say("Ok", "[TOOL_CALLS]", "f", "[ARGS]", '{"city": ', '"[ARGS]"', "}")
        message = both(bench, tools=TOOLS).messages[0]
        assert (message.content, message.arguments) == ("Ok", [{"city": "[ARGS]"}])
        bench.fleet.say("[TOOL", "_CALLS]f[A", "RGS]{}")
        assert both(bench, tools=TOOLS).messages[0].content == "[TOOL_CALLS]f[ARGS]{}"


def test_the_official_client_reads_calls_whole_raw_and_with_its_strict_helper() -> None:
    tools: Any = TOOLS
    messages: Any = [{"role": "user", "content": "hi"}]
    text = "<think>hm</think>Look. " + SAN + EMPTY
    with talking("qwen3") as bench, LiveServer(bench) as server:
        bench.fleet.say(*cuts(text, 4))
        with openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0) as client:
            options: Any = {"model": "org/m", "messages": messages, "tools": tools}
            whole = client.chat.completions.create(**options, n=2)
            for choice in whole.choices:
                calls: Any = choice.message.tool_calls
                assert [call.function.name for call in calls] == ["f", "g"]
                assert choice.finish_reason == "tool_calls"
            joined: dict[tuple[int, int], str] = {}
            for chunk in client.chat.completions.create(**options, n=2, stream=True):
                for each in chunk.choices:
                    for part in each.delta.tool_calls or []:
                        key = (each.index, part.index)
                        joined[key] = joined.get(key, "") + (part.function.arguments or "")
            assert sorted(joined) == [(0, 0), (0, 1), (1, 0), (1, 1)]
            assert json.loads(joined[1, 0])["city"] == "San Francisco, CA"
            with client.chat.completions.stream(**options, n=2) as stream:
                seen = [event.type for event in stream]
                final = stream.get_final_completion()
            assert seen.count("tool_calls.function.arguments.done") == 4
            message: Any = final.choices[1].message
            assert [call.function.arguments for call in message.tool_calls][1] == "{}"
            assert message.content == "Look."
            assert message.reasoning_content == "hm"
            assert final.usage is None or final.usage.completion_tokens_details is not None


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [TOOLS[0], {"type": "function"}]}, "tools[1].function"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": 1}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [TOOLS[0], TOOLS[1], TOOLS[0]]}, "tools[2].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools[0].function.parameters"),
        ({"tools": [None]}, "tools[0]"),
        ({"tools": "f"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}, "tools": TOOLS}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "h"}}]}}, "tools": TOOLS}, "tool_choice.allowed_tools.tools"),
        ({"parallel_tool_calls": "yes", "tools": TOOLS}, "parallel_tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}]}]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0]"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_tools_are_refused_by_name_before_the_first_byte(
    members: dict[str, Any], param: str, stream: bool
) -> None:
    with talking("hermes") as bench:
        response = bench.chat(**members, stream=stream)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
        assert not bench.fleet.requests


def test_a_model_that_cannot_call_is_not_asked_to() -> None:
    with talking("none") as bench:
        response = bench.chat(tools=TOOLS)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
        assert bench.chat(tools=TOOLS, tool_choice="none").status_code == 200
        assert bench.chat(tools=[]).status_code == 200


def test_only_allowed_tools_are_heard() -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}
    with talking("hermes") as bench:
        bench.fleet.say(SAN, EMPTY)
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        message = both(bench, tools=TOOLS, tool_choice=choice).messages[0]
        assert (message.names, message.content) == (["g"], SAN)


def test_a_required_and_a_named_call_are_enforced_by_a_grammar() -> None:
    with talking("hermes") as bench:
        bench.fleet.say(*cuts(SAN, 5))
        for choice, names in (
            ("required", ("f", "g")),
            ({"type": "function", "function": {"name": "f"}}, ("f",)),
        ):
            message = both(bench, tools=TOOLS, tool_choice=choice).messages[0]
            assert (message.names, message.finish) == (["f"], "tool_calls")
            grammar = bench.fleet.requests[-1].grammar
            assert grammar is not None
            asked = [name for name in ("f", "g") if f'\\"name\\": \\"{name}\\"' in grammar.text]
            assert tuple(asked) == names
        both(bench, tools=TOOLS)
        assert bench.fleet.requests[-1].grammar is None


def test_a_schema_that_cannot_be_enforced_is_refused_where_it_would_have_to_be() -> None:
    spec = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "strin"}}}}
    tools = [{"type": "function", "function": spec}]
    with talking("hermes") as bench:
        response = bench.chat(tools=tools, tool_choice="required")
        assert response.status_code == 400, response.text
        assert response.json()["error"]["code"] == "invalid_schema"
        assert response.json()["error"]["param"] == "tools"
        bench.fleet.say("fine")
        assert bench.chat(tools=tools).status_code == 200


def test_templates_see_tools_as_they_were_sent() -> None:
    tool = {
        "function": {"x": 1, "parameters": None, "name": "f", "strict": None},
        "type": "function",
    }
    template = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    with talking("hermes", template) as bench:
        assert bench.chat(tools=[tool]).status_code == 200
        prompt = bytes(bench.fleet.requests[-1].prompt)
        assert prompt == b'{"function": {"x": 1, "name": "f"}, "type": "function"}hi'
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "org/m", "messages": messages, "tools": [tool]}
        counted = bench.send("POST", "/tokenize", json=body).json()
        assert counted["count"] == len(prompt)
