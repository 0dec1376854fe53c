"""The body of POST /v1/responses (http_api.md 7): members, items of the input, bounds, and what a head without a store refuses.

Knows no model and no template: what the items become there is `translate.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from superfluid_head.api.schemas.chat import LIMITS, TOP_LOGPROBS_MAX
from superfluid_head.api.schemas.common import Float, Harmless, Int, RequestModel, few, judge_kinds
from superfluid_head.api.schemas.tools import TOOLS_MAX
from superfluid_head.api.schemas.vendor import TEMPLATE_REFUSED, VendorMembers

METADATA_MAX = 16
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512
PARTS_MAX = 4_096

TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
LOGPROBS = "message.output_text.logprobs"


class Part(RequestModel):
    """A part of a message's content."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str = ""
    refusal: str = ""

    def plain(self) -> str:
        return self.refusal if self.type == "refusal" else self.text


Words = Annotated[
    str | Annotated[list[Part], Field(fail_fast=True, max_length=PARTS_MAX)],
    BeforeValidator(lambda value: judge_kinds(value, TEXT_PARTS, "part")),
]


def plain(words: str | list[Part]) -> str:
    """Join parts with a newline, as chat does."""
    return words if isinstance(words, str) else "\n".join(part.plain() for part in words)


class MessageItem(RequestModel):
    """A message, of anybody."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Words


class CallItem(RequestModel):
    """A call that the assistant made earlier; `arguments` is JSON as a string."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputItem(RequestModel):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Words


class ThoughtPart(RequestModel):
    """A part of a reasoning item."""

    text: str = ""


class ReasoningItem(RequestModel):
    """Reasoning of an earlier answer; encrypted content can only be read by the service that made it, and is left out."""

    type: Literal["reasoning"]
    content: Annotated[list[ThoughtPart], Field(fail_fast=True, max_length=PARTS_MAX)] = Field(
        default_factory=list
    )
    summary: Annotated[list[ThoughtPart], Field(fail_fast=True, max_length=PARTS_MAX)] = Field(
        default_factory=list
    )

    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary)


AnyItem = MessageItem | CallItem | OutputItem | ReasoningItem
Item = Annotated[AnyItem, Field(discriminator="type")]


def _typed(value: Any) -> Any:
    """Messages may leave out their type; kinds that are not read here are named."""
    if isinstance(value, list):
        value = [
            {"type": "message", **item} if isinstance(item, dict) and "role" in item else item
            for item in value
        ]
    return judge_kinds(value, ITEMS, "item")


class Tool(RequestModel):
    """A function that the caller runs. Tools that a service would run are refused."""

    type: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    given: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _judge(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if isinstance(data.get("type"), str) and data["type"] != "function":
            raise ValueError(f"tools of type {data['type'][:40]!r} are not served here")
        return {**data, "given": data}


class NamedTool(RequestModel):
    """Names an entry of `tools`."""

    type: Literal["function"]
    name: str


class AllowedTools(RequestModel):
    """Some of `tools`, and whether one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=TOOLS_MAX)]


class Format(RequestModel):
    """What the text is held to; the schema stands flat beside its name."""

    type: Literal["text", "json_object", "json_schema"]
    name: Any = None
    schema_: Annotated[Any, Field(alias="schema")] = None
    strict: Any = None


class TextWish(RequestModel):
    """Members of `text`."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningWish(RequestModel):
    """Members of `reasoning`. Nothing here makes summaries: reasoning is told as it was written."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(RequestModel):
    """Members of `stream_options`."""

    include_obfuscation: bool = False


def _judge_metadata(metadata: dict[str, str]) -> dict[str, str]:
    for key, value in metadata.items():
        if len(key) > METADATA_KEY_CHARS_MAX or len(value) > METADATA_VALUE_CHARS_MAX:
            raise ValueError("a key or a value is too long")
    return metadata


class ResponsesRequest(VendorMembers):
    """POST /v1/responses."""

    refused: ClassVar[Mapping[str, Harmless]] = TEMPLATE_REFUSED | {
        "previous_response_id": lambda _: False,
        "conversation": lambda _: False,
        "prompt": lambda _: False,
        "background": lambda value: value is False,
        "context_management": lambda value: value == [],
    }
    accepted: ClassVar[frozenset[str]] = frozenset(
        ("store", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    ) | {"service_tier", "prompt_cache_options", "moderation"}

    model: str | None = None
    input: Annotated[
        str
        | Annotated[
            list[Item], Field(fail_fast=True, min_length=1, max_length=LIMITS.messages_max)
        ],
        BeforeValidator(_typed),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[Int, Field(ge=1)] | None = None
    max_tool_calls: Annotated[Int, Field(ge=1)] | None = None
    temperature: Annotated[Float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    top_logprobs: Annotated[Int, Field(ge=0, le=TOP_LOGPROBS_MAX)] = 0
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=TOOLS_MAX)] = Field(
        default_factory=list
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    text: TextWish = Field(default_factory=TextWish)
    reasoning: ReasoningWish = Field(default_factory=ReasoningWish)
    include: Annotated[list[str], Field(fail_fast=True, max_length=32)] = Field(
        default_factory=list
    )
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: Annotated[
        dict[str, str],
        few(METADATA_MAX),
        Field(max_length=METADATA_MAX),
        AfterValidator(_judge_metadata),
    ] = Field(default_factory=dict)
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def has_logprobs(self) -> bool:
        return self.top_logprobs > 0 or LOGPROBS in self.include
