"""The body of POST /v1/messages and /v1/messages/count_tokens (http_api.md 8): members, blocks, bounds, and what is refused.

Knows no model and no template: what the blocks become there is `translate.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from superfluid_head.api.schemas.chat import LIMITS, Stops
from superfluid_head.api.schemas.common import Float, Harmless, Int, RequestModel, judge_kinds
from superfluid_head.api.schemas.tools import TOOLS_MAX
from superfluid_head.api.schemas.vendor import TEMPLATE_REFUSED, VendorMembers

BLOCKS_MAX = 4_096
THINKING_TOKENS_MIN = 1_024


def _texts(value: Any) -> Any:
    return judge_kinds(value, ("text",), "block")


class TextBlock(RequestModel):
    """Words."""

    type: Literal["text"]
    text: str


class ToolUse(RequestModel):
    """A call that the assistant made earlier."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(RequestModel):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | list[TextBlock], BeforeValidator(_texts)] = ""
    is_error: bool = False

    def text(self) -> str:
        return text_of(self.content)


class Thinking(RequestModel):
    """Reasoning of an earlier answer. Its signature is not looked at: the template decides what of it is shown."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinking(RequestModel):
    """Reasoning that only the service that made it can read; it is left out."""

    type: Literal["redacted_thinking"]


AnyBlock = TextBlock | ToolUse | ToolResult | Thinking | RedactedThinking
Block = Annotated[AnyBlock, Field(discriminator="type")]
BY_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}


def text_of(content: str | list[TextBlock]) -> str:
    """Join blocks of text with a newline, as chat does with its parts."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content)


class Message(RequestModel):
    """One message; what blocks it may hold depends on its role."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(fail_fast=True, max_length=BLOCKS_MAX)]

    @model_validator(mode="before")
    @classmethod
    def _judge(cls, data: Any) -> Any:
        if isinstance(data, dict):
            kinds = BY_ROLE.get(str(data.get("role")))
            if kinds is not None:
                judge_kinds(data.get("content"), kinds, "block")
        return data

    def blocks(self) -> list[AnyBlock]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return list(self.content)


class Tool(RequestModel):
    """A tool that the caller runs. Tools that a service would run are refused."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: str = "custom"

    @model_validator(mode="before")
    @classmethod
    def _judge(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type") not in (None, "custom"):
            raise ValueError(f"tools of type {str(data['type'])[:40]!r} are not served here")
        return data


class ToolChoice(RequestModel):
    """Whether a tool must be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _judge(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError("name is missing")
        return self


class ThinkingWish(RequestModel):
    """Whether the model is to reason. `budget_tokens` is accepted and bounds nothing by itself: `max_tokens` does."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Int, Field(ge=THINKING_TOKENS_MIN)] | None = None

    @model_validator(mode="after")
    def _judge(self) -> ThinkingWish:
        if self.type == "enabled" and self.budget_tokens is None:
            raise ValueError("budget_tokens is missing")
        return self


class OutputFormat(RequestModel):
    """What the answer's text is held to."""

    type: Literal["json_schema"]
    schema_: Annotated[Any, Field(alias="schema")]


class OutputConfig(RequestModel):
    """Members of `output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(VendorMembers):
    """POST /v1/messages/count_tokens: everything that the prompt depends on."""

    refused: ClassVar[Mapping[str, Harmless]] = TEMPLATE_REFUSED | {
        "mcp_servers": lambda value: value == [],
        "container": lambda _: False,
        "context_management": lambda value: value in ({}, {"edits": []}),
        "inference_geo": lambda _: False,
    }
    accepted: ClassVar[frozenset[str]] = frozenset(
        ("metadata", "service_tier", "cache_control", "betas", "speed", "max_tokens", "stream")
    )

    model: str | None = None
    messages: Annotated[
        list[Message], Field(fail_fast=True, min_length=1, max_length=LIMITS.messages_max)
    ]
    system: Annotated[str | list[TextBlock], BeforeValidator(_texts)] = ""
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=TOOLS_MAX)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingWish | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    @property
    def format(self) -> OutputFormat | None:
        """The constraint of the answer's text, under its new name or its old one."""
        config = self.output_config
        return self.output_format if config is None or config.format is None else config.format


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[Int, Field(ge=1)]
    stop_sequences: Stops | None = None
    temperature: Annotated[Float, Field(ge=0, le=1)] = 1.0
    top_p: Annotated[Float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=0, lt=2**31)] = 0
    stream: bool = False

    @model_validator(mode="after")
    def _judge(self) -> MessagesRequest:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise ValueError("thinking.budget_tokens must be below max_tokens")
        return self
