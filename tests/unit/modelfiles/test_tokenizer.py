"""The tokenizer's own promises: exact bytes, no forged control tokens, whole batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from superfluid_core.errors import InvalidRequestError, ModelFilesError
from superfluid_core.modelfiles.byte_alphabet import BYTE_OF_CHARACTER, CHARACTER_OF_BYTE
from superfluid_core.modelfiles.endings import is_control_shaped
from superfluid_core.modelfiles.literals import pattern_of, start_pattern_of
from superfluid_core.modelfiles.pretokenizers import pre_tokenizer
from superfluid_core.modelfiles.resolve import resolve
from superfluid_core.modelfiles.tokenizer import TextSettings, Tokenizer
from tests.unit.modelfiles.corpus import corpus
from tests.unit.modelfiles.vocabularies import (
    byte_level_json,
    metaspace_json,
    write_sentence_piece,
)


def text_of(ids: list[int], tokenizer: Tokenizer) -> bytes:
    return b"".join(map(tokenizer.token_bytes, ids))


def test_the_demo_knows_its_ends(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocabulary == 49152
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == (2, 0)
    assert not tokenizer.adds_bos
    assert not tokenizer.puts_leading_space
    assert tokenizer.special_ids == frozenset(range(17))
    assert "<|im_start|>" in tokenizer.special_texts


def test_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    missing = bytes(byte for byte, token in enumerate(tokenizer.byte_ids) if token is None)
    texts = [
        text
        for text in corpus(600, tokenizer.special_texts)
        if not any(byte in missing for byte in text.encode())
    ]
    assert len(texts) > 300
    for special in (False, True):
        for text, ids in zip(
            texts, tokenizer.encode_batch(texts, allow_special=special), strict=True
        ):
            assert text_of(ids, tokenizer) == text.encode()


def test_control_tokens_are_spelled_unless_allowed(tokenizer: Tokenizer) -> None:
    for text in tokenizer.special_texts:
        token = tokenizer.token_id(text)
        assert tokenizer.encode(text, allow_special=True) == [token]
        ordinary = tokenizer.encode(text, allow_special=False)
        assert len(ordinary) > 1
        assert tokenizer.special_ids.isdisjoint(ordinary)


def test_a_batch_gives_what_single_calls_give(tokenizer: Tokenizer) -> None:
    texts = corpus(120, tokenizer.special_texts)
    for special in (False, True):
        together = tokenizer.encode_batch(texts, allow_special=special)
        assert together == [tokenizer.encode(text, allow_special=special) for text in texts]
    assert tokenizer.encode_batch([], allow_special=True) == []
    assert tokenizer.encode("", allow_special=True) == []


def test_bytes_are_spelled_one_token_each(tokenizer: Tokenizer) -> None:
    data = "aé😀\n".encode()
    ids = tokenizer.spell(data)
    assert [tokenizer.token_bytes(token) for token in ids] == [bytes([byte]) for byte in data]
    with pytest.raises(ModelFilesError, match="0xFF"):
        tokenizer.spell(b"\xff")


def test_ids_without_a_text_have_no_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(1 << 40) == b""


def test_ordinary_ids_are_whole_plain_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.ordinary_ids()
    assert len(ids) > 48_000
    assert tokenizer.special_ids.isdisjoint(ids)
    assert all(tokenizer.token_bytes(token).decode() for token in ids[::100])


def test_half_of_a_surrogate_pair_is_a_fault_of_the_request(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode("a\ud83d", allow_special=True)
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode_batch(["a", "\ud83d"], allow_special=False)


def test_added_tokens_that_are_not_special_stay_plain_vocabulary() -> None:
    own = Tokenizer(byte_level_json(**{"<tool>": {}, "<|x|>": {}, "<s>": {"special": True}}))
    assert own.special_texts == ("<|x|>", "<s>")
    tool = own.token_id("<tool>")
    assert own.encode("<tool>", allow_special=False) == [tool]
    assert len(own.encode("<|x|>", allow_special=False)) == 5
    assert own.token_bytes(own.encode("<tool>", allow_special=True)[0]) == b"<tool>"


def test_a_declared_end_is_special_whatever_its_flag() -> None:
    data = byte_level_json(**{"<stop>": {}})
    own = Tokenizer(data, TextSettings(eos_text="<stop>"))
    assert own.eos_ids == (own.token_id("<stop>"),)
    assert len(own.encode("<stop>", allow_special=False)) == 6


def test_ends_are_found_by_name_when_none_is_declared() -> None:
    own = Tokenizer(byte_level_json(**{"<|im_end|>": {"special": True}}))
    assert own.eos_ids == (own.token_id("<|im_end|>"),)


@pytest.mark.parametrize(
    "flags", [{}, {"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}]
)
def test_cutting_at_specials_equals_the_library(flags: dict[str, bool]) -> None:
    data = byte_level_json(
        **{"<|a|>": {"special": True, **flags}, "<|a|>b": {"special": True}, "<t>": flags}
    )
    own, theirs = Tokenizer(data), tokenizers.Tokenizer.from_str(data.decode())
    pieces = ("<|a|>", "<|a|>b", "<t>", " ", "\n", "hello", " hello", "é")
    for text in (
        "".join(pieces[i] for i in (a, b, c)) for a in range(8) for b in range(8) for c in range(8)
    ):
        assert own.encode(text, allow_special=True) == theirs.encode(text).ids, text


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_leading_blanks_equal_the_library_for_every_scheme(scheme: str) -> None:
    data = metaspace_json(scheme)
    own = Tokenizer(data, TextSettings(bos_text="<s>", eos_text="</s>"))
    theirs = tokenizers.Tokenizer.from_str(data.decode())
    assert own.puts_leading_space is (scheme != "never")
    assert own.adds_bos
    for text in ("a", " a", "a</s>a", "</s>a b", "</s> a", "é a<s>a", "<s></s>"):
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert own.encode(text, allow_special=True) == expected, text
    assert own.encode("b", allow_special=True, add_bos=True)[0] == own.bos_id
    assert own.encode("<s>b", allow_special=True, add_bos=True).count(1) == 1


def test_sentence_piece_bytes_are_exact(tmp_path: Path) -> None:
    own = resolve(str(write_sentence_piece(tmp_path / "s.gguf"))).tokenizer()
    for text in ("the quick", " lazy  dogs ", "é世😀\x07", "a\nb\tc"):
        ids = own.encode(text, allow_special=False)
        assert text_of(ids, own) == b" " + text.encode()
    assert own.token_bytes(own.spell(b"\xff")[0]) == b"\xff"
    assert own.spell(b"A") != own.encode("A", allow_special=False)


def test_unknown_pre_tokenizers_are_refused_by_name() -> None:
    with pytest.raises(ModelFilesError, match="'dna-7'"):
        pre_tokenizer("dna-7")


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_file_is_refused(data: bytes) -> None:
    with pytest.raises(ModelFilesError, match="tokenizer"):
        Tokenizer(data)


def test_the_byte_alphabet_is_one_to_one() -> None:
    assert len(BYTE_OF_CHARACTER) == 256
    assert CHARACTER_OF_BYTE[0x20] == "Ġ"
    assert CHARACTER_OF_BYTE[0x0A] == "Ċ"


def test_literals_match_longest_first() -> None:
    pattern = pattern_of(["<a>", "<a>b", "<ab>", "[x"])
    assert pattern is not None
    assert pattern.findall("<a>b<a><ab>[x<") == ["<a>b", "<a>", "<ab>", "[x"]
    assert pattern_of([]) is None
    assert pattern_of([""]) is None
    starts = start_pattern_of(["aa"])
    assert starts is not None
    assert [found.start() for found in starts.finditer("aaa")] == [0, 1]
    with pytest.raises(ModelFilesError, match="too long"):
        pattern_of(["x" * 1000])


def test_control_shapes_are_told_from_text() -> None:
    assert all(map(is_control_shaped, ("<|im_end|>", "<｜end▁of▁sentence｜>")))
    assert not any(map(is_control_shaped, ("<tool>", "<||>", "<|", "|>", "", "<|x>")))
