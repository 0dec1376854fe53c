"""smolagents: its model class, whole and streamed, with the tool call that its agents ask for."""

from __future__ import annotations

from typing import Any

from smolagents import ChatMessage, OpenAIServerModel, Tool

from tests.clients.jobs.kit import KEY, MODEL, STORY, URL, WEATHER, need, report

ASK = [ChatMessage(role="user", content=[{"type": "text", "text": STORY}])]


def model(tokens: int = 30) -> Any:
    return OpenAIServerModel(MODEL, api_base=f"{URL}/v1", api_key=KEY, max_tokens=tokens)


def weather() -> Any:
    """Make a tool without a decorator or a subclass of our own."""

    def forward(self: Any, city: str) -> str:
        return f"sunny in {city}"

    members = {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "inputs": {"city": {"type": "string", "description": "the city"}},
        "output_type": "string",
        "forward": forward,
        "skip_forward_signature_validation": True,
    }
    return type("Weather", (Tool,), members)()


def whole() -> None:
    answer = model().generate(ASK)
    need(answer.content and answer.token_usage.output_tokens > 5, answer)


def stream() -> None:
    deltas = list(model().generate_stream(ASK))
    need("".join(delta.content or "" for delta in deltas), deltas)


def tools() -> None:
    ask = [ChatMessage(role="user", content=[{"type": "text", "text": WEATHER}])]
    maker = model(120)
    answer = maker.generate(ask, tools_to_call_from=[weather()], parallel_tool_calls=False)
    need(answer.tool_calls[0].function.name == "weather", answer)


if __name__ == "__main__":
    report(whole=whole, stream=stream, tools=tools)
