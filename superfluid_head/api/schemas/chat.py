"""The body of POST /v1/chat/completions (http_api.md 3.1-3.3): every member, its bounds, and what is refused.

Knows no model: ranges that depend on the vocabulary or the window are judged by `api/sampling.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from superfluid_core.limits import HttpLimits
from superfluid_head.api.schemas.common import (
    BodyModel,
    Float,
    Harmless,
    Int,
    RequestModel,
    TokenId,
    few,
)
from superfluid_head.api.schemas.structured import MEMBERS, constraint_of
from superfluid_head.api.schemas.tools import FunctionName, Functions, ToolChoice, Tools
from superfluid_head.text.constraints import Constraint

LIMITS = HttpLimits()
TOP_LOGPROBS_MAX = 20
IDS_MAX = 1_024
PARTS_MAX = 4_096
WORDS_MAX = 256
KWARG_CHARS_MAX = 1_024
KWARGS_MAX = 64


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _judge_stops(stops: list[str]) -> list[str]:
    if any(not stop for stop in stops):
        raise ValueError("a stop string is empty")
    if any(len(stop) > LIMITS.stop_chars_max for stop in stops):
        raise ValueError(f"a stop string is longer than {LIMITS.stop_chars_max} characters")
    return stops


def judge_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Template arguments are scalars and must not shadow what the server sets."""
    for name, value in kwargs.items():
        if name in ("tools", "messages", "tokenize", "chat_template", "bos_token", "eos_token"):
            raise ValueError(f"{name[:40]} may not be set here")
        if value is not None and not isinstance(value, str | int | float | bool):
            raise ValueError(f"{name[:40]} is not a plain value")
        if isinstance(value, str) and len(value) > KWARG_CHARS_MAX:
            raise ValueError(f"{name[:40]} is too long")
    return kwargs


def _judge_bias(bias: dict[str, float]) -> dict[str, float]:
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError(f"{key[:40]!r} is not a token id")
        if not -100 <= value <= 100:
            raise ValueError("a bias is outside -100..100")
    return bias


Stops = Annotated[
    list[str],
    BeforeValidator(_stops),
    Field(max_length=LIMITS.stops_max),
    AfterValidator(_judge_stops),
]
Choices = Annotated[Int, Field(ge=1, le=LIMITS.choices_max)]
Penalty = Annotated[Float, Field(ge=-2, le=2)]


class TextPart(RequestModel):
    """A part of a message's content."""

    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""

    def plain(self) -> str:
        return self.text if self.type == "text" else self.refusal


def _parts(value: Any) -> Any:
    """Refuse parts that are not text, naming them."""
    if isinstance(value, list):
        for index, part in enumerate(value):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in ("text", "refusal"):
                raise ValueError(
                    f"part {index} is of type {kind[:40]!r}; this model reads text only"
                )
    return value


Parts = str | Annotated[list[TextPart], Field(fail_fast=True, max_length=PARTS_MAX)]


class FunctionCall(RequestModel):
    """What an assistant called earlier; `arguments` is JSON as a string."""

    name: str
    arguments: str = "{}"


class ToolCall(RequestModel):
    """One call of an earlier assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(RequestModel):
    """One message. Text parts are joined with a newline."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Parts | None, BeforeValidator(_parts)] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=128)] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _judge(self) -> ChatMessage:
        if self.content is None:
            has_other = self.tool_calls or self.function_call or self.thoughts or self.refusal
            if not (self.role == "assistant" and has_other):
                raise ValueError("content is missing")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("tool_call_id is missing")
        return self

    @property
    def thoughts(self) -> str | None:
        return self.reasoning_content or self.reasoning

    def text(self) -> str | None:
        if isinstance(self.content, list):
            return "\n".join(part.plain() for part in self.content)
        return self.content if self.content is not None else self.refusal


class StreamOptions(RequestModel):
    """Members of `stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


REFUSED: dict[str, Harmless] = {
    "chat_template": lambda _: False,
    "audio": lambda _: False,
    "modalities": lambda value: value == ["text"],
    "prompt_logprobs": lambda _: False,
    "thinking_token_budget": lambda _: False,
    "documents": lambda value: value == [],
    "echo": lambda value: value is False,
    "add_special_tokens": lambda value: value is False,
    "use_beam_search": lambda value: value is False,
    "best_of": lambda value: value == 1,
    "spaces_between_special_tokens": lambda value: value is True,
    "priority": lambda value: value == 0 and not isinstance(value, bool),
    "web_search_options": lambda value: value == {},
    "logits_processors": lambda value: value == [],
    "guided_whitespace_pattern": lambda value: value == "",
}

ACCEPTED = frozenset(
    (
        *("user", "safety_identifier", "prompt_cache_key", "metadata", "store", "service_tier"),
        *("verbosity", "prediction", "moderation", "prompt_cache_options", "cache_prompt"),
        *("prompt_cache_retention", "request_id"),
        "guided_decoding_backend",
    )
)


class SamplingMembers(BodyModel):
    """Members that every generating endpoint shares."""

    model: str | None = None
    n: Choices = 1
    temperature: Annotated[Float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Int, Field(ge=-1, lt=2**31)] = 0
    min_p: Annotated[Float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[Float, Field(gt=0, le=100)] = 1.0
    logit_bias: Annotated[dict[str, Float], few(IDS_MAX), AfterValidator(_judge_bias)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=IDS_MAX)] | None
    ) = None
    bad_words: Annotated[list[str], Field(fail_fast=True, max_length=WORDS_MAX)] | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=IDS_MAX)] | None = (
        None
    )
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[Int, Field(ge=0, lt=2**31)] = 0
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    truncate_prompt_tokens: Annotated[Int, Field(ge=1, lt=2**31)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    grammar: Any = None
    json_schema: Any = None

    def constraint(self) -> Constraint | None:
        """Find what constrains the reply's text. Raises InvalidRequestError or ApiError 400."""
        return constraint_of({name: getattr(self, name) for name in MEMBERS})

    @property
    def constrained_by(self) -> str | None:
        """The member that constrains the reply's text."""
        given = ((name, getattr(self, name)) for name in MEMBERS)
        return next((name for name, value in given if constraint_of({name: value})), None)

    @model_validator(mode="before")
    @classmethod
    def _respell(cls, data: Any) -> Any:
        """Spellings of llama.cpp."""
        if not isinstance(data, dict):
            return data
        budget = data.get("n_predict")
        if budget is not None and budget != -1 and data.get("max_tokens") is None:
            data = {**data, "max_tokens": budget}
        if data.get("repeat_penalty") is not None and data.get("repetition_penalty") is None:
            data = {**data, "repetition_penalty": data["repeat_penalty"]}
        return data


class ChatRequest(SamplingMembers):
    """POST /v1/chat/completions."""

    refused: ClassVar[Mapping[str, Harmless]] = REFUSED
    accepted: ClassVar[frozenset[str]] = ACCEPTED | {"n_predict", "repeat_penalty"}

    messages: Annotated[
        list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=LIMITS.messages_max)
    ]
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: (
        Annotated[dict[str, Any], Field(max_length=KWARGS_MAX), AfterValidator(judge_kwargs)] | None
    ) = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    functions: Functions | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    include_reasoning: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )

    @property
    def output_max(self) -> int | None:
        """The requested budget; `max_completion_tokens` wins."""
        return self.max_completion_tokens or self.max_tokens
