"""What the caller of a generation holds: an async context manager and an async iterator over its events.

The link reader never waits for it. Ids wait here as events, bounded by the journal, which is bounded by the window; of
progress only the newest report waits. Leaving the context ends whatever still runs and gives everything back, once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from superfluid_core.clock import MS, SECOND
from superfluid_core.errors import SuperfluidError
from superfluid_core.session import FinishReason, QosClass, TokenLogprobs
from superfluid_core.wire.columns import PackedLogprobs
from superfluid_core.wire.notes import Timing
from superfluid_head.fleet.events import (
    EndEvent,
    GenerationEvent,
    GenerationRequest,
    MovedEvent,
    ProgressEvent,
    TokensEvent,
)
from superfluid_head.fleet.generation import GenerationMachine
from superfluid_head.fleet.spans import ChoiceSpans
from superfluid_head.fleet.standing import Slot
from superfluid_head.fleet.transitions import ClientGone, Input, Place, StopAt
from superfluid_head.fleet.warmth import ContextNames

US = 1_000
JOINED_MAX = 32
"""Ids that wait for their reader as one event."""
JOINED_MEASURED_MAX = 8
"""The same with log-probabilities: what each event takes beside these is shared, and what is written at once stays small."""


Taker = Callable[[tuple[int, ...], Sequence[TokenLogprobs]], bool]
"""Takes ids and their log-probabilities (parallel or empty) at once, or says that it cannot just now."""

_logger = logging.getLogger(__name__)


class Owner(Protocol):
    """What a generation asks of the fleet that runs it."""

    async def prepare(self, generation: Generation) -> None: ...

    def begin(self, generation: Generation) -> None: ...

    def feed(self, generation: Generation, event: Input) -> None: ...

    def finish(self, generation: Generation) -> None: ...

    def set_class(self, generation: Generation, qos: QosClass) -> None: ...


@dataclass(slots=True)
class Waiting:
    """What the placing side remembers about a generation between a Place and its answer, and until its first token."""

    place: Place | None = None
    since_ns: int = 0
    began_ns: int = 0
    queued_ns: int = 0
    has_begun: bool = False
    slot: Slot | None = None
    last_node: str | None = None

    def enter(self, now_ns: int) -> None:
        """Begin to wait, or go on with it."""
        self.since_ns = self.since_ns or now_ns
        self.began_ns = self.began_ns or now_ns

    def take(self, slot: Slot) -> None:
        """Note where it runs from now on."""
        self.slot, self.last_node = slot, slot.title

    def first_token(self, slot: Slot, now_ns: int) -> tuple[float, float, float] | None:
        """Split the wait for the first token into queue, prefill and network, in seconds; None later on.

        None too where the node did not tell its part, as older ones do not: then only the head's own queue is known.
        """
        if self.has_begun:
            return None
        self.has_begun = True
        self.queued_ns = max(0, slot.placed_ns - self.began_ns)
        timing = slot.timing
        if timing is None:
            return None
        self.queued_ns += timing.queued_us * US
        told_ns = (timing.queued_us + timing.prefill_us) * US
        network_ns = max(0, now_ns - slot.placed_ns - told_ns)
        return self.queued_ns / SECOND, timing.prefill_us * US / SECOND, network_ns / SECOND


class Generation:
    """One running choice. Made by `Fleet.generate`; starts on entering its context."""

    def __init__(
        self, owner: Owner, session: int, request: GenerationRequest, machine: GenerationMachine
    ) -> None:
        self.session = session
        self.request = request
        self.machine = machine
        self.qos = request.qos
        self.waiting = Waiting()
        self.names = ContextNames()
        self.spans = ChoiceSpans(request)
        self._owner = owner
        self._pending: deque[GenerationEvent] = deque()
        self._error: SuperfluidError | None = None
        self._is_over = False
        self._is_begun = False
        self._waiter: asyncio.Future[None] | None = None
        self._taker: Taker | None = None

    @property
    def moves(self) -> int:
        return self.machine.journal.moves

    @property
    def node(self) -> str | None:
        """Where it runs now, or None while it waits."""
        slot = self.waiting.slot
        return None if slot is None else slot.title

    @property
    def last_node(self) -> str | None:
        """Where it runs or ran last, or None if it never did."""
        return self.waiting.last_node

    async def __aenter__(self) -> Generation:
        if not self._is_begun:
            await self._owner.prepare(self)
            self._is_begun = True
            self._owner.begin(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_begun:
            self._owner.feed(self, ClientGone())
            self._owner.finish(self)
        self.spans.close()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> GenerationEvent:
        """Wait for the next event. Raises SuperfluidError if the generation failed."""
        assert self._is_begun, "enter the generation's context first"
        while not self._pending:
            if self._error is not None:
                self._is_over = True
                error, self._error = self._error, None
                raise error
            if self._is_over:
                raise StopAsyncIteration
            assert self._waiter is None, "one reader at a time"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        event = self._pending.popleft()
        if isinstance(event, EndEvent):
            self._is_over = True
        return event

    def offer(self, taker: Taker) -> None:
        """Offer ids to `taker` the moment they come, while nothing waits; what it does not take waits as an event."""
        self._taker = taker

    def stop(self, count: int) -> None:
        """End the output at `count` ids: a stop string matched. Nothing later is delivered or counted."""
        if self._is_over:
            return
        self._owner.feed(self, StopAt(count))
        self._error = None
        self._pending.clear()
        self._pending.append(self.end_event(FinishReason.STOP, None))
        self._wake()

    def end_event(self, reason: FinishReason, stop_id: int | None) -> EndEvent:
        """Make the one end, and note it in the trace."""
        journal = self.machine.journal
        queued_ms = self.waiting.queued_ns // MS
        event = EndEvent(reason, stop_id, journal.cached, journal.moves, queued_ms)
        self.spans.ended(event, len(journal.ids))
        return event

    def set_class(self, qos: QosClass) -> None:
        """Serve it as `qos` from now on, wherever it is; nothing is to be said of the class that it has."""
        if qos != self.qos:
            self._owner.set_class(self, qos)

    # --- for the fleet: never waits ---

    def push(self, event: TokensEvent | ProgressEvent | MovedEvent | EndEvent) -> None:
        if isinstance(event, ProgressEvent) and self._pending:
            last = self._pending[-1]
            if isinstance(last, ProgressEvent):
                self._pending.pop()
        self._pending.append(event)
        self._wake()

    def push_tokens(
        self, first: int, ids: tuple[int, ...], logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Hand ids to the reader; those that find others waiting join them, a handful at most."""
        pending, waiter, taker = self._pending, self._waiter, self._taker
        if pending:
            last = pending[-1]
            if isinstance(last, TokensEvent) and _is_joined(last, ids, logprobs):
                return
        elif taker is not None and waiter is not None and not waiter.done():
            try:
                if taker(ids, logprobs):
                    return
            except Exception:  # its failure is its own, not that of the link which brought the ids
                _logger.exception("a reader of tokens failed")
                self.break_off(SuperfluidError("internal error"))
                return
        pending.append(TokensEvent(first, ids, logprobs))
        self._wake()

    def timed(self, link: int, timing: Timing) -> None:
        """Take the node's word on how long it took to the first token."""
        slot = self.waiting.slot
        if slot is not None and (slot.link, slot.epoch) == (link, timing.epoch):
            slot.timing = timing

    def break_off(self, error: SuperfluidError) -> None:
        self.spans.failed(error)
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _is_joined(event: TokensEvent, ids: tuple[int, ...], logprobs: Sequence[TokenLogprobs]) -> bool:
    """Add ids to an event that waits, where it has room and both have log-probabilities or neither has."""
    if isinstance(logprobs, PackedLogprobs) and isinstance(event.logprobs, PackedLogprobs):
        if len(event.ids) >= JOINED_MEASURED_MAX:
            return False
        event.logprobs = event.logprobs.joined(logprobs)
    elif event.logprobs or logprobs or len(event.ids) >= JOINED_MAX:
        return False
    event.ids += ids
    return True
