"""The body of POST /v1/completions (http_api.md 4): what it adds to the members that all routes share, and its prompt.

Knows no model; ids are held against the vocabulary by `api/prompts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from superfluid_head.api.errors import invalid
from superfluid_head.api.schemas.chat import (
    ACCEPTED,
    LIMITS,
    REFUSED,
    TOP_LOGPROBS_MAX,
    SamplingMembers,
)
from superfluid_head.api.schemas.common import Harmless, Int

MAX_TOKENS = 16
OWN = frozenset(("echo", "best_of", "add_special_tokens"))

Ids = tuple[int, ...]


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
    """Take a prompt in any of its four forms. Raises ApiError 400."""
    if value is None:
        return [""]
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _wrong("a string, an array of strings, of token ids, or of arrays of token ids")
    if not value:
        raise _wrong("the array is empty")
    if _are_ids(value):
        return [tuple(value)]
    if all(isinstance(item, str) for item in value):
        return list(value)
    if all(isinstance(item, list) for item in value):
        return [_ids(item, index) for index, item in enumerate(value)]
    raise _wrong("an array holds strings, or token ids, or arrays of token ids, not several kinds")


def _are_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _ids(item: list[Any], index: int) -> Ids:
    if not item or not _are_ids(item):
        raise _wrong("no token ids", f"prompt[{index}]")
    return tuple(item)


def _wrong(words: str, param: str = "prompt") -> Exception:
    return invalid(f"{param}: {words}", param=param, code="invalid_type")
