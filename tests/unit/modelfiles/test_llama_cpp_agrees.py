"""Token ids of GGUF vocabularies, compared one by one with llama.cpp's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from superfluid_core.modelfiles.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from superfluid_core.modelfiles.resolve import ModelFiles, resolve
from superfluid_core.modelfiles.tokenizer import Tokenizer
from tests.unit.modelfiles.corpus import corpus
from tests.unit.modelfiles.llama_cpp import LlamaCpp, write_tiny_llama
from tests.unit.modelfiles.vocabularies import cut_down, write_sentence_piece

pytestmark = [pytest.mark.reference, pytest.mark.slow]


def distinct_shapes() -> list[str]:
    """One name for each way to cut words."""
    names: dict[PreTokenizer, str] = {}
    for name, shape in PRE_TOKENIZERS.items():
        names.setdefault(shape, name)
    return list(names.values())


def differences(path: Path, ours: Tokenizer, texts: Sequence[str]) -> list[tuple[str, bool]]:
    """The texts, with the mode, on which the two disagree."""
    judge = LlamaCpp(path)
    try:
        found = []
        for special in (False, True):
            encoded = ours.encode_batch(texts, allow_special=special, add_bos=not special)
            for text, ids in zip(texts, encoded, strict=True):
                if judge.tokens(text, special=special, add_bos=not special) != ids:
                    found.append((text, special))
        return found
    finally:
        judge.close()


def test_the_demo_model_is_tokenized_as_llama_cpp_does(
    demo: ModelFiles, tokenizer: Tokenizer
) -> None:
    texts = corpus(2000, tokenizer.special_texts)
    assert len(set(texts)) > 1600
    assert differences(demo.path, tokenizer, texts) == []


@pytest.mark.parametrize("name", distinct_shapes())
def test_other_pre_tokenizers_cut_as_llama_cpp_does(
    name: str, demo_metadata: dict[str, Any], tmp_path: Path
) -> None:
    fields = cut_down(demo_metadata, 6000)
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path, fields.pop("tokens"), {"model": "gpt2", "pre": name, **fields})
    ours = resolve(str(path)).tokenizer()
    assert differences(path, ours, corpus(120, ours.special_texts, seed=len(name))) == []


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_is_tokenized_as_llama_cpp_does(prefix: bool, tmp_path: Path) -> None:
    path = write_sentence_piece(tmp_path / "spm.gguf", add_space_prefix=prefix)
    ours = resolve(str(path)).tokenizer()
    assert ours.puts_leading_space is prefix
    assert ours.adds_bos
    assert differences(path, ours, corpus(2000, ours.special_texts)) == []


def test_bytes_of_tokens_are_those_of_llama_cpp(demo: ModelFiles, tokenizer: Tokenizer) -> None:
    judge = LlamaCpp(demo.path)
    try:
        for token in tokenizer.ordinary_ids()[::97]:
            assert judge.piece(token) == tokenizer.token_bytes(token), token
    finally:
        judge.close()
