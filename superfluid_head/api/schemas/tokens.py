"""The bodies of POST /tokenize and /detokenize, in vLLM's spelling and in llama.cpp's (http_api.md 9)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from superfluid_head.api.schemas.chat import (
    KWARGS_MAX,
    LIMITS,
    ChatMessage,
    judge_kwargs,
)
from superfluid_head.api.schemas.common import BodyModel, TokenIds


class TokenizeRequest(BodyModel):
    """One of `prompt`, `messages` and (llama.cpp's) `content`."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: (
        Annotated[
            list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=LIMITS.messages_max)
        ]
        | None
    ) = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: (
        Annotated[dict[str, Any], Field(max_length=KWARGS_MAX), AfterValidator(judge_kwargs)] | None
    ) = None
    tools: list[Any] | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(BodyModel):
    """Ids to be read."""

    model: str | None = None
    tokens: TokenIds
