"""What models of each family write, made up for these tests, and what is meant by it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from superfluid_head.text.dialects.dialect import Dialect, Reading
from superfluid_head.text.dialects.events import (
    CallEnd,
    CallStart,
    CallText,
    Content,
    Event,
    Reasoning,
    Tool,
)
from superfluid_head.text.dialects.thinking import Opening

TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "get_weather",
            {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"type": ["string", "null"]},
                    "deep": {"type": "object"},
                    "ok": {"type": "boolean"},
                },
                "required": ["city"],
            },
        ),
        Tool("now"),
    )
}


@dataclass
class Call:
    """A call as a client would put it together."""

    name: str
    text: str = ""
    id: str | None = None
    is_complete: bool = False

    @property
    def value(self) -> Any:
        return json.loads(self.text)


@dataclass
class Parsed:
    """Everything that a reader said, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def joined(events: Iterable[Event]) -> Parsed:
    """Put together what a reader said."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[Call] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case Content():
                content.append(event.text)
            case Reasoning():
                reasoning.append(event.text)
            case CallStart():
                calls.append(Call(event.name, id=event.id))
                arguments.append([])
            case CallText():
                arguments[-1].append(event.text)
            case CallEnd():
                calls[-1].is_complete = event.is_complete
    for call, parts in zip(calls, arguments, strict=True):
        call.text = "".join(parts)
    return Parsed("".join(content), "".join(reasoning), calls)


def parse(
    dialect: Dialect, pieces: Iterable[str], singles: frozenset[str] = frozenset(), **reading: Any
) -> Parsed:
    """Feed pieces one by one; a piece that is one of `singles` is that token."""
    reader = dialect.reader(Reading(**{"tools": TOOLS, "singles": singles, **reading}))
    assert reader is not None
    said: list[Event] = []
    for piece in pieces:
        said += reader.feed(piece, is_single=piece in singles)
    return joined([*said, *reader.finish()])


@dataclass(frozen=True)
class Sample:
    """A text of a family, cut at its tokens, and its meaning."""

    name: str
    dialect: Dialect
    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    content: str = ""
    reasoning: str = ""
    ids: tuple[str, ...] = ()
    opening: Opening = Opening.FRESH


PARIS = {"city": "Paris"}
FULL = {"city": 'San "F" {x}', "days": 3, "deep": {"a": [1, {"b": None}]}}
FULL_JSON = '{"city": "San \\"F\\" {x}", "days": 3, "deep": {"a": [1, {"b": null}]}}'
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
CALLS, NO_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
D = "｜DSML｜"

SAMPLES = (
    Sample(
        "hermes",
        Dialect("hermes"),
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": ' + FULL_JSON + "}\n</tool_call>\n"
        '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>',
        (("get_weather", FULL), ("get_weather", PARIS)),
        "I look.\n",
    ),
    Sample(
        "hermes without arguments",
        Dialect("hermes"),
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>{"name": "now"}</tool_call>',
        (("now", {}), ("now", {})),
    ),
    Sample(
        "hermes with its own marker in a string",
        Dialect("hermes"),
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "</tool_call> \\u00e9\\ud83d\\ude00 \\\\"}}\n</tool_call> after',
        (("get_weather", {"city": "</tool_call> é😀 \\"}),),
        "after",
    ),
    Sample(
        "qwen3",
        Dialect("hermes", "think"),
        '<think>\nUse <tool_call>?\n</think>\n\nSure.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        (("now", {}),),
        "Sure.\n",
        "Use <tool_call>?\n",
    ),
    Sample(
        "qwen3 whose template opened the block",
        Dialect("hermes", "think"),
        "Hm, 2.\n</think>\n\nIt is 2. <think> is a tag.",
        (),
        "It is 2. <think> is a tag.",
        "Hm, 2.\n",
        opening=Opening.INSIDE,
    ),
    Sample(
        "qwen3_coder",
        Dialect("qwen3_coder"),
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nline 1\n\"q\" <b>\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=units>\nnull\n</parameter>\n<parameter=deep>\n{\"a\": [1]}\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        (
            ("get_weather", {"city": 'line 1\n"q" <b>\n', "days": 3, "units": None, "deep": {"a": [1]}}),
            ("now", {}),
        ),
    ),
    Sample(
        "qwen3_coder without the outer tag",
        Dialect("qwen3_coder"),
        "So:\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=extra>\n[1, 2]\n</parameter>\n</function>",
        (("get_weather", {"city": "Paris", "extra": [1, 2]}),),
        "So:\n",
    ),
    Sample(
        "llama3_json",
        Dialect("llama3_json"),
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
        (("get_weather", PARIS), ("now", {})),
    ),
    Sample(
        "llama3_json that is an answer",
        Dialect("llama3_json"),
        '{"answer": {"name": "now"}} and more',
        (),
        '{"answer": {"name": "now"}} and more',
    ),
    Sample(
        "pythonic",
        Dialect("pythonic"),
        "[get_weather(city='S\\'F', days=3, deep={'a': [True, None, (1, -2.5)]}), now()]",
        (("get_weather", {"city": "S'F", "days": 3, "deep": {"a": [True, None, [1, -2.5]]}}), ("now", {})),
    ),
    Sample(
        "llama4",
        Dialect("pythonic"),
        '<|python_start|>[get_weather(city="Paris")]<|python_end|>',
        (("get_weather", PARIS),),
    ),
    Sample("pythonic that is a list", Dialect("pythonic"), "[1, 2] is a list", (), "[1, 2] is a list"),
    Sample(
        "mistral",
        Dialect("mistral"),
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": ' + FULL_JSON + '}, {"name": "now", "id": "abcdefghi", "arguments": {}}]',
        (("get_weather", FULL), ("now", {})),
        ids=("", "abcdefghi"),
    ),
    Sample(
        "mistral_v11",
        Dialect("mistral_v11", "magistral"),
        '[THINK]hm[/THINK]Wait.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}',
        (("get_weather", PARIS), ("now", {})),
        "Wait.",
        "hm",
        ids=("", "abcdefghi"),
    ),
    Sample(
        "deepseek_v3",
        Dialect("deepseek_v3", "think"),
        f"<think>\nso\n</think>\n\nOk{CALLS}{BEGIN}function{SEP}get_weather\n```json\n{FULL_JSON}\n```{END}\n"
        f"{BEGIN}function{SEP}now\n```json\n{{}}\n```{END}{NO_CALLS}",
        (("get_weather", FULL), ("now", {})),
        "Ok",
        "so\n",
    ),
    Sample(
        "deepseek_v31",
        Dialect("deepseek_v31", "think"),
        f'Ok{CALLS}{BEGIN}get_weather{SEP}{{"city": "Paris"}}{END}{BEGIN}now{SEP}{{}}{END}{NO_CALLS}',
        (("get_weather", PARIS), ("now", {})),
        "Ok",
    ),
    Sample(
        "deepseek_v32",
        Dialect("deepseek_v32", "think"),
        f'<{D}function_calls>\n<{D}invoke name="get_weather">\n<{D}parameter name="city" string="true"> New\nYork </{D}parameter>\n'
        f'<{D}parameter name="deep" string="false">{{"a": 1}}</{D}parameter>\n</{D}invoke>\n<{D}invoke name="now">\n</{D}invoke>\n'
        f"</{D}function_calls>",
        (("get_weather", {"city": " New\nYork ", "deep": {"a": 1}}), ("now", {})),
    ),
    Sample(
        "deepseek_v4",
        Dialect("deepseek_v4", "think"),
        f'a</think>b\n\n<{D}tool_calls>\n<{D}invoke name="now">\n</{D}invoke>\n</{D}tool_calls>',
        (("now", {}),),
        "b\n\n",
        "a",
        opening=Opening.INSIDE,
    ),
    Sample(
        "glm",
        Dialect("glm", "think"),
        "<think>x</think>\nOk\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>New York</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call><tool_call>get_weather<arg_key>city</arg_key>"
        "<arg_value>12</arg_value></tool_call><tool_call>now</tool_call>",
        (
            ("get_weather", {"city": "New York", "days": 3}),
            ("now", {}),
            ("get_weather", {"city": "12"}),
            ("now", {}),
        ),
        "Ok\n",
        "x",
    ),
    Sample(
        "kimi_k2",
        Dialect("kimi_k2", "think"),
        'On it.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}'
        "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        (("get_weather", PARIS), ("now", {})),
        "On it.",
        ids=("functions.get_weather:0", "functions.now:1"),
    ),
    Sample(
        "harmony",
        Dialect("harmony", "harmony"),
        "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        (("get_weather", PARIS),),
        "I look.",
        "Need weather.",
    ),
    Sample(
        "harmony with the recipient first",
        Dialect("harmony", "harmony"),
        ' to=functions.get_weather<|channel|>commentary<|message|>{"city":"Paris","days":3}',
        (("get_weather", {"city": "Paris", "days": 3}),),
    ),
    Sample(
        "harmony that answers",
        Dialect("harmony", "harmony"),
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>It is {1}.<|return|>",
        (),
        "It is {1}.",
        "a",
    ),
    Sample(
        "granite",
        Dialect("granite", "granite"),
        'Here is my thought process: think think\n\nHere is my response: Fine. <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        (("get_weather", PARIS),),
        "Fine. ",
        "think think\n\n",
    ),
    Sample(
        "granite_v31",
        Dialect("granite_v31"),
        '<tool_call>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
        (("now", {}), ("now", {})),
    ),
    Sample(
        "granite function calling",
        Dialect("granite"),
        '<function_call> {"name": "get_weather", "arguments": {"city": "Paris"}}',
        (("get_weather", PARIS),),
    ),
    Sample(
        "minimax_m2",
        Dialect("minimax_m2", "think"),
        'a\n</think>\n\nOk\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">San Francisco</parameter>\n'
        '<parameter name="ok">true</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        (("get_weather", {"city": "San Francisco", "ok": True}), ("now", {})),
        "Ok\n",
        "a\n",
        opening=Opening.INSIDE,
    ),
    Sample(
        "gemma4",
        Dialect("gemma4", "gemma4"),
        '<|channel>thought\nhm<channel|>Ok<|tool_call>call:get_weather{city: <|"|>Paris, "F"<|"|>, days: 3, deep: {a: [true, <|"|>x<|"|>]}}'
        "<tool_call|><|tool_call>call:now{}<tool_call|>",
        (("get_weather", {"city": 'Paris, "F"', "days": 3, "deep": {"a": [True, "x"]}}), ("now", {})),
        "Ok",
        "hm",
    ),
    Sample(
        "seed_oss",
        Dialect(None, "seed_oss"),
        "<seed:think>one</seed:think>two",
        (),
        "two",
        "one",
    ),
)  # fmt: skip
