"""Reasoning as reported cases: OX-3, and the rules Q1 to Q7 of http_api.md 11, in both modes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.talk import both, cuts, talking
from tests.unit.modelfiles.templates import QWEN_LIKE

OPENED = "{% for m in messages %}{{ m.content }}\n{% endfor %}<assistant><think>\n"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 17])
def test_ox3_reasoning_and_content_are_told_apart_however_tokens_are_cut(size: int) -> None:
    with talking("qwen3") as bench:
        bench.fleet.say(*cuts("<think>a</think>b", size))
        message = both(bench).messages[0]
        assert (message.reasoning, message.content, message.finish) == ("a", "b", "stop")
    with talking("qwen3", OPENED) as bench:
        bench.fleet.say(*cuts("a</think>b", size))
        message = both(bench).messages[0]
        assert (message.reasoning, message.content) == ("a", "b")


def test_ox3_the_pieces_of_the_report() -> None:
    with talking("qwen3") as bench:
        bench.fleet.say("<think>", "a", "</", "think", ">", "b")
        answers = both(bench)
        deltas = [c["delta"] for chunk in answers.chunks for c in chunk["choices"]]
        assert [d for d in deltas if d and "role" not in d] == [
            {"reasoning_content": "a"},
            {"content": "b"},
        ]


def test_thinking_that_the_template_switched_off_starts_in_content() -> None:
    """The prompt ends with an empty closed block (Q3); earlier turns with blocks do not matter."""
    with talking("qwen3", QWEN_LIKE) as bench:
        bench.fleet.say("<think>", "x</think>y")
        off = both(bench, chat_template_kwargs={"enable_thinking": False}).messages[0]
        assert (off.reasoning, off.content) == ("", "<think>x</think>y")
        turns = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "<think>t</think>a"},
            {"role": "user", "content": "r </think>"},
        ]
        on = both(bench, messages=turns).messages[0]
        assert (on.reasoning, on.content) == ("x", "y")


def test_a_block_that_the_budget_ends_is_all_reasoning() -> None:
    with talking("qwen3") as bench:
        bench.fleet.say("<think>", "on ", "and ", "on", end=False)
        message = both(bench, max_tokens=4).messages[0]
        assert (message.reasoning, message.content, message.finish) == ("on and on", "", "length")


def test_usage_counts_reasoning_and_tells_how_much_of_it_there_was() -> None:
    with talking("qwen3") as bench:
        bench.fleet.say("<think>", "a", "b", "c", "</think>", "d", "e")
        usage = both(bench).usage
        assert usage["completion_tokens"] == 8
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 3}
        bench.fleet.say("plain")
        assert both(bench).usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    with talking("hermes") as bench:
        assert "completion_tokens_details" not in both(bench).usage


def test_reasoning_has_a_second_name_when_asked_for_and_can_be_left_out() -> None:
    with talking("qwen3", is_reasoning_doubled=True) as bench:
        bench.fleet.say("<think>", "a", "</think>", "b")
        message = bench.chat().json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["reasoning"]) == ("a", "a")
        for answer in (both(bench, include_reasoning=False), both(bench)):
            named = "reasoning" in answer.whole["choices"][0]["message"]
            assert named == any(
                "reasoning" in c["delta"] for k in answer.chunks for c in k["choices"]
            )
        assert both(bench, include_reasoning=False).messages[0].bare()[:2] == ("b", "")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_earlier_reasoning_is_taken_under_both_names(name: str) -> None:
    template = "{% for m in messages %}[{{ m.role }}|{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    with talking("qwen3", template) as bench:
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a", name: "t"},
            {"role": "user", "content": "r"},
        ]
        assert bench.chat(messages=turns).status_code == 200
        assert b"[assistant|t|a]" in bytes(bench.fleet.requests[-1].prompt)


def test_a_continued_message_goes_on_in_the_block_it_was_in() -> None:
    with talking("qwen3", "{% for m in messages %}{{ m.content }}{% endfor %}") as bench:
        bench.fleet.say("b", "</think>", "c")
        user = {"role": "user", "content": "q"}
        inside = [user, {"role": "assistant", "content": "<think>a"}]
        message = both(bench, messages=inside, continue_final_message=True).messages[0]
        assert (message.reasoning, message.content) == ("b", "c")
        behind = [user, {"role": "assistant", "content": "<think>a</think>x"}]
        message = both(bench, messages=behind, continue_final_message=True).messages[0]
        assert (message.reasoning, message.content) == ("", "b</think>c")


def test_harmony_channels_become_reasoning_content_and_calls() -> None:
    from tests.cases.talk import TOOLS

    text = (
        "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"city": "P"}'
    )
    with talking("gpt_oss") as bench:
        for size in (1, 5, 400):
            bench.fleet.say(*cuts(text, size))
            message = both(bench, tools=TOOLS).messages[0]
            assert (message.reasoning, message.content) == ("think", "")
            assert (message.arguments, message.finish) == ([{"city": "P"}], "tool_calls")
