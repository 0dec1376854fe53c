"""Fill-in-the-middle: only what the vocabulary has as control tokens, in the family's own order."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from superfluid_head.text.fim import Fim, find_fim


@dataclass
class Vocabulary:
    texts: tuple[str, ...]
    special_ids: frozenset[int]

    def token_id(self, literal: str, /) -> int | None:
        return self.texts.index(literal) if literal in self.texts else None


def found(*texts: str, special: int | None = None) -> Fim | None:
    count = len(texts) if special is None else special
    return find_fim(Vocabulary(texts, frozenset(range(count))))


@pytest.mark.parametrize(
    ("texts", "ids"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), (0, 10, 1, 20, 2)),
        (("<fim_middle>", "<fim_prefix>", "<fim_suffix>"), (1, 10, 2, 20, 0)),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), (0, 10, 1, 20, 2)),
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), (0, 10, 1, 20, 2)),
        (("[PREFIX]", "[SUFFIX]"), (1, 20, 0, 10)),
    ],
)
def test_each_family_reads_prefix_and_suffix_in_its_own_order(
    texts: tuple[str, ...], ids: tuple[int, ...]
) -> None:
    fim = found(*texts)
    assert fim is not None
    assert fim.assemble((10,), (20,)) == ids


def test_a_vocabulary_that_lacks_one_or_has_it_as_text_only_cannot() -> None:
    assert found("<|fim_prefix|>", "<|fim_suffix|>") is None
    assert found("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", special=2) is None
    assert found("a", "b") is None


def test_what_would_begin_another_file_ends_a_middle() -> None:
    fim = found(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|endoftext|>"
    )
    assert fim is not None
    assert fim.end_ids == {0, 1, 2, 3, 4}
