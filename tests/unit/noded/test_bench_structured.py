"""The bench of constrained answers: its judge knows a wrong answer, and the demo model gives none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from superfluid_core.grammar.compiler import Grammars, vocabulary_of
from superfluid_core.session import Grammar, GrammarKind
from superfluid_noded.bench_schemas import _RULES, SCHEMAS, judge
from superfluid_noded.bench_structured import Answer, StructuredBench, summary
from tests.unit.noded.conftest import TEXTS

BY_NAME = {name: schema for name, _, schema in SCHEMAS}


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("person", {"name": "x", "age": 3}, {"name": "x", "age": 121}),
        ("person", {"name": "x", "age": 3}, {"name": "x"}),
        ("person", {"name": "x", "age": 3}, {"name": "x", "age": 3, "more": 1}),
        ("person", {"name": "x", "age": 3}, {"name": "x" * 25, "age": 3}),
        ("colour", "red", "pink"),
        ("constant", {"version": "1.0", "ok": True}, {"version": "1.0", "ok": 1}),
        ("numbers", [2, 3, 5], [2, 3]),
        ("numbers", [2, 3, 5], [2, 3, 4.5]),
        ("null or text", {"nick": None}, {"nick": 3}),
        ("pattern", {"plate": "AB-123"}, {"plate": "AB-12"}),
        ("date", {"date": "1969-07-20"}, {"date": "1969-13-20"}),
        ("tree", {"left": {"value": 1}, "right": None}, {"left": None, "right": None}),
        ("tuple", ["a", 1], ["a", 1, 2]),
        ("either", {"kind": "cat", "lives": 9}, {"kind": "dog", "lives": 9}),
        ("multiples", {"n": 25}, {"n": 26}),
        ("boolean", True, 1),
    ],
)
def test_the_judge_tells_right_from_wrong(name: str, good: Any, bad: Any) -> None:
    assert judge(good, BY_NAME[name]) is None
    assert judge(bad, BY_NAME[name]) is not None


def keywords(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    found = set(schema)
    for name, value in schema.items():
        inner = value.values() if name in ("properties", "$defs") else [value]
        for each in inner:
            for one in each if isinstance(each, list) else [each]:
                found |= keywords(one) if name not in ("const", "enum") else set()
    return found


def test_every_keyword_of_the_schemas_is_judged_and_every_schema_compiles() -> None:
    assert len(BY_NAME) == 25
    used = set().union(*(keywords(schema) for schema in BY_NAME.values()))
    assert used <= {*_RULES, "$defs", "additionalProperties", "prefixItems"}
    grammars = Grammars(lambda: vocabulary_of(TEXTS, TEXTS.vocabulary))
    for schema in BY_NAME.values():
        assert grammars.refusal(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))) is None


def test_the_table_counts_ends_and_faults() -> None:
    answers = [Answer("a", "greedy", "stop", 3, None), Answer("a", "sampled", "length", 9, "bad")]
    speed = {"lanes": 1, "free_tok_s": 2.0, "held_tok_s": 1.0, "slowdown_pct": 50.0, "free_cpu_ms": 1.0, "held_cpu_ms": 2.0}  # fmt: skip
    text = summary(answers, [speed])
    assert "answers 2, stop 1, length 1 (50.0 %)" in text
    assert "faults 1" in text


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_demo_model_stops_with_valid_answers() -> None:
    from superfluid_core.modelfiles.resolve import resolve

    bench = StructuredBench(resolve("demo", offline=True, token=None), threads=1)
    some = [each for each in SCHEMAS if each[0] in ("colour", "yes or no", "numbers", "unicode")]
    answers = bench.answers(some, 1)
    assert [answer.line() for answer in answers if answer.fault is not None] == []
    assert [answer.finish for answer in answers] == ["stop"] * 8
