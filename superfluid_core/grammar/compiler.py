"""Compiles grammars against one vocabulary, and keeps what it compiled within bounds of count and memory.

Safe to use from several threads. llguidance works with fuel, not with time: a grammar that would explode is given up after a
counted amount of work (`Fuel`: below half a second each for the worst that was tried), in its construction and again in every mask.
It cannot be interrupted before; who needs that compiles in a process that can be killed (the head does, first). What is kept
are prototypes that nobody advances: a session gets a copy (7 us), whose own growth ends with it.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from superfluid_core.errors import InvalidRequestError
from superfluid_core.grammar.sources import invalid_grammar, plain_words, source_of
from superfluid_core.session import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT_MAX = 256
KEPT_BYTES_MAX = 64 << 20
PROTOTYPE_BYTES = 32 << 10
BYTES_PER_CHARACTER = 40


@dataclass(frozen=True, slots=True)
class Fuel:
    """How much work and memory a grammar may take: in its construction, and in every step.

    A string with a `maxLength` takes some 20 states a token, 0.6 KiB each: the bound is 10,000 tokens of such text and 120 MiB a
    lane, freed with its session. Without a `maxLength` text takes none.
    """

    row_items_max: int = 2_000
    construction: int = 1_000_000
    step: int = 200_000
    step_items_max: int = 50_000
    lexer_states_max: int = 200_000
    symbols_max: int = 250_000


FUEL = Fuel()


class Texts(Protocol):
    """What is needed of a tokenizer."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of every id that an engine may sample; ids without a text have none and are never allowed."""

    tokens: tuple[bytes, ...]
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]


def vocabulary_of(texts: Texts, size: int) -> Vocabulary:
    """Collect a vocabulary of `size` ids. Holds the interpreter for a tenth of a second or more."""
    tokens = tuple(texts.token_bytes(token) for token in range(size))
    return Vocabulary(tokens, tuple(texts.eos_ids), frozenset(texts.special_ids))


class _Wrapper:
    """A vocabulary in the form that llguidance asks for. It tokenizes nothing: no grammar of ours asks for forced tokens."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.tokens: Sequence[bytes] = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special_ids)

    def __call__(self, text: str) -> list[int]:
        del text
        return []


def build_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Build the prefix tree of a vocabulary. Raises InvalidRequestError for one without an end-of-text id."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if not vocabulary.eos_ids:
        raise invalid_grammar("this model has no end-of-text id, so nothing can end a constraint")
    wrapper = TokenizerWrapper(_Wrapper(vocabulary))
    return LLTokenizer(wrapper, eos_token=list(vocabulary.eos_ids))


def compile_source(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Compile, blocking, without the interpreter lock. Raises InvalidRequestError(INVALID_GRAMMAR)."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_items_in_row=FUEL.row_items_max,
        initial_lexer_fuel=FUEL.construction,
        step_lexer_fuel=FUEL.step,
        step_max_items=FUEL.step_items_max,
        max_lexer_states=FUEL.lexer_states_max,
        max_grammar_size=FUEL.symbols_max,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    trial = matcher.deep_copy()
    if not matcher.is_error():
        trial.compute_bitmask()
    if trial.is_error():
        raise invalid_grammar("the constraint cannot be used: " + plain_words(trial.get_error()))
    return matcher


class Grammars:
    """The compiled grammars of one model. The vocabulary is collected when the first one is asked for."""

    def __init__(
        self,
        collect: Callable[[], Vocabulary],
        *,
        kept_max: int = KEPT_MAX,
        kept_bytes_max: int = KEPT_BYTES_MAX,
    ) -> None:
        self._collect = collect
        self._kept_max = kept_max
        self._kept_bytes_max = kept_bytes_max
        self._building = threading.Lock()
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()
        self.kept_bytes = 0
        self.compiled = 0

    def __len__(self) -> int:
        return len(self._kept)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """Give a fresh matcher at the start of `grammar`. Raises InvalidRequestError(INVALID_GRAMMAR)."""
        key = _key(grammar)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if found is not None:
            return found[0].deep_copy()
        made = compile_source(self._built(), source_of(grammar))
        self._keep(key, made, PROTOTYPE_BYTES + BYTES_PER_CHARACTER * len(grammar.text))
        return made.deep_copy()

    def has(self, grammar: Grammar) -> bool:
        """Whether it is compiled already."""
        return _key(grammar) in self._kept

    def refusal(self, grammar: Grammar) -> InvalidRequestError | None:
        """Compile and keep; say why it cannot be used, if so."""
        try:
            self.matcher(grammar)
        except InvalidRequestError as error:
            return error
        return None

    def _built(self) -> LLTokenizer:
        with self._building:
            if self._tokenizer is None:
                self._tokenizer = build_tokenizer(self._collect())
            return self._tokenizer

    def _keep(self, key: bytes, made: LLMatcher, size: int) -> None:
        with self._lock:
            self.compiled += 1
            if key in self._kept or size > self._kept_bytes_max:
                return
            self._kept[key] = (made, size)
            self.kept_bytes += size
            while len(self._kept) > self._kept_max or self.kept_bytes > self._kept_bytes_max:
                _, (_, freed) = self._kept.popitem(last=False)
                self.kept_bytes -= freed


def _key(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.kind}\0{grammar.text}".encode()).digest()
