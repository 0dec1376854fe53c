"""Prompts of chat templates, compared with transformers' apply_chat_template."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from superfluid_core.modelfiles.resolve import ModelFiles
from superfluid_core.modelfiles.template import ChatTemplate
from superfluid_core.modelfiles.text_model import TOKENIZER
from superfluid_core.modelfiles.tokenizer import TextSettings, Tokenizer
from tests.unit.modelfiles.templates import SOURCES, SPECIALS
from tests.unit.modelfiles.vocabularies import byte_level_json

pytestmark = [pytest.mark.reference, pytest.mark.slow]

WEATHER: dict[Any, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city, in °C & <b>plain</b> words",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Zürich"}},
        }
    ],
}
PLAIN = [
    {"role": "user", "content": "  Hello, wörld 😀\n"},
    {"role": "assistant", "content": " Hi there! "},
    {"role": "user", "content": "<think>no</think> 1234 'quoted' \\ \"x\""},
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": PLAIN[:1],
    "turns": PLAIN,
    "system": [{"role": "system", "content": "Be brief. "}, *PLAIN],
    "tools": [
        PLAIN[0],
        CALL,
        {"role": "tool", "tool_call_id": "call_1", "content": '{"t": 21.5}'},
    ],
    "thought": [PLAIN[0], {"role": "assistant", "content": "<think>x</think>\n\nyes"}, PLAIN[2]],
}


def pair(name: str, demo: ModelFiles) -> tuple[ChatTemplate, Tokenizer, Any]:
    """Ours and theirs over the same tokenizer.json and template."""
    if name == "demo":
        data, ours = demo.text_files()[TOKENIZER], demo.template()
        assert ours is not None
        tokenizer = demo.tokenizer()
        bos, eos, source = "<|im_start|>", "<|im_end|>", ours.source
    else:
        specials = SPECIALS[name]
        bos, eos, source = specials[0], specials[-1 if name != "mistral" else 1], SOURCES[name]
        data = byte_level_json(**{text: {"special": True} for text in specials})
        tokenizer = Tokenizer(data, TextSettings(bos_text=bos, eos_text=eos))
        ours = ChatTemplate(source, bos=bos, eos=eos, specials=tokenizer.special_texts)
    build: Any = PreTrainedTokenizerFast
    theirs: Any = build(
        tokenizer_object=tokenizers.Tokenizer.from_str(data.decode()),
        bos_token=bos,
        eos_token=eos,
        chat_template=source,
    )
    return ours, tokenizer, theirs


def can_show(name: str, conversation: str) -> bool:
    """Whether a family's template knows what is in a conversation."""
    return not (
        (name == "mistral" and conversation in ("system", "tools"))
        or (name == "demo" and conversation == "tools")
    )


CASES = [
    (name, conversation)
    for name in ("demo", "qwen", "llama3", "mistral")
    for conversation in CONVERSATIONS
    if can_show(name, conversation)
]


@pytest.mark.parametrize(("name", "conversation"), CASES)
def test_prompts_and_ids_equal_those_of_transformers(
    name: str, conversation: str, demo: ModelFiles
) -> None:
    ours, tokenizer, theirs = pair(name, demo)
    messages = CONVERSATIONS[conversation]
    tools = [WEATHER] if conversation == "tools" else None
    for prompt in (True, False):
        rendered = ours.render(messages, tools=tools, add_generation_prompt=prompt)
        their_text = theirs.apply_chat_template(
            copy.deepcopy(messages), tools=tools, add_generation_prompt=prompt, tokenize=False
        )
        assert rendered.text == their_text
        their_ids = theirs(their_text, add_special_tokens=False)["input_ids"]
        assert rendered.encode(tokenizer) == their_ids


@pytest.mark.parametrize("name", ["demo", "qwen", "llama3", "mistral"])
def test_continued_messages_equal_those_of_transformers(name: str, demo: ModelFiles) -> None:
    ours, _, theirs = pair(name, demo)
    messages = [PLAIN[0], {"role": "assistant", "content": "The answer is"}]
    rendered = ours.render(messages, continue_final_message=True)
    assert rendered.text == theirs.apply_chat_template(
        messages, tokenize=False, continue_final_message=True
    )
    assert rendered.text.endswith("The answer is")


def test_template_arguments_reach_the_template_as_in_transformers(demo: ModelFiles) -> None:
    for name, kwargs in (
        ("qwen", {"enable_thinking": False}),
        ("llama3", {"date_string": "today"}),
    ):
        ours, _, theirs = pair(name, demo)
        assert ours.render(PLAIN, kwargs=kwargs).text == theirs.apply_chat_template(
            PLAIN, tokenize=False, add_generation_prompt=True, **kwargs
        )
