"""The body of POST /v1/embeddings (http_api.md 6): members, bounds, and its input in any of four forms.

Knows no model; ids are held against the vocabulary, lengths against the window, by `api/embeddings.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from superfluid_head.api.errors import ApiError, invalid
from superfluid_head.api.schemas.common import BodyModel, Harmless, Int
from superfluid_head.api.schemas.vendor import TEMPLATE_REFUSED

INPUTS_MAX = 2_048

Ids = tuple[int, ...]


class EmbeddingsRequest(BodyModel):
    """POST /v1/embeddings. `pooling` is ours: how a model that generates is made to embed."""

    refused: ClassVar[Mapping[str, Harmless]] = TEMPLATE_REFUSED
    accepted: ClassVar[frozenset[str]] = frozenset(("user", "input_type"))

    model: str | None = None
    input: Any = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Int, Field(ge=1, lt=2**31)] | None = None
    pooling: Literal["mean", "last"] | None = None
    truncate_prompt_tokens: Annotated[Int, Field(ge=1, lt=2**31)] | None = None


def inputs_of(value: Any) -> list[str | Ids]:
    """Take an input in any of its four forms. Raises ApiError 400."""
    if value is None:
        raise _wrong("is missing")
    if isinstance(value, str):
        return [_text(value, "input")]
    if not isinstance(value, list):
        raise _wrong("a string, an array of strings, of token ids, or of arrays of token ids")
    if not value:
        raise _wrong("the array is empty")
    if _are_ids(value):
        return [tuple(value)]
    if len(value) > INPUTS_MAX:
        raise _wrong(f"{len(value)} texts; at most {INPUTS_MAX} are taken at once")
    if all(isinstance(item, str) for item in value):
        return [_text(item, f"input[{at}]") for at, item in enumerate(value)]
    if all(isinstance(item, list) for item in value):
        return [_ids(item, at) for at, item in enumerate(value)]
    raise _wrong("an array holds strings, or token ids, or arrays of token ids, not several kinds")


def _text(value: str, param: str) -> str:
    if not value:
        raise _wrong("the text is empty", param)
    return value


def _are_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _ids(item: list[Any], at: int) -> Ids:
    if not item or not _are_ids(item):
        raise _wrong("no token ids", f"input[{at}]")
    return tuple(item)


def _wrong(words: str, param: str = "input") -> ApiError:
    return invalid(f"{param}: {words}", param=param, code="invalid_type")
