"""The real model behind the whole path: two native nodes, a head, and 100 chats of the official client at once."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from superfluid_core.modelfiles.resolve import ModelFiles, resolve
from superfluid_head.bench.rig import Rig
from superfluid_head.bench.small_fleet import SmallFleet, real_flags

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]
CHATS = 100
TOKENS_MAX = 12


@pytest.fixture(scope="module")
def native_fleet() -> Iterator[SmallFleet]:
    with Rig() as made:
        yield SmallFleet(made, (*real_flags(2), "--model", "demo"), "demo")


def messages(number: int) -> list[Any]:
    return [{"role": "user", "content": f"Write a line about the number {number}. 🙂"}]


@functools.cache
def demo() -> ModelFiles:
    return resolve("demo")


def expected_prompt_tokens(number: int) -> int:
    """What the model's own template and tokenizer say, without the head."""
    files = demo()
    template = files.template()
    assert template is not None
    return len(template.render(messages(number)).encode(files.tokenizer()))


def judge(number: int, finish: str | None, usage: Any, logprobs: list[Any], text: str) -> None:
    """One answer: usage is the number of ids that were sampled, the hidden end-of-text id included."""
    assert usage is not None
    assert finish in ("stop", "length")
    hidden = 1 if finish == "stop" else 0
    assert usage.completion_tokens == len(logprobs) + hidden
    assert finish == "stop" or usage.completion_tokens == TOKENS_MAX
    assert usage.prompt_tokens == expected_prompt_tokens(number)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert b"".join(bytes(each.bytes) for each in logprobs).decode("utf-8", "replace") == text


async def raw(client: openai.AsyncOpenAI, model: str, number: int) -> None:
    stream = await client.chat.completions.create(
        model=model, messages=messages(number), max_completion_tokens=TOKENS_MAX, seed=number,
        logprobs=True, stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    finish, usage, logprobs, text = None, None, [], ""
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            if choice.logprobs is not None:
                logprobs.extend(choice.logprobs.content or [])
    judge(number, finish, usage, logprobs, text)


async def helper(client: openai.AsyncOpenAI, model: str, number: int) -> None:
    async with client.chat.completions.stream(
        model=model, messages=messages(number), max_completion_tokens=TOKENS_MAX, temperature=0,
        logprobs=True, stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        async for _ in stream:
            pass
        snapshot = stream.current_completion_snapshot
    choice = snapshot.choices[0]
    logprobs = (choice.logprobs and choice.logprobs.content) or []
    judge(number, choice.finish_reason, snapshot.usage, logprobs, choice.message.content or "")


async def all_chats(fleet: SmallFleet) -> None:
    http = openai.DefaultAsyncHttpxClient(trust_env=False, timeout=240)
    async with (
        openai.AsyncOpenAI(
            base_url=f"{fleet.url}/v1", api_key="none", http_client=http, max_retries=0
        ) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(CHATS):
            way = raw if number % 2 else helper
            tasks.create_task(way(client, fleet.served, number))


def test_a_hundred_chats_over_two_nodes_end_with_exact_usage(native_fleet: SmallFleet) -> None:
    asyncio.run(all_chats(native_fleet))
    log = native_fleet.head.log_text()
    for name in native_fleet.addresses:
        assert log.count(f"node={name} ") >= CHATS // 4


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=24)
    age: int = pydantic.Field(ge=0, le=120)


async def structured(client: openai.AsyncOpenAI, model: str, number: int) -> None:
    words: list[Any] = [{"role": "user", "content": f"Describe person {number} in JSON."}]
    parsed = await client.chat.completions.parse(
        model=model, messages=words, response_format=Person, seed=number, max_completion_tokens=120
    )
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.choices[0].message.parsed is not None
    async with client.chat.completions.stream(
        model=model, messages=words, response_format=Person, seed=number, max_completion_tokens=120
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed is not None
    plain = await client.completions.create(
        model=model,
        prompt=f"{number}:",
        max_tokens=20,
        extra_body={"guided_regex": "[0-9]{3} [a-z]{3}"},
    )
    assert re.fullmatch("[0-9]{3} [a-z]{3}", plain.choices[0].text)


async def one_structured(fleet: SmallFleet) -> None:
    http = openai.DefaultAsyncHttpxClient(trust_env=False, timeout=240)
    async with openai.AsyncOpenAI(
        base_url=f"{fleet.url}/v1", api_key="none", http_client=http, max_retries=0
    ) as client:
        await structured(client, fleet.served, 1)


def test_the_official_client_parses_what_the_model_was_held_to(native_fleet: SmallFleet) -> None:
    asyncio.run(one_structured(native_fleet))
