"""The body of POST /v1/completions (http_api.md 4): what it adds to the members that all routes share, and its prompt.

Knows no model; ids are held against the vocabulary by `api/prompts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from superfluid_head.api.schemas.chat import (
    ACCEPTED,
    LIMITS,
    REFUSED,
    TOP_LOGPROBS_MAX,
    SamplingMembers,
)
from superfluid_head.api.schemas.common import Harmless, Int
from superfluid_head.api.schemas.texts import Ids, texts_of

MAX_TOKENS = 16
OWN = frozenset(("echo", "best_of", "add_special_tokens"))

__all__ = ["CompletionRequest", "Ids", "prompts_of"]


class CompletionRequest(SamplingMembers):
    """POST /v1/completions. `max_tokens` 0 asks for the echo alone."""

    refused: ClassVar[Mapping[str, Harmless]] = {
        name: rule for name, rule in REFUSED.items() if name not in OWN
    }
    accepted: ClassVar[frozenset[str]] = ACCEPTED | {"n_predict", "repeat_penalty"}

    prompt: Any = None
    suffix: str | None = None
    max_tokens: Annotated[Int, Field(ge=0)] = MAX_TOKENS
    echo: bool = False
    logprobs: Annotated[Int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    best_of: Annotated[Int, Field(ge=1, le=LIMITS.choices_max)] | None = None
    add_special_tokens: bool = True

    @property
    def tried(self) -> int:
        """How many answers are made for each prompt."""
        return self.n if self.best_of is None else self.best_of


def prompts_of(value: Any) -> list[str | Ids]:
    """Take a prompt in any of its forms; none is an empty text. Raises ApiError 400."""
    return [""] if value is None else texts_of(value, "prompt")
