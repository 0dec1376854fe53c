"""How the answers of one request are to be read: the model's dialect, the tools that may be called, where the answer starts.

Joins what a request asks for with what its model speaks; made once per request, and makes one reader per choice. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from superfluid_core.modelfiles.tokenizer import Tokenizer
from superfluid_head.text.dialects.dialect import Dialect, Reading
from superfluid_head.text.dialects.events import Reader, Tool
from superfluid_head.text.dialects.shape import Shape
from superfluid_head.text.dialects.thinking import Opening

TAIL_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Speech:
    """What readers and grammars of one request need to know. The default reads everything as content."""

    dialect: Dialect = field(default_factory=Dialect)
    tools: Mapping[str, Tool] = field(default_factory=dict)
    calls_max: int | None = None
    opening: Opening = Opening.BEHIND
    marker_ids: Mapping[str, int] = field(default_factory=dict)

    @property
    def can_reason(self) -> bool:
        return self.dialect.reasoning is not None

    def reader(self) -> Reader | None:
        """Make the reader of one choice."""
        reading = Reading(self.tools, self.calls_max, self.opening, frozenset(self.marker_ids))
        return self.dialect.reader(reading)

    def before_content(self) -> Shape:
        """Describe what precedes the content of a constrained answer."""
        return self.dialect.before_content(self.opening)

    def call_shape(self) -> Shape | None:
        """Describe an answer of calls; None when the model has no way to call, or nothing to."""
        if not self.tools:
            return None
        return self.dialect.call_shape(list(self.tools.values()), self.opening, self.calls_max)


def marker_ids(dialect: Dialect, tokenizer: Tokenizer) -> dict[str, int]:
    """Find the markup of a dialect that is one token of the vocabulary: there nothing else stands for it.

    Tokens that are text like any other are left out: a grammar may have them spelled in pieces.
    """
    found = {marker: tokenizer.token_id(marker) for marker in dialect.markers}
    special = tokenizer.special_ids
    return {marker: token for marker, token in found.items() if token in special}


def tail_text(prompt: tuple[int, ...], tokenizer: Tokenizer) -> str:
    """Return the end of a prompt as text."""
    data = b"".join(tokenizer.token_bytes(token) for token in prompt[-TAIL_TOKENS:])
    return data.decode("utf-8", "replace")
