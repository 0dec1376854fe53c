"""The whole path, undisturbed: the official client, a head, two nodes with the simulated engine."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from superfluid_head.bench.small_fleet import SmallFleet

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
CHATS = 100


def question(number: int) -> list[Any]:
    return [{"role": "user", "content": f"Tell me about lantern number {number}."}]


def test_a_streamed_answer_equals_the_whole_one(fleet: SmallFleet, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=fleet.served, messages=question(1), temperature=0, max_completion_tokens=24
    )
    chunks = list(
        client.chat.completions.create(
            model=fleet.served, messages=question(1), temperature=0, max_completion_tokens=24,
            stream=True, stream_options={"include_usage": True},
        )
    )  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_the_streaming_helper_of_the_client_is_content(
    fleet: SmallFleet, client: openai.OpenAI
) -> None:
    with client.chat.completions.stream(
        model=fleet.served, messages=question(2), max_completion_tokens=2000, seed=5
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].finish_reason == "stop"


async def many_chats(fleet: SmallFleet) -> list[Any]:
    http = openai.DefaultAsyncHttpxClient(trust_env=False, timeout=55)
    async with openai.AsyncOpenAI(
        base_url=f"{fleet.url}/v1", api_key="none", http_client=http, max_retries=0
    ) as client:

        async def one(number: int) -> Any:
            return await client.chat.completions.create(
                model=fleet.served, messages=question(number), max_completion_tokens=12,
                seed=number, extra_body={"ignore_eos": True},
            )  # fmt: skip

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(number)) for number in range(CHATS)]
    return [task.result() for task in running]


def test_a_hundred_concurrent_chats_all_complete(fleet: SmallFleet) -> None:
    answers = asyncio.run(many_chats(fleet))
    assert len(answers) == CHATS
    assert {a.choices[0].finish_reason for a in answers} == {"length"}
    assert {a.usage.completion_tokens for a in answers} == {12}
    assert len({a.id for a in answers}) == CHATS


def test_both_nodes_take_their_part(fleet: SmallFleet) -> None:
    asyncio.run(many_chats(fleet))
    text = httpx.get(f"{fleet.url}/metrics", timeout=10, trust_env=False).text
    for name in fleet.addresses:
        assert name in text


def test_a_wrong_request_is_refused_before_the_first_byte(
    fleet: SmallFleet, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model=fleet.served, messages=question(1), temperature=-1, stream=True
        )
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody-has-this", messages=question(1))


def test_probes_answer(fleet: SmallFleet) -> None:
    for path in ("/livez", "/readyz", "/health"):
        reply = httpx.get(fleet.url + path, timeout=10, trust_env=False)
        assert reply.status_code == httpx.codes.OK, path
