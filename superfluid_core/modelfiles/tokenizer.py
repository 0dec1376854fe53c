"""Text to token ids and back to bytes, on the `tokenizers` library.

Owns one vocabulary, built from a tokenizer.json (a GGUF is translated to one first). It must not
know templates, files or the network. The idea: the library runs with special tokens *off* always,
so no text can spell a control token; where control tokens are wanted the text is first cut at them
here, and only the pieces between go through the library. Bytes of a token are exact, not decoded
text: characters are put together from them by whoever streams.

Leading spaces: vocabularies of the SentencePiece kind put a blank before every text
(`puts_leading_space`), so the first token of a fresh answer carries one. A stream detokenizer of a
chat answer drops one 0x20 at the very start of the answer when this flag is set; a continued text
(completions) keeps it. Nothing else is ever dropped: text = concatenation of `token_bytes`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import tokenizers

from superfluid_core.errors import InvalidRequestError, ModelFilesError
from superfluid_core.modelfiles.byte_alphabet import BYTE_OF_CHARACTER, CHARACTER_OF_BYTE
from superfluid_core.modelfiles.endings import ENDINGS, is_control_shaped
from superfluid_core.modelfiles.literals import pattern_of

SPACE = "▁"
VOCABULARY_MAX = 1 << 22
SHORT_CHARS = 1_000
"""Texts longer than this, all together, are tokenized without the interpreter lock, which the library only lets go of in batches."""
KEPT_MAX = 32
KEPT_CHARS_MAX = 4_096
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TextSettings:
    """What the files around a tokenizer.json say about it.

    `adds_bos` None means: as the tokenizer.json itself does.
    """

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    bos_text: str | None = None
    eos_text: str | None = None
    adds_bos: bool | None = None


@dataclass(frozen=True, slots=True)
class _Added:
    """A token that is found in text as a whole."""

    id: int
    text: str
    special: bool
    lstrip: bool
    rstrip: bool


class Tokenizer:
    """A vocabulary with exact bytes per token. Safe to share between threads."""

    def __init__(self, data: bytes, settings: TextSettings | None = None) -> None:
        settings = settings or TextSettings()
        self._inner = _built(data)
        self.vocabulary: int = self._vocabulary_size()
        self.bos_id = self._named(settings.bos_id, settings.bos_text)
        self.eos_ids: tuple[int, ...] = self._ends(settings)
        self._added = self._special_added()
        special = [added for added in self._added.values() if added.special]
        self.special_ids: frozenset[int] = frozenset(added.id for added in special)
        self.special_texts: tuple[str, ...] = tuple(added.text for added in special)
        self._special_by_text = {added.text: added for added in special}
        self._specials = pattern_of(self.special_texts)
        self._byte_level, self._spaced = _alphabet(self._inner)
        unknown = getattr(self._inner.model, "unk_token", None)
        self._unknown_id = None if unknown is None else self.token_id(unknown)
        self._later = _without_first_space(self._inner)
        self._kept: dict[str, list[int]] = {}
        self._bytes: list[bytes | None] = [None] * self.vocabulary
        around = self._inner.encode("", add_special_tokens=True).ids
        own = bool(around) and around[0] == self.bos_id
        wanted = own if settings.adds_bos is None else settings.adds_bos
        self.adds_bos: bool = wanted and self.bos_id is not None
        self.adds_eos: bool = bool(around) and around[-1] in self.eos_ids and len(around) > own
        self.puts_leading_space: bool = self._spaced and self._leads_with_space()

    # text to ids

    def encode(self, text: str, *, allow_special: bool, add_bos: bool = False) -> list[int]:
        """Encode `text`; with `allow_special` spelled control tokens become their ids.

        `add_bos` begins with BOS where the vocabulary wants one (`adds_bos`) and `text` has none.
        """
        return self.encode_batch([text], allow_special=allow_special, add_bos=add_bos)[0]

    def encode_batch(
        self, texts: Sequence[str], *, allow_special: bool, add_bos: bool = False
    ) -> list[list[int]]:
        """Encode many texts as `encode` does; the library takes all pieces in one call."""
        pieces = [self.split(text) if allow_special else [(text, None)] for text in texts]
        return [self._with_bos(ids) if add_bos else ids for ids in self.encode_pieces(pieces)]

    def split(self, text: str) -> list[tuple[str, int | None]]:
        """Cut `text` at special tokens: ordinary pieces (id None) and specials in turn."""
        if self._specials is None:
            return [(text, None)]
        pieces: list[tuple[str, int | None]] = []
        at = 0
        for found in self._specials.finditer(text):
            added = self._special_by_text[found.group()]
            ordinary = text[at : found.start()] if at < found.start() else ""
            if added.lstrip:
                ordinary = ordinary.rstrip()
            if ordinary:
                pieces.append((ordinary, None))
            pieces.append((added.text, added.id))
            at = found.end()
            if added.rstrip:
                at += len(text[at:]) - len(text[at:].lstrip())
        if at < len(text):
            pieces.append((text[at:], None))
        return pieces

    def encode_pieces(self, texts: Sequence[Sequence[tuple[str, int | None]]]) -> list[list[int]]:
        """Encode texts that are cut already; only the pieces without an id are looked into."""
        first: list[str] = []
        later: list[str] = []
        kept = self._kept
        for pieces in texts:
            for index, (piece, special) in enumerate(pieces):
                if special is None and not (index and piece in kept):
                    (later if index else first).append(piece)
        first_ids = iter(self._ordinary(self._inner, first))
        later_ids = iter(self._ordinary(self._later, later))
        encoded: list[list[int]] = []
        for pieces in texts:
            ids: list[int] = []
            for index, (piece, special) in enumerate(pieces):
                if special is not None:
                    ids.append(special)
                elif index and piece in kept:
                    ids += kept[piece]
                else:
                    ids += next(later_ids if index else first_ids)
            encoded.append(ids)
        return encoded

    def keep(self, pieces: Iterable[str]) -> None:
        """Keep the ids of what stands between special tokens again and again: a chat template's own words, never a user's."""
        texts = [piece for piece in dict.fromkeys(pieces) if len(piece) <= KEPT_CHARS_MAX]
        texts = texts[:KEPT_MAX]
        self._kept = dict(zip(texts, self._ordinary(self._later, texts), strict=True))

    def spell(self, data: bytes) -> list[int]:
        """Spell arbitrary bytes, one byte token each; bytes without a token raise by name."""
        ids: list[int] = []
        for byte in data:
            token = self.byte_ids[byte]
            if token is None:
                raise ModelFilesError(f"this vocabulary has no token for the byte 0x{byte:02X}")
            ids.append(token)
        return ids

    # ids to text

    def token_bytes(self, token: int) -> bytes:
        """Look up the exact bytes that a token stands for; b"" for an id without a text."""
        if not 0 <= token < self.vocabulary:
            return b""
        found = self._bytes[token]
        if found is None:
            found = self._bytes[token] = self._spelled(token)
        return found

    def token_id(self, literal: str) -> int | None:
        """Look up a token by its text as the vocabulary spells it."""
        found = self._inner.token_to_id(literal)
        return None if found is None else int(found)

    @cached_property
    def byte_ids(self) -> tuple[int | None, ...]:
        """The token of each of the 256 bytes; some vocabularies leave out bytes UTF-8 never has."""
        return tuple(
            self.token_id(CHARACTER_OF_BYTE[byte] if self._byte_level else f"<0x{byte:02X}>")
            for byte in range(256)
        )

    @cached_property
    def _ordinary_ids(self) -> tuple[int, ...]:
        return tuple(
            token
            for token in range(self.vocabulary)
            if token not in self._added and _is_whole_text(self.token_bytes(token))
        )

    def ordinary_ids(self) -> tuple[int, ...]:
        """All tokens that are plain text of whole characters, in order; computed once."""
        return self._ordinary_ids

    # how it is made

    def _ordinary(self, inner: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
        try:
            if sum(map(len, texts)) <= SHORT_CHARS:  # a batch would wake the library's threads
                found = [inner.encode(text, add_special_tokens=False) for text in texts]
            else:
                found = inner.encode_batch_fast(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as cause:
            raise InvalidRequestError("the text holds half of a surrogate pair") from cause
        return [self._harmless(encoding.ids) for encoding in found]

    def _harmless(self, ids: list[int]) -> list[int]:
        """Keep control tokens out of ordinary text, even if strange merges would make one.

        The unknown token stays where it stands for characters (SentencePiece without byte tokens);
        byte-level vocabularies have it for bytes without a token, which are dropped.
        """
        if self.special_ids.isdisjoint(ids):
            return ids
        harmless: list[int] = []
        for token in ids:
            if token == self._unknown_id:
                harmless += [] if self._byte_level else [token]
            elif token in self.special_ids:
                harmless += self.spell(self.token_bytes(token))
            else:
                harmless.append(token)
        return harmless

    def _with_bos(self, ids: list[int]) -> list[int]:
        if not self.adds_bos or self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def _spelled(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return added.text.encode()
        text = self._inner.id_to_token(token)
        if text is None or text.startswith("\uffff[unused "):
            return b""
        if self._byte_level:
            return _byte_level_bytes(text)
        if byte := _BYTE_TOKEN.fullmatch(text):
            return bytes.fromhex(byte.group(1))
        return (text.replace(SPACE, " ") if self._spaced else text).encode()

    def _vocabulary_size(self) -> int:
        size = int(self._inner.get_vocab_size(with_added_tokens=True))
        highest = max(self._inner.get_added_tokens_decoder(), default=-1) + 1
        if not 0 < max(size, highest) <= VOCABULARY_MAX:
            raise ModelFilesError("the tokenizer holds no or too many tokens")
        return max(size, highest)

    def _named(self, token: int | None, text: str | None) -> int | None:
        if text is not None and (found := self.token_id(text)) is not None:
            return found
        return token if token is not None and token < self.vocabulary else None

    def _ends(self, settings: TextSettings) -> tuple[int, ...]:
        """Collect the declared ends, and the known spellings where a file declares none."""
        declared = [token for token in settings.eos_ids if token < self.vocabulary]
        if (
            settings.eos_text is not None
            and (named := self.token_id(settings.eos_text)) is not None
        ):
            declared.append(named)
        if not declared:
            found = (self.token_id(ending) for ending in ENDINGS)
            declared = [token for token in found if token is not None]
        return tuple(dict.fromkeys(declared))

    def _special_added(self) -> dict[int, _Added]:
        """Collect the added tokens; ends, BOS and what is shaped like control are special in any case."""
        forced = {*self.eos_ids, self.bos_id}
        added: dict[int, _Added] = {}
        promoted: list[tokenizers.AddedToken] = []
        for token, entry in sorted(self._inner.get_added_tokens_decoder().items()):
            special = entry.special or token in forced or is_control_shaped(entry.content)
            if not entry.content:
                continue
            if special and not entry.special:
                entry.special = True
                promoted.append(entry)
            added[token] = _Added(token, entry.content, special, entry.lstrip, entry.rstrip)
        if promoted:
            self._inner.add_special_tokens(promoted)
        return added

    def _leads_with_space(self) -> bool:
        ids = self._inner.encode("a", add_special_tokens=False).ids
        return b"".join(self.token_bytes(token) for token in ids).startswith(b" ")


def _built(data: bytes) -> tokenizers.Tokenizer:
    try:
        inner = tokenizers.Tokenizer.from_buffer(data)
    except Exception as cause:  # the library raises bare Exception on bad files
        raise ModelFilesError(f"tokenizer.json is not usable: {str(cause)[:200]}") from cause
    inner.no_padding()
    inner.no_truncation()
    inner.encode_special_tokens = True
    return inner


def _alphabet(inner: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """Whether tokens are written in the byte alphabet, and whether ▁ stands for a blank."""
    parts = [
        json.loads(part.__getstate__())
        for part in (inner.normalizer, inner.pre_tokenizer, inner.decoder)
        if part is not None
    ]
    written = json.dumps(parts, ensure_ascii=False)
    byte_level = '"ByteLevel"' in written
    return byte_level, not byte_level and SPACE in written


def _without_first_space(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Build the tokenizer for pieces that do not begin a text; most need no other one."""
    state = None if inner.pre_tokenizer is None else inner.pre_tokenizer.__getstate__()
    if state is None or b'"prepend_scheme":"first"' not in state:
        return inner
    table = json.loads(inner.to_str())
    for step in [table["pre_tokenizer"], *table["pre_tokenizer"].get("pretokenizers", [])]:
        if step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
    return _built(json.dumps(table, ensure_ascii=False).encode())


def _byte_level_bytes(text: str) -> bytes:
    """Turn the byte alphabet into bytes; a token with other characters is literal text."""
    try:
        return bytes(map(BYTE_OF_CHARACTER.__getitem__, text))
    except KeyError:
        return text.encode()


def _is_whole_text(data: bytes) -> bool:
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False
