"""Which dialect a template tells, and what a person may choose instead. The excerpts are written for these tests."""

from __future__ import annotations

import pytest

from superfluid_head.text.dialects.detect import (
    AUTO,
    CALL_SIGNS,
    DIALECTS,
    NONE,
    REASONING_SIGNS,
    DialectChoice,
    detect,
)
from superfluid_head.text.dialects.dialect import CALL_PARSERS, REASONING_PARSERS, Dialect
from tests.unit.modelfiles import templates

EXCERPTS = {
    "plain": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
        Dialect(),
    ),
    "hermes": (
        "{% for call in m.tool_calls %}<tool_call>\n{\"name\": \"{{ call.name }}\", \"arguments\": {{ call.arguments | tojson }}}\n</tool_call>{% endfor %}",
        Dialect("hermes"),
    ),
    "qwen3": (
        "{%- if '</think>' in content %}{% endif %}{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{{- '\\n<tool_call>\\n{\"name\": \"' }}",
        Dialect("hermes", "think"),
    ),
    "qwen3_coder": (
        "{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}{{- '<parameter=' + key + '>\\n' }}{{- '</parameter>\\n' }}",
        Dialect("qwen3_coder"),
    ),
    "llama3": (
        "<|start_header_id|>ipython<|end_header_id|>Respond in the format {\"name\": function name, \"parameters\": dictionary of argument name and its value}{{- '<|python_tag|>' }}",
        Dialect("llama3_json"),
    ),
    "llama3 without a tag": (
        "<|start_header_id|>user<|end_header_id|>{{- '{\"name\": \"' + call.name + '\", ' + '\"parameters\": ' }}",
        Dialect("llama3_json"),
    ),
    "llama3 pythonic": (
        "<|start_header_id|>Answer as [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
        Dialect("pythonic"),
    ),
    "llama4": ("<|header_start|>assistant<|header_end|>{{- '<|python_start|>' }}[{{ call }}]{{- '<|python_end|>' }}", Dialect("pythonic")),
    "mistral": ("{{- '[TOOL_CALLS] [' }}{{ call | tojson }}{{- ']' }}[TOOL_RESULTS]", Dialect("mistral")),
    "mistral v11": ("{{- '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments | tojson }}", Dialect("mistral_v11")),
    "magistral": ("[SYSTEM_PROMPT][THINK]draft[/THINK][/SYSTEM_PROMPT]{{- '[TOOL_CALLS]' + name + '[ARGS]' }}", Dialect("mistral_v11", "magistral")),
    "deepseek v3": (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.name + '\\n```json\\n' + call.arguments + '\\n```<｜tool▁call▁end｜>'}}",
        Dialect("deepseek_v3"),
    ),
    "deepseek r1": (
        "{% set content = content.split('</think>')[-1] %}{{'<｜tool▁calls▁begin｜>' + '\\n```json\\n'}}<｜Assistant｜><think>\\n",
        Dialect("deepseek_v3", "think"),
    ),
    "deepseek v3.1": (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments }}{{'<｜Assistant｜></think>'}}",
        Dialect("deepseek_v31", "think"),
    ),
    "deepseek v3.2": ("<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"{{ name }}\"></think>", Dialect("deepseek_v32", "think")),
    "deepseek v4": ("<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"{{ name }}\"><think>", Dialect("deepseek_v4", "think")),
    "glm": ("<|assistant|>\n<think></think>{{ '\\n<tool_call>' + name }}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>", Dialect("glm", "think")),
    "kimi": ("<|tool_calls_section_begin|>{% for call in calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>", Dialect("kimi_k2")),
    "kimi thinking": ("<think>{{ r }}</think><|tool_calls_section_begin|><|tool_call_begin|>", Dialect("kimi_k2", "think")),
    "gpt-oss": ("<|start|>assistant<|channel|>commentary to=functions.{{ name }} <|constrain|>json<|message|>{{ a }}<|call|>", Dialect("harmony", "harmony")),
    "granite": ("<|start_of_role|>assistant<|end_of_role|><|tool_call|>{{ calls }}Here is my thought process: ... Here is my response:", Dialect("granite", "granite")),
    "granite 3.1": ("<|start_of_role|>assistant<|end_of_role|>{{- '<tool_call>[' + calls + ']' }}", Dialect("granite_v31")),
    "granite 4": ("<|start_of_role|>assistant<|end_of_role|>{{- '<tool_call>\\n{\"name\": \"' }}", Dialect("hermes")),
    "minimax": ("<minimax:tool_call>\n<invoke name=\"{{ name }}\"><think>\n", Dialect("minimax_m2", "think")),
    "gemma4": ("<|turn>model\n<|tool_call>call:{{ name }}{ {{ a }} }<tool_call|><|channel>thought\n<channel|>", Dialect("gemma4", "gemma4")),
    "seed": ("<seed:think>{{ r }}</seed:think>", Dialect(None, "seed_oss")),
}  # fmt: skip


@pytest.mark.parametrize("name", EXCERPTS)
def test_a_template_tells_its_dialect(name: str) -> None:
    source, dialect = EXCERPTS[name]
    assert detect(source) == dialect


def test_every_format_that_a_template_can_tell_is_told_by_an_excerpt() -> None:
    told = {detect(source).calls for source, _ in EXCERPTS.values()}
    assert told >= {name for _, name in CALL_SIGNS}
    assert {name for _, name in CALL_SIGNS} == set(CALL_PARSERS)
    assert {name for _, name in REASONING_SIGNS} == set(REASONING_PARSERS)


def test_templates_of_the_kind_that_are_published_tell_theirs() -> None:
    assert detect(templates.QWEN_LIKE) == Dialect("hermes", "think")
    assert detect("") == Dialect()


def test_the_named_dialects_use_parsers_that_exist() -> None:
    for dialect in DIALECTS.values():
        assert dialect.calls in (*CALL_PARSERS, None)
        assert dialect.reasoning in (*REASONING_PARSERS, None)


def test_a_choice_goes_before_the_template_and_a_parser_before_the_dialect() -> None:
    qwen = EXCERPTS["qwen3"][0]
    assert DialectChoice().resolve(qwen) == Dialect("hermes", "think")
    assert DialectChoice(dialect=NONE).resolve(qwen) == Dialect()
    assert DialectChoice(dialect="glm").resolve(qwen) == Dialect("glm", "think")
    assert DialectChoice("glm", "mistral", NONE).resolve(qwen) == Dialect("mistral", None)
    assert DialectChoice(AUTO, NONE, AUTO).resolve(qwen) == Dialect(None, "think")
