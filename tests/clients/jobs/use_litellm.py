"""LiteLLM as a client, under its names for OpenAI-compatible servers, for vLLM's and for Anthropic's."""

from __future__ import annotations

import json
from typing import Any

import litellm

from tests.clients.jobs.kit import (
    KEY,
    MODEL,
    PERSON_SCHEMA,
    STORY,
    URL,
    WEATHER,
    WEATHER_SCHEMA,
    need,
    need_person,
    report,
)

AT: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY}
ASK: dict[str, Any] = {**AT, "messages": [{"role": "user", "content": STORY}], "max_tokens": 30}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER_SCHEMA}}


def whole() -> None:
    answer = litellm.completion(**ASK)
    need(answer.choices[0].message.content and answer.usage.completion_tokens > 5, answer)


def stream() -> None:
    options = {"include_usage": True}
    chunks = list(litellm.completion(**ASK, stream=True, stream_options=options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    need(text, chunks)
    built = litellm.stream_chunk_builder(chunks)
    need(built.choices[0].message.content == text and built.usage.completion_tokens > 5, built)


def tools() -> None:
    for streamed in (False, True):
        asked = {**ASK, "messages": [{"role": "user", "content": WEATHER}], "max_tokens": 80}
        answer = litellm.completion(
            **asked,
            tools=[TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            stream=streamed,
        )
        if streamed:
            answer = litellm.stream_chunk_builder(list(answer))
        (call,) = answer.choices[0].message.tool_calls
        need(call.function.name == "weather", call)
        need("city" in json.loads(call.function.arguments), call)


def structured() -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON_SCHEMA}}
    asked = {**ASK, "max_tokens": 400, "temperature": 0}
    answer = litellm.completion(**asked, response_format=shape)
    need_person(json.loads(answer.choices[0].message.content))


def embeddings() -> None:
    found = litellm.embedding(**AT, input=["hello", "world"])
    need([len(row["embedding"]) for row in found.data] == [576, 576], "two vectors")


def text_completion() -> None:
    found = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY,
        prompt="Once upon", max_tokens=8,
    )  # fmt: skip
    need(found.choices[0].text, found)


def anthropic() -> None:
    answer = litellm.completion(
        model=f"anthropic/{MODEL}",
        api_base=URL,
        api_key=KEY,
        messages=ASK["messages"],
        max_tokens=20,
    )
    need(answer.choices[0].message.content, answer)


def errors() -> None:
    try:
        litellm.completion(**{**ASK, "messages": [{"role": "user", "content": "word " * 9_000}]})
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("a prompt that is too long is not told apart")


if __name__ == "__main__":
    report(
        whole=whole, stream=stream, tools=tools, structured=structured, embeddings=embeddings,
        text_completion=text_completion, anthropic=anthropic, errors=errors,
    )  # fmt: skip
