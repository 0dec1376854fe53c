"""Which tools a chat request offers, which of them its answer may or must call, and how answers are read for that.

Owns the rules between `tools`, `tool_choice`, `parallel_tool_calls` and the model's dialect. A request that needs calls of a
model that has no way to write them is refused by name, never answered as if it had not asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from superfluid_core.session import Grammar
from superfluid_head.api.errors import ApiError, invalid
from superfluid_head.api.sampling import judge_constrained
from superfluid_head.api.schemas.chat import ChatRequest
from superfluid_head.api.schemas.tools import AllowedChoice, NamedTool, ToolSpec
from superfluid_head.text.chat import ModelText
from superfluid_head.text.constraints import judge_schema
from superfluid_head.text.dialects.dialect import Dialect
from superfluid_head.text.dialects.events import Tool
from superfluid_head.text.dialects.thinking import Opening
from superfluid_head.text.speech import Speech, marker_ids, tail_text


@dataclass(frozen=True, slots=True)
class Offer:
    """What may be called. `is_required`: the answer is calls and nothing else. `calls_max` None: as many as it likes."""

    tools: dict[str, Tool] = field(default_factory=dict)
    is_required: bool = False
    calls_max: int | None = None


def offer_of(body: ChatRequest) -> Offer:
    """Judge the members that are about tools together. Raises ApiError 400."""
    specs = body.tools or []
    for index, spec in enumerate(specs):
        if any(spec.function.name == other.function.name for other in specs[:index]):
            raise invalid("two tools have this name", param=f"tools[{index}].function.name")
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        if choice == "required" and not specs:
            raise invalid("tool_choice required needs tools", param="tool_choice")
        allowed = [] if choice == "none" else specs
        most = None if body.parallel_tool_calls else 1
        return Offer(_tools(allowed), choice == "required", most)
    if isinstance(choice, NamedTool):
        return Offer(_tools(_named(specs, [choice], "tool_choice.function.name")), True, 1)
    return _allowed(specs, choice, None if body.parallel_tool_calls else 1)


def _allowed(specs: list[ToolSpec], choice: AllowedChoice, most: int | None) -> Offer:
    wanted = choice.allowed_tools
    found = _named(specs, wanted.tools, "tool_choice.allowed_tools.tools")
    return Offer(_tools(found), wanted.mode == "required", most)


def _named(specs: list[ToolSpec], names: list[NamedTool], param: str) -> list[ToolSpec]:
    known = {spec.function.name: spec for spec in specs}
    for name in names:
        if name.function.name not in known:
            raise invalid(f"no tool is called {name.function.name[:64]!r}", param=param)
    return [known[name.function.name] for name in names]


def _tools(specs: list[ToolSpec]) -> dict[str, Tool]:
    return {
        spec.function.name: Tool(spec.function.name, spec.function.parameters or {})
        for spec in specs
    }


def judge_offer(body: ChatRequest, offer: Offer, dialect: Dialect) -> None:
    """Refuse tools that this model cannot call, and schemas that cannot be enforced. Raises ApiError 400."""
    if offer.tools and dialect.calls is None:
        raise ApiError(
            400,
            "this model's chat template has no known way to call tools (the server may name one: --tool-call-parser)",
            code="unsupported_value",
            param="tools",
        )
    if offer.is_required:
        for index, spec in enumerate(body.tools or []):
            if spec.function.name in offer.tools and spec.function.parameters is not None:
                judge_schema(spec.function.parameters, f"tools[{index}].function.parameters")


def opening_of(body: ChatRequest, dialect: Dialect, tail: str) -> Opening:
    """Tell whether the prompt has begun or ended a reasoning block of its own (http_api Q3)."""
    if body.continue_final_message:
        return dialect.continued(body.messages[-1].text() or "")
    if body.add_generation_prompt is False:
        return dialect.opening("")
    return dialect.opening(tail)


def speech_of(body: ChatRequest, offer: Offer, text: ModelText, prompt: tuple[int, ...]) -> Speech:
    """Settle how the answers of a request are to be read."""
    dialect = text.dialect
    tail = tail_text(prompt, text.tokenizer) if dialect.looks_back else ""
    return Speech(
        dialect,
        offer.tools,
        offer.calls_max,
        opening_of(body, dialect, tail),
        marker_ids(dialect, text.tokenizer),
    )


async def grammar_of(
    body: ChatRequest, offer: Offer, text: ModelText, speech: Speech
) -> Grammar | None:
    """Compose what the answer is held to: calls where they are required, else the constraint of its content.

    Raises InvalidRequestError(INVALID_GRAMMAR).
    """
    constraint = body.constraint()
    if constraint is not None or offer.is_required:
        judge_constrained(body)
    if offer.is_required:
        return await text.constrain(None, instead=speech.call_shape(), param="tools")
    if constraint is None:
        return None
    before, calls = speech.before_content(), speech.call_shape()
    return await text.constrain(constraint, before, calls, param=body.constrained_by)
