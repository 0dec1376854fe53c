"""Pydantic AI: agents with text, streamed text, and typed output by tools and by schemas."""

from __future__ import annotations

import asyncio
from typing import Any

import pydantic
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.jobs.kit import KEY, MODEL, STORY, URL, need, report

Person: Any = pydantic.create_model(
    "Person",
    __config__=pydantic.ConfigDict(extra="forbid"),
    name=(str, pydantic.Field(max_length=16)),
    age=(int, pydantic.Field(ge=0, le=120)),
)
SHORT: Any = {"max_tokens": 30}
LONG: Any = {"max_tokens": 400, "temperature": 0, "parallel_tool_calls": False}


def model() -> Any:
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))


def whole() -> None:
    result = Agent(model(), model_settings=SHORT).run_sync(STORY)
    need(result.output and result.usage.output_tokens > 5, result)


def stream() -> None:
    async def main() -> None:
        async with Agent(model(), model_settings=SHORT).run_stream(STORY) as result:
            text = "".join([piece async for piece in result.stream_text(delta=True)])
            need(text, "a streamed text")

    asyncio.run(main())


def extract(output: Any) -> None:
    agent: Any = Agent(model(), output_type=output, model_settings=LONG)
    person = agent.run_sync("Describe a person named Ada.").output
    need(isinstance(person, Person), person)


def tools() -> None:
    extract(ToolOutput(Person))


def structured() -> None:
    extract(NativeOutput(Person))


if __name__ == "__main__":
    report(whole=whole, stream=stream, tools=tools, structured=structured)
