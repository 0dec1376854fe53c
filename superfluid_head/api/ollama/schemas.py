"""Bodies of Ollama's routes (decisions 32): members, bounds, and what is refused. Knows no model and no template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from superfluid_head.api.schemas.chat import LIMITS, TOP_LOGPROBS_MAX
from superfluid_head.api.schemas.common import BodyModel, Harmless, Int, RequestModel
from superfluid_head.api.schemas.vendor import TEMPLATE_REFUSED, VendorMembers

ACCEPTED = frozenset(("keep_alive", "truncate", "shift"))
"""Models are not loaded and unloaded here, and a prompt that is too long is refused, not cut."""

Think = bool | Literal["low", "medium", "high"]


class Function(RequestModel):
    """What was called; arguments are an object here, not a string."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Call(RequestModel):
    """A call of an earlier answer."""

    id: str | None = None
    function: Function


class Message(RequestModel):
    """One message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Annotated[list[Any], Field(fail_fast=True, max_length=0)] | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True, max_length=128)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Asking(VendorMembers):
    """What both generating routes share. `stream` is on unless it is switched off."""

    refused: ClassVar[Mapping[str, Harmless]] = TEMPLATE_REFUSED

    model: str | None = None
    stream: bool = True
    format: Any = None
    options: dict[str, Any] = Field(default_factory=dict)
    think: Think | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Int, Field(ge=0, le=TOP_LOGPROBS_MAX)] = 0


class ChatBody(Asking):
    """POST /api/chat. Without messages it asks for the model to be there."""

    accepted: ClassVar[frozenset[str]] = ACCEPTED

    messages: Annotated[list[Message], Field(fail_fast=True, max_length=LIMITS.messages_max)] = (
        Field(default_factory=list)
    )
    tools: list[Any] | None = None


class GenerateBody(Asking):
    """POST /api/generate. Without a prompt it asks for the model to be there."""

    refused: ClassVar[Mapping[str, Harmless]] = TEMPLATE_REFUSED | {
        "images": lambda value: value == [],
        "template": lambda value: value == "",
        "context": lambda value: value == [],
    }
    accepted: ClassVar[frozenset[str]] = ACCEPTED

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False


class ShowBody(BodyModel):
    """POST /api/show. `name` is the older spelling."""

    accepted: ClassVar[frozenset[str]] = frozenset(("verbose",))
    refused: ClassVar[Mapping[str, Harmless]] = {
        "system": lambda value: value == "",
        "template": lambda value: value == "",
        "options": lambda value: value == {},
    }

    model: str | None = None
    name: str | None = None
