"""A head whose model speaks a dialect, and answers put together as strict clients do, from both modes of the API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from superfluid_core.modelfiles.template import ChatTemplate
from superfluid_head.text.dialects.detect import DialectChoice
from tests.unit.head_api.conftest import Bench

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("f", "g")
]


class WholeTemplate(ChatTemplate):
    """A real template whose prompt is spelled byte by byte."""

    def render(self, *arguments: Any, **options: Any) -> Any:
        return _Spelled(super().render(*arguments, **options).text)


@dataclass
class _Spelled:
    text: str

    def encode(self, tokenizer: Any) -> list[int]:
        return list(self.text.encode())


@contextmanager
def talking(dialect: str, template: str | None = None, **parts: Any) -> Iterator[Bench]:
    """Open a head whose model has the dialect; with `template` its prompts are made by that one."""
    options: dict[str, Any] = {"dialects": DialectChoice(dialect)}
    if template is not None:
        options["template"] = lambda: WholeTemplate(template, bos="", eos="")
    bench = Bench(**options, **parts)
    try:
        yield bench
    finally:
        bench.workers.close()


@dataclass
class Message:
    """A choice as a client sees it at the end."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    logprobs: list[Any] = field(default_factory=list)

    @property
    def arguments(self) -> list[Any]:
        return [json.loads(call["function"]["arguments"]) for call in self.calls]

    @property
    def names(self) -> list[str]:
        return [call["function"]["name"] for call in self.calls]

    def bare(self) -> tuple[Any, ...]:
        """Everything but the ids of calls, which are drawn."""
        calls = [(c["type"], c["function"]["name"], c["function"]["arguments"]) for c in self.calls]
        return self.content, self.reasoning, calls, self.finish, self.logprobs


def whole_of(choice: dict[str, Any]) -> Message:
    message = choice["message"]
    assert message.get("tool_calls") != []
    assert message["content"] is not None or message["tool_calls"]
    return Message(
        message["content"] or "",
        message.get("reasoning_content", ""),
        message.get("tool_calls", []),
        choice["finish_reason"],
        (choice["logprobs"] or {}).get("content", []),
    )


def add(message: Message, choice: dict[str, Any]) -> None:
    """Take a chunk's choice as the strict helper would: nothing twice that is told once, nothing after the finish."""
    assert message.finish is None
    delta = choice["delta"]
    assert (
        sum(bool(delta.get(name)) for name in ("content", "reasoning_content", "tool_calls")) <= 1
    )
    message.content += delta.get("content") or ""
    message.reasoning += delta.get("reasoning_content") or ""
    message.finish = choice["finish_reason"]
    message.logprobs += (choice["logprobs"] or {}).get("content", [])
    for part in delta.get("tool_calls", []):
        if part["index"] == len(message.calls):
            assert part["type"] == "function"
            assert part["function"]["arguments"] == ""
            message.calls.append(
                {"id": part["id"], "type": "function", "function": dict(part["function"])}
            )
        else:
            assert part["index"] == len(message.calls) - 1
            assert set(part) == {"index", "function"}
            assert set(part["function"]) == {"arguments"}
            message.calls[-1]["function"]["arguments"] += part["function"]["arguments"]


@dataclass
class Answers:
    """Both modes of one request, which agree."""

    messages: list[Message]
    usage: dict[str, Any]
    whole: dict[str, Any]
    chunks: list[dict[str, Any]]


def both(bench: Bench, **members: Any) -> Answers:
    """Ask in both modes and check that they agree."""
    response = bench.chat(**members)
    assert response.status_code == 200, response.text
    whole = response.json()
    streamed = bench.chat(**members, stream=True, stream_options={"include_usage": True})
    assert streamed.status_code == 200, streamed.text
    frames = streamed.content.split(b"\n\n")
    assert frames[-2:] == [b"data: [DONE]", b""]
    chunks = [json.loads(frame[6:]) for frame in frames[:-2]]
    messages = [Message() for _ in whole["choices"]]
    for chunk in chunks:
        for choice in chunk["choices"]:
            add(messages[choice["index"]], choice)
    wholes = [whole_of(choice) for choice in whole["choices"]]
    assert [m.bare() for m in messages] == [m.bare() for m in wholes]
    assert chunks[-1]["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    return Answers(messages, whole["usage"], whole, chunks)


def cuts(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]
