"""LangChain: ChatOpenAI and OpenAIEmbeddings, a model bound to a tool, and an agent's turn in LangGraph's manner."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

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


def model(tokens: int = 30, **options: Any) -> Any:
    return ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_tokens=tokens, **options)


TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER_SCHEMA}}


def whole() -> None:
    answer = model().invoke(STORY)
    need(answer.content and answer.usage_metadata["output_tokens"] > 5, answer)


def stream() -> None:
    chunks = list(model(stream_usage=True).stream(STORY))
    joined = sum(chunks[1:], chunks[0])
    need(joined.content and joined.usage_metadata["output_tokens"] > 5, joined)


def batch() -> None:
    async def main() -> None:
        answers = await model(8).abatch([STORY, WEATHER, "Hello."])
        need(all(answer.content for answer in answers), answers)

    asyncio.run(main())


def tools() -> None:
    bound = model(80).bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
    answer = bound.invoke(WEATHER)
    (call,) = answer.tool_calls
    need(call["name"] == "weather" and "city" in call["args"], answer)
    chunks = list(bound.stream(WEATHER))
    joined = sum(chunks[1:], chunks[0])
    need(joined.tool_calls[0]["name"] == "weather", joined)
    history = [
        HumanMessage(WEATHER),
        AIMessage("", tool_calls=answer.tool_calls),
        ToolMessage("sunny", tool_call_id=call["id"]),
    ]
    need(model(8).invoke(history).content, "an answer behind a result")


def structured() -> None:
    schema = {"title": "person", "description": "a person", **PERSON_SCHEMA}
    for method in ("json_schema", "function_calling"):
        shaped = model(400, temperature=0).with_structured_output(schema, method=method)
        need_person(shaped.invoke("Describe a person named Ada."))


def embeddings() -> None:
    maker = OpenAIEmbeddings(
        model=MODEL, base_url=f"{URL}/v1", api_key=KEY, check_embedding_ctx_length=False
    )
    need([len(row) for row in maker.embed_documents(["hello", "world"])] == [576] * 2, "vectors")
    need(len(maker.embed_query("hello")) == 576, "a vector")


def responses() -> None:
    answer = model(use_responses_api=True).invoke(STORY)
    need(answer.text, answer)
    text = "".join(chunk.text for chunk in model(use_responses_api=True).stream(STORY))
    need(text, "a streamed response")


if __name__ == "__main__":
    report(
        whole=whole, stream=stream, batch=batch, tools=tools, structured=structured,
        embeddings=embeddings, responses=responses,
    )  # fmt: skip
