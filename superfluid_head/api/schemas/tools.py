"""Members of a chat request that are about tools (http_api.md 3.1): what may be called, and whether it must be.

Knows no model: whether one can call at all is judged by `api/tools.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from superfluid_head.api.schemas.common import RequestModel

TOOLS_MAX = 128

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def _judge_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("a function name is 1 to 64 of A-Z a-z 0-9 _ . -")
    return name


def _judge_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise ValueError("arguments are an object, so the schema's type must be object")
    return schema


class Function(RequestModel):
    """A function that may be called. `strict` is accepted: arguments are held to their schema where calls are enforced."""

    name: Annotated[str, AfterValidator(_judge_name)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_judge_parameters)] | None = None
    strict: bool | None = None


class Given(RequestModel):
    """What is kept as it was sent beside what was read of it: templates show it with its order and extra members."""

    given: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _keep(cls, data: Any) -> Any:
        return {**data, "given": data} if isinstance(data, dict) else data


class GivenFunction(Function, Given):
    """One entry of `functions`."""


class ToolSpec(Given):
    """One entry of `tools`."""

    type: Literal["function"]
    function: Function


class FunctionName(RequestModel):
    """Names a function."""

    name: str


class NamedTool(RequestModel):
    """Names an entry of `tools`."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(RequestModel):
    """Some of `tools`, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=TOOLS_MAX)]


class AllowedChoice(RequestModel):
    """`tool_choice` that narrows `tools`."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Functions = Annotated[list[GivenFunction], Field(fail_fast=True, max_length=TOOLS_MAX)]
Tools = Annotated[list[ToolSpec], Field(fail_fast=True, max_length=TOOLS_MAX)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedChoice
