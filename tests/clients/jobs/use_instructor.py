"""instructor: objects out of answers, by tools and by schemas, whole and while they arrive."""

from __future__ import annotations

from typing import Any

import instructor
import openai
import pydantic

from tests.clients.jobs.kit import KEY, MODEL, URL, need, report

Person: Any = pydantic.create_model(
    "Person",
    __config__=pydantic.ConfigDict(extra="forbid"),
    name=(str, pydantic.Field(max_length=16)),
    age=(int, pydantic.Field(ge=0, le=120)),
)
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Describe a person named Ada."}],
    "max_tokens": 400,
    "temperature": 0,
    "max_retries": 1,
}


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY), mode=mode)


def extract(mode: instructor.Mode, **members: Any) -> None:
    person = client(mode).chat.completions.create(**ASK, response_model=Person, **members)
    need(isinstance(person, Person) and 0 <= person.age <= 120, person)


def tools() -> None:
    extract(instructor.Mode.TOOLS, parallel_tool_calls=False)


def structured() -> None:
    extract(instructor.Mode.JSON_SCHEMA)


def stream() -> None:
    made = client(instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(
        **ASK, response_model=Person
    )
    last = list(made)[-1]
    need(last.name is not None and last.age is not None, last)


if __name__ == "__main__":
    report(tools=tools, structured=structured, stream=stream)
