"""Text to ids: renders a conversation with the model's template and tokenizes it, never on the event loop.

Owns the threads and the one process that do it, and their bounds. The tokenizer holds the interpreter lock, so length
is judged first (bytes > window x the longest token can never fit), small texts go to a thread, and texts above
`tokenize_inline_bytes_max` to a process of their own (decisions 24), started when first needed.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from superfluid_core.clock import MS, SystemClock
from superfluid_core.errors import CapacityError, ErrorCode, InvalidRequestError
from superfluid_core.grammar.compiler import Vocabulary, vocabulary_of
from superfluid_core.grammar.sources import source_of
from superfluid_core.limits import HttpLimits
from superfluid_core.modelfiles.template import ChatTemplate
from superfluid_core.modelfiles.template_bounds import Budget, TemplateTooBusyError
from superfluid_core.modelfiles.text_model import TextModel, from_text_files
from superfluid_core.modelfiles.tokenizer import Tokenizer
from superfluid_core.session import Grammar
from superfluid_head.text.constraints import Constraint, OwnGrammar
from superfluid_head.text.dialects.detect import DialectChoice
from superfluid_head.text.dialects.shape import NOTHING, Shape
from superfluid_head.text.grammar import compose
from superfluid_head.text.grammar_check import GrammarChecker
from superfluid_head.text.pace import Pace

THREADS = 2
WAITING_MAX = 4_096
"""As many as there may be connections: short texts are not refused for their number."""
WAITING_BYTES_MAX = 64 * 1_024 * 1_024
WAIT_MS = 30_000
TOKENS_AT_ONCE = 2_048
COUNTED_CHARS_MAX = 1 << 18
"""Characters of a text whose bytes are counted, and not taken to be at least as many."""
AT_ONCE_BYTES_MAX = 2_048
AT_ONCE_MESSAGES_MAX = 16
AT_ONCE_NS_MAX = 5 * MS
"""A short conversation is rendered and tokenized on the event loop if the last one took no longer: a thread costs as much."""
AT_ONCE_STEPS_MAX = 10_000
AT_ONCE_CHARS_MAX = 1 << 20
"""What a template may do there, whatever the last one took: it may have come to a slow part."""
PLAIN_MEMBERS = frozenset({"role", "content"})

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is to be rendered: messages in the template's form, and how the prompt is to end."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def bytes(self) -> int:
        """Bytes of all text that the caller sent (a lower bound of what is rendered)."""
        return _text_bytes(self.messages) + _text_bytes(self.tools or ())

    @property
    def is_plain(self) -> bool:
        """Whether it is a handful of texts, and there is nothing else that a template could work on."""
        if self.tools or self.kwargs or len(self.messages) > AT_ONCE_MESSAGES_MAX:
            return False
        return all(
            PLAIN_MEMBERS.issuperset(message) and isinstance(message.get("content"), str)
            for message in self.messages
        )


def _text_bytes(value: Any) -> int:
    if isinstance(value, str):
        is_plain = len(value) > COUNTED_CHARS_MAX or value.isascii()
        return len(value) if is_plain else len(value.encode())
    if isinstance(value, Mapping):
        return sum(_text_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_text_bytes(item) for item in value)
    return 0


def encode_conversation(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    conversation: Conversation,
    budget: Budget | None = None,
) -> tuple[int, ...]:
    """Render and tokenize, blocking. Raises InvalidRequestError(TEMPLATE_ERROR) with the template's own words.

    Raises TemplateTooBusyError where a `budget` is given that does not suffice.
    """
    rendered = template.render(
        [dict(message) for message in conversation.messages],
        tools=None if conversation.tools is None else [dict(tool) for tool in conversation.tools],
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        kwargs=conversation.kwargs,
        budget=budget,
    )
    return tuple(rendered.encode(tokenizer))


@dataclass(frozen=True, slots=True)
class RawTexts:
    """Texts that no template is around of; `is_raw`: what spells a control token in them is one."""

    texts: tuple[str, ...]
    is_raw: bool
    add_bos: bool


def encode_raw(tokenizer: Tokenizer, wish: RawTexts) -> list[tuple[int, ...]]:
    """Tokenize, blocking."""
    found = tokenizer.encode_batch(wish.texts, allow_special=wish.is_raw, add_bos=wish.add_bos)
    return [tuple(ids) for ids in found]


class _Line:
    """What waits for one pool, bounded by number and by size: what is long takes long."""

    def __init__(self) -> None:
        self._count = 0
        self._bytes = 0

    @asynccontextmanager
    async def place(self, size: int) -> AsyncIterator[None]:
        """Stand in line with so many bytes, for a bounded time. Raises CapacityError."""
        if self._count >= WAITING_MAX or (self._count and self._bytes + size > WAITING_BYTES_MAX):
            raise CapacityError(
                "too many requests wait to be tokenized",
                code=ErrorCode.OVERLOADED,
                retry_after_ms=1_000,
            )
        self._count += 1
        self._bytes += size
        try:
            async with asyncio.timeout(WAIT_MS / 1000):
                yield
        except TimeoutError:
            raise CapacityError(
                "tokenizing took too long", code=ErrorCode.TIMEOUT, retry_after_ms=5_000
            ) from None
        finally:
            self._count -= 1
            self._bytes -= size


class TextWorkers:
    """The bounded threads and the lazy process shared by all models of a head."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="text")
        self._process: ProcessPoolExecutor | None = None
        self._short, self._long = _Line(), _Line()
        self.grammars = GrammarChecker()

    async def in_thread(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work` on so many bytes in a thread. Raises CapacityError when the line is too long or the wait too long."""
        async with self._short.place(size):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, work, *arguments)

    async def in_process(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Run a picklable function in the text process, which is started on the first call."""
        async with self._long.place(size):
            if self._process is None:
                context = multiprocessing.get_context("spawn")
                self._process = ProcessPoolExecutor(1, mp_context=context)
            pool = self._process
            loop = asyncio.get_running_loop()
            try:
                return await loop.run_in_executor(pool, work, *arguments)
            except BrokenProcessPool:
                if self._process is pool:  # others wait for the same one: it is started again once
                    self._process = None
                raise CapacityError(
                    "the tokenizer process ended", code=ErrorCode.OVERLOADED, retry_after_ms=1_000
                ) from None

    def close(self) -> None:
        """End the threads and the processes; work that waits is dropped."""
        self.grammars.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.shutdown(wait=False, cancel_futures=True)
            self._process = None


_loaded: dict[str, TextModel] = {}
"""In the text process: the models that it has built, by fingerprint."""


def _encode_elsewhere(
    fingerprint: str, files: Mapping[str, bytes], conversation: Conversation
) -> tuple[int, ...]:
    """Body of the text process. What it needs of a model are its small text files."""
    text = _text_here(fingerprint, files)
    template = text.template()
    if template is None:
        raise _no_template()
    return encode_conversation(template, text.tokenizer(), conversation)


def _encode_texts_elsewhere(
    fingerprint: str, files: Mapping[str, bytes], wish: RawTexts
) -> list[tuple[int, ...]]:
    """Do the same in the text process."""
    return encode_raw(_text_here(fingerprint, files).tokenizer(), wish)


def _text_here(fingerprint: str, files: Mapping[str, bytes]) -> TextModel:
    text = _loaded.get(fingerprint)
    if text is None:
        text = _loaded[fingerprint] = from_text_files(files)
    return text


def _no_template() -> InvalidRequestError:
    return InvalidRequestError(
        "this model has no chat template; use /v1/completions",
        param="messages",
        code=ErrorCode.TEMPLATE_ERROR,
    )


def _sources(template: ChatTemplate | None) -> str:
    """Collect what a model's templates tell of its dialect."""
    return "" if template is None else f"{template.source}\n{template.tools_source}"


class ModelText:
    """Tokenizer and template of one model. Immutable but for what is measured of them."""

    def __init__(
        self,
        name: str,
        text: TextModel,
        workers: TextWorkers,
        dialects: DialectChoice | None = None,
    ) -> None:
        self.name = name
        self.files = text.files
        self.tokenizer = text.tokenizer()
        self.template = text.template()
        self.dialect = (dialects or DialectChoice()).resolve(_sources(self.template))
        self.fingerprint = text.fingerprint()
        self.window = text.config.window
        self.eos_ids = frozenset(text.config.eos_ids)
        self._workers = workers
        self._token_bytes_max = 0
        self._is_quick = False

    def longest_token_bytes(self) -> int:
        """Bytes of the longest token: no prompt of more bytes than window x this can fit."""
        if self._token_bytes_max == 0:
            pace, longest = Pace(), 1
            for first in range(0, self.tokenizer.vocabulary, TOKENS_AT_ONCE):
                some = range(first, min(first + TOKENS_AT_ONCE, self.tokenizer.vocabulary))
                longest = max(longest, *(len(self.tokenizer.token_bytes(i)) for i in some))
                pace.rest()
            self._token_bytes_max = longest
        return self._token_bytes_max

    async def encode(self, conversation: Conversation, window: int) -> tuple[int, ...]:
        """Return the prompt ids of a conversation. Raises InvalidRequestError when it can never fit `window`."""
        if self.template is None:
            raise _no_template()
        size = conversation.bytes()
        if size > window:
            longest = await self._workers.in_thread(0, self.longest_token_bytes)
            least = -(-size // longest)
            if least > window:
                raise too_long(window, least, None, at_least=True)
        if size > self._workers.limits.tokenize_inline_bytes_max:
            return await self._workers.in_process(
                size, _encode_elsewhere, self.fingerprint, self.files, conversation
            )
        if size > AT_ONCE_BYTES_MAX or not conversation.is_plain:
            return await self._workers.in_thread(
                size, encode_conversation, self.template, self.tokenizer, conversation
            )
        if self._is_quick:
            few = Budget(AT_ONCE_STEPS_MAX, AT_ONCE_CHARS_MAX)
            with suppress(TemplateTooBusyError):  # more work than the last one was: for a thread
                return self._encode_timed(self.template, conversation, few)
        work = self._encode_timed
        return await self._workers.in_thread(size, work, self.template, conversation)

    def _encode_timed(
        self, template: ChatTemplate, conversation: Conversation, budget: Budget | None = None
    ) -> tuple[int, ...]:
        """Note whether the model's template may be left to the event loop, for conversations like this one."""
        clock, self._is_quick = SystemClock(), False
        began_ns = clock.now_ns()
        ids = encode_conversation(template, self.tokenizer, conversation, budget)
        self._is_quick = clock.now_ns() - began_ns < AT_ONCE_NS_MAX
        return ids

    async def constrain(
        self,
        constraint: Constraint | None,
        before: Shape = NOTHING,
        instead: Shape | None = None,
        *,
        param: str | None = None,
    ) -> Grammar:
        """Compose the grammar of an answer and have it judged; `param` is the member to blame.

        Raises InvalidRequestError(INVALID_GRAMMAR).
        """
        try:
            return await self._constrain(constraint, before, instead)
        except InvalidRequestError as error:
            error.param = error.param or param
            raise

    async def _constrain(
        self, constraint: Constraint | None, before: Shape, instead: Shape | None
    ) -> Grammar:
        checker, key = self._workers.grammars, self.fingerprint
        if isinstance(constraint, OwnGrammar) and constraint.is_gbnf:
            lark = await checker.lark_of(key, self._vocabulary, constraint.text)
            constraint = OwnGrammar(lark)
        grammar = compose(constraint, self._special_id, before=before, instead=instead)
        await checker.check(key, self._vocabulary, source_of(grammar))
        return grammar

    def _special_id(self, text: str) -> int | None:
        token = self.tokenizer.token_id(text)
        return token if token in self.tokenizer.special_ids else None

    def _vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.tokenizer, self.tokenizer.vocabulary)

    async def encode_texts(
        self, texts: Sequence[str], window: int, *, is_raw: bool, add_bos: bool
    ) -> list[tuple[int, ...]]:
        """Encode texts outside of any template; `is_raw` ones may spell control tokens.

        Raises InvalidRequestError when one can never fit `window`.
        """
        sizes = [_text_bytes(text) for text in texts]
        if max(sizes, default=0) > window:
            longest = await self._workers.in_thread(0, self.longest_token_bytes)
            least = -(-max(sizes) // longest)
            if least > window:
                raise too_long(window, least, None, "prompt", at_least=True)
        wish = RawTexts(tuple(texts), is_raw, add_bos)
        size = sum(sizes)
        if size > self._workers.limits.tokenize_inline_bytes_max:
            return await self._workers.in_process(
                size, _encode_texts_elsewhere, self.fingerprint, self.files, wish
            )
        return await self._workers.in_thread(size, encode_raw, self.tokenizer, wish)

    async def spell_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Ids of each word as a text's start and after a space, for `bad_words`."""
        size = sum(map(len, words))
        return await self._workers.in_thread(size, _spell_words, self.tokenizer, tuple(words))


def _spell_words(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    spelled: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, allow_special=False))
            if ids:
                spelled[ids] = None
    return tuple(spelled)


def too_long(
    window: int,
    prompt: int,
    output: int | None,
    param: str = "messages",
    *,
    at_least: bool = False,
) -> InvalidRequestError:
    """Make the context overflow error: clients match on its words (http_api E3)."""
    counted = f"at least {prompt}" if at_least else str(prompt)
    takes = "messages take" if param == "messages" else f"{param} takes"
    asked = "" if output is None else f" and {output} tokens of output were requested"
    return InvalidRequestError(
        f"This model's maximum context length is {window} tokens, "
        f"but the {takes} {counted} tokens{asked}. Shorten one of them.",
        param=param,
        code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    )


def output_budget(window: int, prompt: int, requested: int | None, param: str = "messages") -> int:
    """How many ids may be sampled (http_api E4); raises InvalidRequestError when the request does not fit."""
    limit = window - prompt
    if limit <= 0:
        raise too_long(window, prompt, requested, param)
    if requested is None:
        return limit
    if requested > limit:
        raise too_long(window, prompt, requested, param)
    return requested
