"""The matchers of the lanes that have a grammar, and their masks, computed while the engine computes.

Owns one matcher a lane and a few threads. A sampled id is handed over at once (`advance`), the mask for the next one is worked
out while the next forward pass runs, and `take` waits only for what is not ready. A matcher that begins in the middle
(a moved or preempted session) is first advanced over the ids that exist; if it rejects them the lane ends with
GRAMMAR_REPLAY, for a constraint that restarts would be a lie. The mask depends on the grammar and the ids alone.
Everything but the work itself belongs to the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from superfluid_core.errors import ErrorCode, InvalidRequestError
from superfluid_core.grammar.compiler import Grammars
from superfluid_core.grammar.sources import plain_words
from superfluid_core.scheduler.plan import LaneFault, LaneStart

if TYPE_CHECKING:
    from llguidance import LLMatcher

WAIT_S = 30.0
NOTHING_LEFT = "the constraint and the other limits of this request leave no token"
THREADS = 2


class Mask(NamedTuple):
    """What may be sampled: bit i of byte i // 8 is id i. `is_over`: nothing but an end-of-text id may follow."""

    bits: bytes
    is_over: bool

    def ids(self) -> Iterator[int]:
        """Go through what is allowed, in order."""
        for at, byte in enumerate(self.bits):
            if byte:
                yield from (8 * at + bit for bit in range(8) if byte >> bit & 1)

    def allows(self, token: int) -> bool:
        at = token >> 3
        return at < len(self.bits) and bool(self.bits[at] >> (token & 7) & 1)


class GrammarFault(NamedTuple):
    """Why a lane cannot go on."""

    code: ErrorCode
    text: str


@dataclass(slots=True)
class _Lane:
    """A lane's matcher, None until it is made, and the work that is under way for it."""

    matcher: LLMatcher | None = None
    work: Future[Mask | GrammarFault] | None = None


class LaneMasks:
    """Constraints of the lanes of one engine. Without `grammars` every constraint is a fault of its lane."""

    def __init__(self, grammars: Grammars | None, threads: int = THREADS) -> None:
        self._grammars = grammars
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._lanes: dict[int, _Lane] = {}

    def __bool__(self) -> bool:
        """Whether any lane has a constraint."""
        return bool(self._lanes)

    def start(self, start: LaneStart) -> LaneFault | None:
        """Take in a session that gets a lane; its first mask is on its way when this returns."""
        self._lanes.pop(start.lane, None)
        grammar = start.spec.grammar
        if grammar is None:
            return None
        grammars = self._grammars
        if grammars is None:
            words = "this engine cannot constrain its output"
            return LaneFault(start.lane, ErrorCode.UNSUPPORTED, words)
        lane = _Lane()
        outputs = list(start.outputs)

        def begin() -> Mask | GrammarFault:
            try:
                lane.matcher = grammars.matcher(grammar)
            except InvalidRequestError as error:
                return GrammarFault(error.code, error.message)
            if outputs and not lane.matcher.consume_tokens(outputs):
                words = "the constraint rejects what was delivered already"
                return GrammarFault(ErrorCode.GRAMMAR_REPLAY, words)
            return _mask(lane.matcher)

        lane.work = self._workers().submit(begin)
        self._lanes[start.lane] = lane
        return None

    def free(self, lane: int) -> None:
        """Forget a lane; work that is under way ends for nobody."""
        self._lanes.pop(lane, None)

    def advance(self, sampled: Mapping[int, int]) -> None:
        """Hand over what was sampled, by lane; those without a constraint are passed over."""
        for number, token in sampled.items():
            lane = self._lanes.get(number)
            if lane is not None and lane.matcher is not None:
                lane.work = self._workers().submit(_advance, lane.matcher, token)

    def take(self, lanes: Iterable[int]) -> dict[int, Mask | GrammarFault]:
        """Give the masks of those among `lanes` that have a constraint, waiting for the last of the work."""
        found: dict[int, Mask | GrammarFault] = {}
        for number in lanes:
            lane = self._lanes.get(number)
            if lane is None or lane.work is None:
                continue
            try:
                found[number] = lane.work.result(WAIT_S)
            except TimeoutError:
                words = "the constraint took too long"
                found[number] = GrammarFault(ErrorCode.INVALID_GRAMMAR, words)
        return found

    def close(self) -> None:
        """End the threads; safe from any thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _workers(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="grammar")
        return self._pool


def _advance(matcher: LLMatcher, token: int) -> Mask | GrammarFault:
    if not matcher.consume_token(token):
        return GrammarFault(ErrorCode.INVALID_GRAMMAR, _trouble(matcher))
    return _mask(matcher)


def _mask(matcher: LLMatcher) -> Mask | GrammarFault:
    bits = matcher.compute_bitmask()
    if matcher.is_error():
        return GrammarFault(ErrorCode.INVALID_GRAMMAR, _trouble(matcher))
    return Mask(bits, matcher.is_stopped())


def _trouble(matcher: LLMatcher) -> str:
    return "the constraint cannot go on: " + plain_words(matcher.get_error())
