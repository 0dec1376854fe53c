"""Fill-in-the-middle: which control tokens a model has for it, and how prefix and suffix stand around them. Pure.

A model without such tokens cannot do it, and nothing is made up in their place. The order is the family's own: most read the
prefix first, Codestral the suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Tokens(Protocol):
    """What is needed of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_id(self, literal: str, /) -> int | None: ...


@dataclass(frozen=True, slots=True)
class _Family:
    """Spellings of one family's control tokens; `middle` "" where the last text needs none."""

    prefix: str
    suffix: str
    middle: str
    is_suffix_first: bool = False


FAMILIES = (
    _Family("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    _Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    _Family("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>"),
    _Family("[PREFIX]", "[SUFFIX]", "", is_suffix_first=True),
)
ENDS = (
    *("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<file_sep>", "<|repo_name|>"),
    *("▁<EOT>", "<|file_separator|>", "<｜end▁of▁sentence｜>", "<|user|>", "<|observation|>"),
)


@dataclass(frozen=True, slots=True)
class Fim:
    """The control ids of one model. `end_ids` stop a middle: behind them another file would begin."""

    prefix: int
    suffix: int
    middle: int | None
    is_suffix_first: bool
    end_ids: frozenset[int]

    def assemble(self, prefix: Sequence[int], suffix: Sequence[int]) -> tuple[int, ...]:
        """Put the ids of both texts in the order that the model was taught."""
        last = () if self.middle is None else (self.middle,)
        if self.is_suffix_first:
            return (self.suffix, *suffix, self.prefix, *prefix, *last)
        return (self.prefix, *prefix, self.suffix, *suffix, *last)


def find_fim(tokenizer: Tokens) -> Fim | None:
    """Look for a family whose tokens the vocabulary has as control tokens, all of them."""
    for family in FAMILIES:
        ids = [
            tokenizer.token_id(text)
            for text in (family.prefix, family.suffix, family.middle)
            if text
        ]
        known = [token for token in ids if token is not None and token in tokenizer.special_ids]
        if len(known) < len(ids):
            continue
        ends = {tokenizer.token_id(text) for text in ENDS}
        return Fim(
            prefix=known[0],
            suffix=known[1],
            middle=known[2] if family.middle else None,
            is_suffix_first=family.is_suffix_first,
            end_ids=frozenset(token for token in ends if token is not None) | frozenset(known),
        )
    return None
