"""How each family writes calls and reasoning is read, however its text is cut (http_api 10 and 11; O-09, OX-3)."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from superfluid_head.text.dialects.dialect import CALL_PARSERS, Dialect, Reading
from superfluid_head.text.dialects.events import CallText, Content
from superfluid_head.text.dialects.thinking import Opening
from tests.unit.head_text.dialect_samples import PARIS, SAMPLES, TOOLS, Parsed, Sample, parse

CUTS_MAX = int(os.environ.get("SUPERFLUID_TEST_CUTS", "12"))


def read(sample: Sample, pieces: list[str], singles: frozenset[str] = frozenset()) -> Parsed:
    return parse(sample.dialect, pieces, singles, opening=sample.opening)


def with_singles(sample: Sample) -> tuple[list[str], frozenset[str]]:
    """Cut a sample so that every marker of its dialect is one token."""
    singles = frozenset(m for m in sample.dialect.markers if m in sample.text)
    pieces, rest = [], sample.text
    while rest:
        found = [(rest.find(m), -len(m), m) for m in singles if m in rest]
        at, _, marker = min(found, default=(len(rest), 0, ""))
        pieces += [*rest[:at], *([marker] if marker else [])]
        rest = rest[at + len(marker) :]
    return pieces, singles


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_a_text_of_each_family_means_what_it_should(sample: Sample) -> None:
    parsed = read(sample, [sample.text])
    assert [(call.name, call.value) for call in parsed.calls] == list(sample.calls)
    assert parsed.content == sample.content
    assert parsed.reasoning == sample.reasoning
    assert all(call.is_complete for call in parsed.calls)
    if sample.ids:
        assert [call.id or "" for call in parsed.calls] == list(sample.ids)


def test_every_format_has_a_sample() -> None:
    assert {sample.dialect.calls for sample in SAMPLES} >= set(CALL_PARSERS)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_one_character_at_a_time_means_the_same(sample: Sample) -> None:
    assert read(sample, list(sample.text)) == read(sample, [sample.text])


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_markers_that_are_single_tokens_mean_the_same(sample: Sample) -> None:
    pieces, singles = with_singles(sample)
    assert read(sample, pieces, singles) == read(sample, [sample.text])


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_every_cut_in_two_means_the_same(sample: Sample) -> None:
    whole = read(sample, [sample.text])
    for at in range(1, len(sample.text)):
        assert read(sample, [sample.text[:at], sample.text[at:]]) == whole


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_a_text_that_ends_early_is_read_alike_however_it_is_cut(sample: Sample) -> None:
    """Wherever the budget ends the text: nothing is lost, and a call that is not whole is not said to be."""
    for end in range(0, len(sample.text), 3):
        text = sample.text[:end]
        parsed = read(sample, [text])
        assert read(sample, list(text)) == parsed
        for call in parsed.calls:
            if call.is_complete:
                assert isinstance(call.value, dict)
        assert all(call.is_complete for call in parsed.calls[:-1])


WORDS = (
    '<tool_call>', '</tool_call>', '\n', ' ', '{"name": "now"', ', "arguments": {', '}', ']', '[', '{', '"', "\\", '\\ud83d', '\\ude00',
    '\\u00e9', ': ', ', ', '1', '-2.5e3', 'true', '<function=now>', '<function=get_weather>', '<parameter=city>', '<parameter=days>',
    '</parameter>', '</function>', '<think>', '</think>', 'word', 'é', '😀', '[TOOL_CALLS]', '[ARGS]', 'now', 'get_weather(', 'city=',
    "'x'", ')', '<|python_tag|>', '<|channel|>', '<|message|>', 'analysis', 'final', ' to=functions.now', '<|start|>', '<|end|>', '<|call|>',
    '<|tool_call>', 'call:now', '<tool_call|>', '<|"|>', '<arg_key>', '</arg_key>', '<arg_value>', '</arg_value>', '<invoke name="now">',
    '</invoke>', '<minimax:tool_call>', '</minimax:tool_call>', '<｜tool▁calls▁begin｜>', '<｜tool▁call▁begin｜>', '<｜tool▁sep｜>', '<|tool_call|>',
    '<｜tool▁call▁end｜>', 'function', '```json', '```', '<|tool_calls_section_begin|>', '<|tool_call_begin|>functions.now:0',
    '<|tool_call_argument_begin|>', '<|tool_call_end|>', '<｜DSML｜function_calls>', '<｜DSML｜invoke name="now">', '</｜DSML｜invoke>', '; ',
)  # fmt: skip
DIALECTS = [
    *(Dialect(name, "think") for name in CALL_PARSERS if name != "harmony"),
    Dialect("harmony", "harmony"), Dialect("gemma4", "gemma4"), Dialect("granite", "granite"), Dialect("mistral_v11", "magistral"),
]  # fmt: skip


def split(text: str, sizes: list[int]) -> list[str]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [piece for piece in (*pieces, text[at:]) if piece]


@pytest.mark.parametrize(
    "dialect", DIALECTS, ids=lambda dialect: f"{dialect.calls}+{dialect.reasoning}"
)
@settings(max_examples=CUTS_MAX, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_however_any_text_is_cut_it_means_the_same(dialect: Dialect, data: Any) -> None:
    base = data.draw(
        st.sampled_from([s.text for s in SAMPLES if s.dialect.calls == dialect.calls] or [""])
    )
    words = data.draw(st.lists(st.sampled_from(WORDS), max_size=12))
    at = data.draw(st.integers(0, len(base)))
    drop = data.draw(st.integers(0, 4))
    text = base[:at] + "".join(words) + base[at + drop :]
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=60))
    options = {
        "opening": data.draw(st.sampled_from(Opening)),
        "calls_max": data.draw(st.sampled_from([None, 1])),
    }
    whole = parse(dialect, [text], **options)
    assert parse(dialect, split(text, sizes), **options) == whole
    assert parse(dialect, list(text), **options) == whole
    for call in whole.calls:
        if call.is_complete:
            assert isinstance(call.value, dict)


@pytest.mark.parametrize(
    "text",
    [
        "Say <tool_call> please",
        '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "argum',
        '<tool_call>\n{"name": 1}\n</tool_call>',
        '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>',
        "<tool_call>",
        'x <tool_call>{"name": "now", "arguments": [1]}',
    ],
)
def test_markup_that_is_no_call_is_content_to_the_last_character(text: str) -> None:
    parsed = parse(Dialect("hermes"), list(text))
    assert parsed == Parsed(content=text)


def test_a_call_that_breaks_off_after_its_name_was_told_is_not_complete() -> None:
    parsed = parse(
        Dialect("hermes"), ['<tool_call>{"name": "get_weather", "arguments": {"city": "Par']
    )
    assert [(call.name, call.text, call.is_complete) for call in parsed.calls] == [
        ("get_weather", '{"city": "Par', False)
    ]
    bad = '<tool_call>{"name": "get_weather", "arguments": {"city": "P", oops}}</tool_call>'
    parsed = parse(Dialect("hermes"), [bad])
    assert not parsed.calls[0].is_complete
    assert parsed.calls[0].text + parsed.content == bad.partition('"arguments": ')[2]


def test_arguments_end_only_when_their_envelope_does() -> None:
    """The last brace waits (http_api C3): until then the call is not known to be whole."""
    parsed = parse(
        Dialect("hermes"), ['<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}']
    )
    assert parsed.calls[0].text == '{"city": "Paris"'
    assert not parsed.calls[0].is_complete


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ('{"city": "a\nb\tc"}', {"city": "a\nb\tc"}),
        ('"{\\"city\\": \\"Paris\\"}"', PARIS),
        ("null", {}),
        ('{"n": -1.5e-3, "t": [true, false, null, []], "o": {}}', {"n": -1.5e-3, "t": [True, False, None, []], "o": {}}),
    ],
)  # fmt: skip
def test_arguments_in_odd_but_clear_forms_become_json_objects(arguments: str, meant: Any) -> None:
    text = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'
    for pieces in ([text], list(text)):
        assert parse(Dialect("hermes"), pieces).calls[0].value == meant


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 01}',
        '{"a": NaN}',
        '{"a": "\\ud83d"}',
        '{"a": 1,}',
        "{'a': 1}",
        '{"a" 1}',
        '{"a": [1}',
        '{"a": "\\x"}',
        "{" * 80,
    ],
)
def test_what_is_not_json_is_not_delivered_as_a_complete_call(arguments: str) -> None:
    text = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'
    assert not any(call.is_complete for call in parse(Dialect("hermes"), [text]).calls)


def test_no_slice_ends_inside_an_escape_or_between_surrogate_halves() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "\\n\\ud83d\\ude00\\u00e9\\\\"}}</tool_call>'
    reader = Dialect("hermes").reader(Reading(tools=TOOLS))
    assert reader is not None
    slices = [e.text for piece in text for e in reader.feed(piece) if isinstance(e, CallText)]
    assert [piece for piece in slices if "\\" in piece] == [
        "\\n",
        "\\ud83d\\ude00",
        "\\u00e9",
        "\\\\",
    ]


def test_a_marker_spelled_with_ordinary_tokens_is_text_where_it_is_a_token_of_its_own() -> None:
    singles = frozenset(("<tool_call>", "</tool_call>"))
    call = '{"name": "now", "arguments": {}}'
    spelled = parse(Dialect("hermes"), [*"<tool_call>", call, *"</tool_call>"], singles)
    assert (spelled.calls, spelled.content) == ([], f"<tool_call>{call}</tool_call>")
    meant = parse(Dialect("hermes"), ["<tool_call>", call, "</tool_call>"], singles)
    assert [call.name for call in meant.calls] == ["now"]


def test_no_more_calls_are_delivered_than_are_allowed() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    parsed = parse(Dialect("hermes"), [call, "\n", call, " done"], calls_max=1)
    assert (len(parsed.calls), parsed.content) == (1, "done")


def test_without_tools_markup_is_content_and_reasoning_is_still_told_apart() -> None:
    text = '<think>a</think><tool_call>{"name": "now", "arguments": {}}</tool_call>'
    parsed = parse(Dialect("hermes", "think"), list(text), tools={})
    assert (parsed.reasoning, parsed.content, parsed.calls) == ("a", text[16:], [])


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 100])
def test_ox3_no_part_of_a_tag_gets_into_reasoning_or_content(cut: int) -> None:
    text = "<think>a</think>b"
    for whole, opening in ((text, Opening.FRESH), (text[7:], Opening.INSIDE)):
        pieces = [whole[at : at + cut] for at in range(0, len(whole), cut)]
        parsed = parse(Dialect(None, "think"), pieces, opening=opening)
        assert (parsed.reasoning, parsed.content) == ("a", "b")


def test_a_block_that_never_closes_is_all_reasoning_and_only_the_first_one_counts() -> None:
    parsed = parse(Dialect(None, "think"), list("<think>on and on </thin"))
    assert (parsed.reasoning, parsed.content) == ("on and on </thin", "")
    parsed = parse(Dialect(None, "think"), ["<think>a</think>b <think>c</think>"])
    assert (parsed.reasoning, parsed.content) == ("a", "b <think>c</think>")
    parsed = parse(Dialect(None, "think"), list("well <think>c</think>"))
    assert (parsed.reasoning, parsed.content) == ("", "well <think>c</think>")


@pytest.mark.parametrize(
    ("dialect", "tail", "opening"),
    [
        (Dialect(None, "think"), "<|im_start|>assistant\n", Opening.FRESH),
        (Dialect(None, "think"), "<|im_start|>assistant\n<think>\n", Opening.INSIDE),
        (Dialect(None, "think"), "<think>\n\n</think>\n\n", Opening.BEHIND),
        (Dialect(None, "think"), "a</think>b<|im_end|>\n<|im_start|>assistant\n", Opening.FRESH),
        (Dialect(None, "magistral"), "[/INST][THINK]", Opening.INSIDE),
        (Dialect(None, "seed_oss"), "</seed:cot_budget_reflect>\n</seed:think>", Opening.BEHIND),
        (Dialect("gemma4", "gemma4"), "<|turn>model\n<|channel>thought\n<channel|>", Opening.BEHIND),
        (Dialect("harmony", "harmony"), "<|end|><|start|>assistant", Opening.FRESH),
        (Dialect("harmony", "harmony"), "<|start|>assistant<|channel|>analysis<|message|>", Opening.INSIDE),
        (Dialect("harmony", "harmony"), "<|start|>assistant<|channel|>final<|message|>", Opening.BEHIND),
        (Dialect("hermes"), "<think>", Opening.BEHIND),
    ],
)  # fmt: skip
def test_the_end_of_the_prompt_tells_where_an_answer_starts(
    dialect: Dialect, tail: str, opening: Opening
) -> None:
    assert dialect.opening(tail) is opening


ADVERSARIES = {
    "openings": "<tool_call>",
    "openings with a brace": '<tool_call>{"name": "now", ',
    "calls": '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "half markers": "<tool_cal",
    "functions": "<function=now>",
    "sections": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "channels": "<|channel|>",
    "messages": "<|start|>assistant<|channel|>final<|message|>",
    "thoughts": "<think></think>",
    "spaces": "   \n",
    "brackets": "[{(",
    "quotes": "\"\\'",
    "keys": "<arg_key>",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ADVERSARIES)
def test_reading_takes_time_in_proportion_to_the_text(name: str) -> None:
    """Twice the markers take about twice the CPU time; a quadratic reader takes four times."""

    def cost(size: int, is_whole: bool) -> float:
        text = (ADVERSARIES[name] * (size // len(ADVERSARIES[name]) + 1))[:size]
        pieces = [text] if is_whole else [text[at : at + 4] for at in range(0, size, 4)]
        spent = 0.0
        for dialect in LINEAR:
            for head in ("", '<tool_call>{"name": "get_weather", "arguments": {"city": "'):
                begin = time.process_time()
                parse(dialect, [head, *pieces])
                spent += time.process_time() - begin
        return spent

    # a text that comes whole costs little for its size: what is quadratic in it shows in larger ones
    for is_whole, size in ((False, SIZE), (True, min(16 * SIZE, 262_144))):
        small, large = (min(cost(each, is_whole) for _ in range(2)) for each in (size, 4 * size))
        assert large < 8 * small + 0.05


SIZE = int(os.environ.get("SUPERFLUID_TEST_TEXT_BYTES", "8192")) // 4
LINEAR = [Dialect("hermes", "think"), Dialect("qwen3_coder"), Dialect("glm"), Dialect("harmony", "harmony"), Dialect("pythonic"), Dialect("deepseek_v3")]  # fmt: skip


def test_a_json_answer_is_not_held_back_for_long_when_tools_are_offered() -> None:
    reader = Dialect("llama3_json").reader(Reading(tools=TOOLS))
    assert reader is not None
    seen = [reader.feed(piece) for piece in ("{", '"answer"', ": ", "42", "}")]
    assert [bool(events) for events in seen] == [False, True, True, True, True]
    text = "".join(e.text for events in seen for e in events if isinstance(e, Content))
    assert json.loads(text) == {"answer": 42}
