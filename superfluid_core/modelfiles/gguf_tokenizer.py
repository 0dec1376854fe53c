"""The tokenizer inside a GGUF, written as the tokenizer.json that a Hugging Face directory has.

Owns the translation of `tokenizer.ggml.*` for the two families that GGUF files of decoders use:
`gpt2` (byte-level BPE with merges) and `llama` (SentencePiece with scores and byte tokens). It must
not know the tokenizers library: the text that it writes is the same whatever library version runs,
so it can be hashed, sent to a head and built there. The idea of the second family: SentencePiece
merges the neighbours whose joined token scores best, which is BPE with the merges ranked by score.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.byte_alphabet import CHARACTER_OF_BYTE
from superfluid_core.modelfiles.endings import is_control_shaped
from superfluid_core.modelfiles.pretokenizers import pre_tokenizer
from superfluid_core.modelfiles.values import Fields

SPACE = "▁"
UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
NORMAL = 1


def tokenizer_json(metadata: Mapping[str, object]) -> bytes:
    """Write the tokenizer of GGUF `metadata`; the same metadata gives the same bytes."""
    fields = Fields(metadata, "GGUF metadata")
    model = fields.text("tokenizer.ggml.model")
    tokens = fields.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelFilesError("GGUF metadata: the file holds no vocabulary")
    kinds = _kinds(fields, len(tokens))
    if model == "gpt2":
        table = _byte_level(fields, tokens, kinds)
    elif model == "llama":
        table = _sentence_piece(fields, tokens, kinds)
    else:
        raise ModelFilesError(f"unknown tokenizer {model[:60]!r}; known are gpt2 and llama")
    table["version"] = "1.0"
    table["truncation"] = table["padding"] = None
    table["added_tokens"] = _added(table["model"]["vocab"], tokens, kinds)
    table["post_processor"] = _post_processor(fields, tokens, with_bos=adds_bos(metadata))
    return json.dumps(table, ensure_ascii=False).encode()


def tokenizer_settings(metadata: Mapping[str, object]) -> dict[str, object]:
    """Write what a tokenizer_config.json would say: the texts of BOS and EOS, and who adds BOS."""
    fields = Fields(metadata, "GGUF metadata")
    tokens = fields.texts("tokenizer.ggml.tokens")
    settings: dict[str, object] = {"add_bos_token": adds_bos(metadata)}
    for name in ("bos", "eos"):
        ids = fields.ids(f"tokenizer.ggml.{name}_token_id")
        if ids and ids[0] < len(tokens):
            settings[f"{name}_token"] = tokens[ids[0]]
    return settings


def adds_bos(metadata: Mapping[str, object]) -> bool:
    """Whether texts begin with BOS: what the file says, else what its family does."""
    fields = Fields(metadata, "GGUF metadata")
    if fields.text("tokenizer.ggml.model", "") == "llama":
        default = True
    else:
        default = pre_tokenizer(fields.text("tokenizer.ggml.pre", "default")).adds_bos
    wanted = fields.truth("tokenizer.ggml.add_bos_token", default)
    return wanted and fields.has("tokenizer.ggml.bos_token_id")


def _kinds(fields: Fields, count: int) -> list[float]:
    kinds = fields.numbers("tokenizer.ggml.token_type")
    if not kinds:
        return [NORMAL] * count
    if len(kinds) != count:
        raise ModelFilesError(f"GGUF metadata: {len(kinds)} token types for {count} tokens")
    return kinds


def _byte_level(fields: Fields, tokens: list[str], kinds: list[float]) -> dict[str, Any]:
    cut = pre_tokenizer(fields.text("tokenizer.ggml.pre", "default"))
    steps: list[dict[str, Any]] = [
        {
            "type": "Split",
            "pattern": {"Regex": expression},
            "behavior": "Isolated",
            "invert": False,
        }
        for expression in cut.expressions
    ]
    steps.append(_byte_alphabet())
    vocab = _vocabulary(tokens)
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": _byte_alphabet(),
        "model": _bpe(
            vocab=vocab,
            merges=_known_merges(fields.texts("tokenizer.ggml.merges"), {*tokens} - {""}),
            ignore_merges=cut.whole_words,
            unk_token=_gap_token(vocab, tokens, kinds),
        ),
    }


def _gap_token(vocab: dict[str, int], tokens: list[str], kinds: list[float]) -> str | None:
    """Name a control token to stand where a byte has no token, so that merges do not cross it.

    `Tokenizer` takes it out again: such bytes are lost, as they are in llama.cpp.
    """
    if all(character in vocab for character in CHARACTER_OF_BYTE):
        return None
    return next((tokens[at] for at, kind in enumerate(kinds) if kind == CONTROL), None)


def _byte_alphabet() -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }


def _known_merges(merges: list[str], tokens: set[str]) -> list[str]:
    """Keep the merges, written "left right", whose parts and whole are tokens; usually all."""
    parts = " ".join(merges).split(" ")
    joined = [merge.replace(" ", "", 1) for merge in merges]
    if len(parts) == 2 * len(merges) and tokens.issuperset(parts) and tokens.issuperset(joined):
        return merges
    kept: list[str] = []
    for merge, whole in zip(merges, joined, strict=True):
        left, _, right = merge.partition(" ")
        if " " not in right and {left, right, whole} <= tokens:
            kept.append(merge)
    return kept


def _sentence_piece(fields: Fields, tokens: list[str], kinds: list[float]) -> dict[str, Any]:
    scores = _scores(fields, len(tokens))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefixed = fields.truth("tokenizer.ggml.add_space_prefix", True)
    prepend = [{"type": "Prepend", "prepend": SPACE}] if prefixed else []
    unknown = fields.integer("tokenizer.ggml.unknown_token_id", 0, at_least=0)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []),
            ],
        },
        "model": _bpe(
            vocab=_vocabulary(tokens),
            merges=_ranked_merges(tokens, kinds, scores),
            byte_fallback=True,
            unk_token=tokens[unknown] if unknown < len(tokens) else None,
            fuse_unk=True,
        ),
    }


def _scores(fields: Fields, count: int) -> list[float]:
    scores = fields.numbers("tokenizer.ggml.scores")
    if len(scores) != count:
        raise ModelFilesError(f"GGUF metadata: {len(scores)} scores for {count} tokens")
    return scores


def _ranked_merges(tokens: list[str], kinds: list[float], scores: list[float]) -> list[list[str]]:
    """All ways to join two tokens to a third, the best score of the third first.

    Of the ways to make one token the one with the longer left part goes first: runs of one sign are
    joined from the left, so their odd remainder stands at the right.
    """
    mergeable = {
        token for token, kind in zip(tokens, kinds, strict=True) if kind in (NORMAL, UNUSED)
    }
    ranked: list[tuple[float, int, int, list[str]]] = []
    for index, token in enumerate(tokens):
        if token not in mergeable:
            continue
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-scores[index], index, -cut, [left, right]))
    ranked.sort(key=lambda entry: entry[:3])
    return [pair for _, _, _, pair in ranked]


def _bpe(
    *,
    vocab: dict[str, int],
    merges: list[str] | list[list[str]],
    byte_fallback: bool = False,
    ignore_merges: bool = False,
    unk_token: str | None = None,
    fuse_unk: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Tokens by text; an empty or repeated one gets a name that no text can spell as a word."""
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if token and token not in vocab:
            vocab[token] = index
        else:
            vocab[f"\uffff[unused {index}]"] = index
    return vocab


def _added(vocab: dict[str, int], tokens: list[str], kinds: list[float]) -> list[dict[str, Any]]:
    """Tokens that are found in text as a whole: control tokens, and those that users defined."""
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in (UNKNOWN, CONTROL) or is_control_shaped(token),
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and vocab.get(token) == index
    ]


def _post_processor(fields: Fields, tokens: list[str], *, with_bos: bool) -> dict[str, Any] | None:
    """Begin texts with BOS and end them with EOS where the vocabulary wants it."""
    ends: list[tuple[str, int]] = []
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if with_bos:
        bos = fields.integer("tokenizer.ggml.bos_token_id", at_least=0, at_most=len(tokens) - 1)
        ends.append((tokens[bos], bos))
        single.insert(0, {"SpecialToken": {"id": tokens[bos], "type_id": 0}})
    if fields.truth("tokenizer.ggml.add_eos_token", False):
        eos = fields.integer("tokenizer.ggml.eos_token_id", at_least=0, at_most=len(tokens) - 1)
        ends.append((tokens[eos], eos))
        single.append({"SpecialToken": {"id": tokens[eos], "type_id": 0}})
    if not ends:
        return None
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            text: {"id": text, "ids": [number], "tokens": [text]} for text, number in ends
        },
    }
