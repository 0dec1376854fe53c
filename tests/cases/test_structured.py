"""Constrained answers from HTTP to the engine: what is valid stays valid, what is wrong is a 400 before the first byte."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import pydantic
import pytest

from superfluid_head.text.constraints import JsonText
from superfluid_head.text.dialects.detect import DialectChoice
from tests.cases.fleet import Asking, asking, content_of
from tests.cases.talk import TOOLS
from tests.failover.rows import SCHEMA


class Found(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    n: int = pydantic.Field(ge=0, le=99)
    tags: list[str]


def schema_format(schema: Any = None, **more: Any) -> dict[str, Any]:
    inner = {"name": "x", "schema": SCHEMA if schema is None else schema, **more}
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


JSON_OBJECT: dict[str, Any] = {"response_format": {"type": "json_object"}}

WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    (schema_format({"type": "object", "properties": {"a": {"type": "string"}, "foo": "bar"}}), "schema"),
    (schema_format({"type": "strin"}), "strin"),
    (schema_format({"type": "string", "pattern": "([a-z"}), "unclosed"),
    ({"structured_outputs": {"regex": "*"}}, "repetition"),
    ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
    ({"response_format": {"type": "yaml"}}, "type is one of"),
    (schema_format({"not": {"type": "string"}}), "not"),
    (schema_format({"type": "array", "uniqueItems": True}, strict=True), "uniqueItems"),
    (schema_format({"type": "string", "nullable": True}), "nullable"),
    (schema_format(name="a b"), "name"),
    (schema_format([1]), "object"),
    (schema_format(strict="yes"), "strict"),
    ({"response_format": "json"}, "object is needed"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
    ({"guided_choice": []}, "1 to"),
    ({"guided_choice": [1]}, "list of strings"),
    ({"guided_grammar": "start: nobody"}, "nobody"),
    ({"guided_grammar": 'x ::= "a"'}, "root"),
    ({"guided_json": "{"}, "not JSON"),
    ({"guided_json": '{"items":' * 900 + "{}" + "}" * 900}, "nested deeper"),
    ({"guided_json": '{"const": "\\ud83d"}'}, ""),
    ({"guided_json": {"const": 1, "minimum": float("1e308")}, "guided_regex": ""}, ""),
    ({"guided_regex": "a" * 5_000}, "longer than"),
    ({"guided_json": {"enum": ["x" * 40_000, "y" * 40_000]}}, "larger than"),
)  # fmt: skip


@pytest.mark.slow
def test_o24_a_wrong_constraint_is_a_400_on_both_routes_and_three_streams_notice_nothing() -> None:
    async def main() -> None:
        async with asking(lanes=4, decode_rate=60.0) as asked:
            alone = content_of(await asked.chat("stream 0", stream=True, seed=1, max_tokens=40))
            async with asyncio.TaskGroup() as group:
                streams = [
                    group.create_task(asked.chat(f"stream {n}", stream=True, seed=1, max_tokens=40))
                    for n in range(3)
                ]
                for members, words in WRONG:
                    for ask in (asked.chat, asked.complete):
                        response = await ask(**members)
                        assert response.status_code == 400, (members, response.text)
                        error = response.json()["error"]
                        assert error["code"] == "invalid_schema", (members, error)
                        assert error["param"].split(".")[0] in members, (members, error)
                        assert words in error["message"], (members, error)
            assert content_of(streams[0].result()) == alone
            assert all(stream.result().text.endswith("[DONE]\n\n") for stream in streams)

    asyncio.run(main())


@pytest.mark.slow
def test_answers_satisfy_their_schema_in_both_modes_and_are_the_same_in_both() -> None:
    async def main() -> None:
        async with asking() as asked:
            for seed in range(4):
                members: dict[str, Any] = {**schema_format(), "seed": seed, "max_tokens": 300}
                whole = await asked.chat(**members)
                choice = whole.json()["choices"][0]
                assert choice["finish_reason"] == "stop"
                Found.model_validate_json(choice["message"]["content"])
                assert content_of(await asked.chat(**members, stream=True)) == content_of(whole)
            several = await asked.complete(["a", "b"], n=2, **schema_format(), max_tokens=300)
            texts = [choice["text"] for choice in several.json()["choices"]]
            assert len(texts) == 4
            assert all(Found.model_validate_json(text) for text in texts)

    asyncio.run(main())


SPELLINGS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"guided_regex": "^[0-9]{3}-[a-c]{2}$"}, r"[0-9]{3}-[a-c]{2}"),
    ({"guided_choice": ["yes", "no, never"]}, "yes|no, never"),
    ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    ({"guided_grammar": 'start: "a" B "c"\nB: /b{2,3}/'}, "ab{2,3}c"),
    ({"grammar": 'root ::= "a" [0-9] [0-9]'}, r"a[0-9]{2}"),
    ({"guided_json": json.dumps({"enum": ["x", 1]})}, '"x"|1'),
    ({"json_schema": {"const": None}}, "null"),
    ({"guided_choice": ['\u0001\u007fé"\\\n/']}, '\\u0001\\u007fé"\\\\\n/'),
    ({"guided_json": {}}, "(?s:.*)"),
    ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
)


@pytest.mark.slow
def test_every_spelling_constrains() -> None:
    async def main() -> None:
        async with asking() as asked:
            for members, pattern in SPELLINGS:
                text = content_of(await asked.chat(**members, max_tokens=60))
                assert re.fullmatch(pattern, text), (members, text)

    asyncio.run(main())


@pytest.mark.slow
def test_a_json_object_is_an_object_and_a_budget_leaves_the_beginning_of_one() -> None:
    async def main() -> None:
        async with asking() as asked:
            ends = set()
            for seed in range(4):
                response = await asked.chat(**JSON_OBJECT, seed=seed, max_tokens=60)
                choice = response.json()["choices"][0]
                ends.add(choice["finish_reason"])
                if choice["finish_reason"] == "stop":
                    assert isinstance(json.loads(choice["message"]["content"]), dict)
                assert choice["message"]["content"].lstrip().startswith("{")
            short = await asked.chat(**JSON_OBJECT, max_tokens=1)
            assert short.json()["choices"][0]["finish_reason"] == "length"
            assert ends <= {"stop", "length"}

    asyncio.run(main())


@pytest.mark.slow
def test_two_constraints_and_what_would_go_on_behind_one_are_refused() -> None:
    async def main() -> None:
        async with asking() as asked:
            for members, param in (
                ({**schema_format(), "guided_regex": "a"}, "guided_regex"),
                ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
                ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
                ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
            ):
                response = await asked.complete(**members)
                assert response.status_code == 400
                error = response.json()["error"]
                assert (error["param"], error["code"]) == (param, "unsupported_value")
            text: dict[str, Any] = {"response_format": {"type": "text"}, "guided_choice": ["ok"]}
            assert content_of(await asked.chat(**text)) == "ok"

    asyncio.run(main())


@pytest.mark.slow
def test_a_constraint_begins_behind_the_reasoning_and_calls_may_stand_in_its_place() -> None:
    async def main() -> None:
        head = {"dialects": DialectChoice("qwen3")}
        async with asking(head=head) as asked:
            kinds = set()
            for seed in range(8):
                members = {**schema_format(), "seed": seed, "max_tokens": 400, "tools": TOOLS}
                message = (await asked.chat(**members)).json()["choices"][0]
                if message["finish_reason"] == "length":
                    kinds.add("length")
                    continue
                found = message["message"]
                if found.get("tool_calls"):
                    kinds.add("calls")
                    json.loads(found["tool_calls"][0]["function"]["arguments"])
                else:
                    kinds.add("reasoned" if found.get("reasoning_content") else "content")
                    Found.model_validate_json(found["content"])
            assert kinds - {"length"}

    asyncio.run(main())


BOMBS = (
    *("(a+)+b", "(a*)*b", "((a{0,1000}){0,1000}){0,1000}", "(.*a){50}", "(x+x+)+y", "[ab]*a[ab]{300}"),
    *("(a?){1000}a{1000}", r"(\p{L}{1,1000}){1,1000}", ".*.*.*.*.*.*.*=.*", "([a-z]{1,100},?){1,1000}"),
)  # fmt: skip


@pytest.mark.slow
def test_i25_patterns_made_to_explode_are_judged_within_two_seconds() -> None:
    async def main() -> None:
        async with asking() as asked:
            await asked.complete(guided_regex="warm up", max_tokens=1)
            for pattern in BOMBS:
                before = time.monotonic()
                response = await asked.complete(guided_regex=pattern, max_tokens=2)
                assert response.status_code in (200, 400), response.text
                assert time.monotonic() - before < 2.0, pattern
            good = await asked.complete(guided_choice=["fine"])
            assert good.json()["choices"][0]["text"] == "fine"

    asyncio.run(main())


def rss_mib(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() >> 20


async def unique_schemas(asked: Asking, first: int, count: int) -> None:
    """Judge so many on the head, as 10,000 are in the soak, and answer every tenth."""
    text = asked.bench.head.texts[0]
    for number in range(first, first + count):
        properties = {f"k{number}": {"type": "string", "maxLength": number % 50 + 1}}
        schema = {"type": "object", "properties": properties}
        await text.constrain(JsonText(schema))
        if number % 10 == 0:
            response = await asked.complete(**schema_format(schema), max_tokens=1)
            assert response.status_code == 200


@pytest.mark.slow
def test_i26_many_unique_schemas_leave_no_memory_behind() -> None:
    own = os.getpid()

    async def main() -> None:
        async with asking() as asked:
            await unique_schemas(asked, 0, 50)
            before = rss_mib(own)
            await unique_schemas(asked, 50, 450)
            assert rss_mib(own) - before <= 32
            assert len(asked.bench.workers.grammars.pids) == 1
            assert all(rss_mib(pid) <= 128 for pid in asked.bench.workers.grammars.pids)

    asyncio.run(main())


@pytest.mark.slow
def test_a_seeded_constrained_answer_is_the_same_alone_and_in_a_crowd() -> None:
    async def main() -> None:
        async with asking(nodes=2) as asked:
            members = {**schema_format(), "seed": 5, "max_tokens": 300}
            alone = content_of(await asked.chat(**members))
            async with asyncio.TaskGroup() as group:
                same = group.create_task(asked.chat(**members))
                for seed in range(5):
                    group.create_task(asked.chat(f"other {seed}", seed=seed, max_tokens=30))
                    group.create_task(asked.chat(f"held {seed}", **{**members, "seed": seed}))
            assert content_of(same.result()) == alone

    asyncio.run(main())
