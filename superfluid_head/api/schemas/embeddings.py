"""The body of POST /v1/embeddings (http_api.md 6): members, bounds, and its input in any of four forms.

Knows no model; ids are held against the vocabulary, lengths against the window, by `api/embeddings.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from superfluid_head.api.schemas.common import BodyModel, Harmless, Int
from superfluid_head.api.schemas.texts import Ids, texts_of, wrong
from superfluid_head.api.schemas.vendor import TEMPLATE_REFUSED

INPUTS_MAX = 2_048

__all__ = ["EmbeddingsRequest", "Ids", "inputs_of"]


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
    """Take an input in any of its forms, none of it empty. Raises ApiError 400."""
    if value is None:
        raise wrong("is missing", "input")
    found = texts_of(value, "input", INPUTS_MAX)
    for at, text in enumerate(found):
        if not text:
            raise wrong("the text is empty", "input" if isinstance(value, str) else f"input[{at}]")
    return found
