"""Small vocabularies of each kind, made on the spot."""

from __future__ import annotations

import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from tests.unit.modelfiles.corpus import CODE, WORDS
from tests.unit.modelfiles.llama_cpp import write_tiny_llama

SPM_USER_DEFINED = ("<tool>", "\n\n")
SPM_CONTROL = ("<|im_end|>", "[INST]", "[/INST]")


def cut_down(metadata: dict[str, Any], size: int) -> dict[str, Any]:
    """The first `size` tokens of a byte-level vocabulary, with the merges that stay possible."""
    tokens = metadata["tokenizer.ggml.tokens"][:size]
    known = set(tokens)
    merges = [
        merge
        for merge in metadata["tokenizer.ggml.merges"]
        if merge.replace(" ", "", 1) in known and set(merge.split(" ")) <= known
    ]
    return {
        "tokens": tokens,
        "token_type": metadata["tokenizer.ggml.token_type"][:size],
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


@cache
def sentence_piece() -> tuple[list[str], list[int], list[float]]:
    """Tokens, kinds and scores of a SentencePiece model with byte fallback, trained here."""
    draw = random.Random(1)
    lines = [" ".join(draw.choices(WORDS, k=8)) for _ in range(3000)]
    lines += [line for text in CODE for line in text.split("\n")] * 50
    lines += ["a" * draw.randint(1, 60) for _ in range(200)]
    lines += [" " * draw.randint(1, 20) + "x" for _ in range(200)]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        vocab_size=800,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=list(SPM_USER_DEFINED),
        control_symbols=list(SPM_CONTROL),
        minloglevel=2,
        num_threads=1,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    tokens = [model.id_to_piece(index) for index in range(model.get_piece_size())]
    kinds = []
    for index, token in enumerate(tokens):
        if model.is_unknown(index):
            kinds.append(2)
        elif model.is_control(index):
            kinds.append(3)
        elif model.is_byte(index):
            kinds.append(6)
        else:
            kinds.append(4 if token in SPM_USER_DEFINED else 1)
    return tokens, kinds, [model.get_score(index) for index in range(len(tokens))]


def write_sentence_piece(path: Path, **changes: Any) -> Path:
    """A GGUF around the trained SentencePiece vocabulary."""
    tokens, kinds, scores = sentence_piece()
    fields = {
        "model": "llama",
        "scores": scores,
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    write_tiny_llama(path, tokens, fields)
    return path


def byte_level_json(**added: Any) -> bytes:
    """A byte-level tokenizer.json of 256 bytes and a few merges, with these added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    for content, flags in added.items():
        inner.add_tokens([AddedToken(content, normalized=False, **flags)])
    return inner.to_str().encode()


def metaspace_json(scheme: str) -> bytes:
    """A tokenizer.json of the SentencePiece kind whose blanks are put by a pre-tokenizer."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for character in "▁abcdefghij":
        vocab[character] = len(vocab)
    vocab["▁a"] = len(vocab)
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    inner.normalizer = normalizers.Sequence([])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return inner.to_str().encode()


def write_model_directory(path: Path, tokenizer: bytes, **files: dict[str, Any]) -> Path:
    """A Hugging Face directory around a tokenizer, without weights."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    tables = {"config": {**config, **files.pop("config", {})}, **files}
    for name, table in tables.items():
        (path / f"{name}.json").write_text(json.dumps(table))
    (path / "tokenizer.json").write_bytes(tokenizer)
    return path
