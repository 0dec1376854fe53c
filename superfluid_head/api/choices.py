"""Runs the choices of one request on the fleet and turns their ids into deltas; both reply modes use this one path.

Owns one task per choice. A choice ends exactly once: with an `Ended`, or all of them with an error. Matching stop
strings is done here, so the generation is told to stop at the matching token. It must not know HTTP or SSE.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, TypeVarTuple

from superfluid_core.clock import SECOND, Clock
from superfluid_core.errors import ErrorCode, GenerationError, SuperfluidError
from superfluid_core.session import FinishReason, TokenLogprobs
from superfluid_head.api.ports import FleetDoor, GenerationDoor
from superfluid_head.api.together import together
from superfluid_head.fleet.events import (
    EndEvent,
    GenerationRequest,
    MovedEvent,
    ProgressEvent,
    TokensEvent,
)
from superfluid_head.metrics import HeadMetrics
from superfluid_head.text.channel import Channel, Delta

T = TypeVar("T")
Ids = TypeVarTuple("Ids")


@dataclass(frozen=True, slots=True)
class Started:
    """The fleet took the choice: its first sign of life."""

    choice: int


@dataclass(slots=True)
class Text:
    """Some text of a choice; `count` ids were sampled for it so far, `ids` are those since the last event of the choice."""

    choice: int
    delta: Delta
    count: int
    ids: tuple[int, ...] = ()
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """The last word of a choice. `finish` is the API's word, `stop_reason` the string or id that ended it."""

    choice: int
    finish: str
    stop_reason: str | int | None
    count: int
    cached: int
    moves: int
    ids: tuple[int, ...] = ()
    reasoning: int = 0
    queued_ms: int = 0


ChoiceEvent = Started | Text | Ended
Emit = Callable[[ChoiceEvent], Awaitable[None]]


class Teller(Protocol):
    """The short way for text, without a task between the link and the reader. It is told something only right after `is_ready`."""

    def is_ready(self) -> bool: ...

    def tell(self, text: Text) -> None: ...

    def tell_words(self, choice: int, words: str, count: int, ids: tuple[int, ...]) -> None:
        """Do what `tell` does with a Text of nothing but words, of which there are some."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """What a choice runs on. `on_door` and `on_gone` hear where a choice runs from now on, and that it no longer does."""

    fleet: FleetDoor
    metrics: HeadMetrics
    clock: Clock
    on_door: Callable[[int, GenerationDoor], None] = lambda _choice, _door: None
    on_gone: Callable[[int], None] = lambda _choice: None
    teller: Teller | None = None


async def run_choices(
    stage: Stage,
    requests: Sequence[GenerationRequest],
    channels: Sequence[Channel],
    emit: Emit,
) -> None:
    """Run all choices to their ends; events name them by their place in `requests`. Raises the first SuperfluidError; then nothing more is emitted."""
    await together(
        _Choice(stage, request, channel, emit, index).run()
        for index, (request, channel) in enumerate(zip(requests, channels, strict=True))
    )


class _Choice:
    """One choice, from the fleet's door to its end."""

    def __init__(
        self,
        stage: Stage,
        request: GenerationRequest,
        channel: Channel,
        emit: Emit,
        index: int,
    ) -> None:
        self._stage = stage
        self._index = index
        self._request = request
        self._channel = channel
        self._emit = emit
        self._has_started = False
        self._last_ns = stage.clock.now_ns()
        self._began_ns = self._last_ns
        self._unsent: list[int] = []
        self._sent = 0
        self._logprobs_asked = request.sampling.logprobs is not None
        self._door: GenerationDoor | None = None
        self._teller = stage.teller
        self._clock = stage.clock
        self._vitals = stage.metrics.vitals
        self._meter = stage.metrics.meter(request.model, request.qos)

    async def run(self) -> None:
        try:
            await self._follow()
        except asyncio.CancelledError:
            self._record("cancelled")
            raise
        except SuperfluidError:
            self._record("error")
            raise

    def _record(self, finish: str) -> None:
        elapsed_s = (self._stage.clock.now_ns() - self._began_ns) / SECOND
        self._meter.ended(finish, elapsed_s)

    async def _follow(self) -> None:
        async with self._stage.fleet.generate(self._request) as generation:
            self._stage.on_door(self._index, generation)
            try:
                if await self._hear(generation):
                    return
            finally:
                self._stage.on_gone(self._index)
        raise GenerationError("the generation ended without a word", code=ErrorCode.INTERNAL)

    async def _hear(self, generation: GenerationDoor) -> bool:
        """Pass on events; True when the end came."""
        self._door = generation
        if self._teller is not None:
            generation.offer(self._is_told)
        async for event in generation:
            match event:
                case TokensEvent():
                    await self._on_tokens(event)
                case ProgressEvent():
                    await self._start()
                case MovedEvent():
                    self._stage.metrics.moved(event.reason)
                    self._stage.metrics.vitals.moved(self._stage.clock.now_ns())
                case EndEvent():
                    await self._on_end(event)
                    return True
        return False

    async def _start(self) -> None:
        if not self._has_started:
            self._has_started = True
            await self._emit(Started(self._index))

    async def _on_tokens(self, event: TokensEvent) -> None:
        self._measure(len(event.ids))
        await self._start()
        if self._channel.stop is None:
            if self._channel.is_bare:
                words, ids = self._timed(self._plain, event.ids)
                if words:
                    await self._emit(Text(self._index, Delta(words), self._channel.count, ids))
                return
            for text in self._timed(self._parsed, event.ids, event.logprobs):
                await self._emit(text)

    def _is_told(self, ids: tuple[int, ...], logprobs: Sequence[TokenLogprobs]) -> bool:
        """Take ids the short way, if nothing is in it."""
        teller, channel = self._teller, self._channel
        if teller is None or not self._has_started or channel.stop is not None:
            return False
        if not teller.is_ready():
            return False
        self._measure(len(ids))
        if not channel.is_bare:
            for text in self._timed(self._parsed, ids, logprobs):
                teller.tell(text)
            return True
        words, told = self._timed(self._plain, ids)
        if words:
            teller.tell_words(self._index, words, channel.count, told)
        return True

    def _timed(self, read: Callable[[*Ids], T], *ids: *Ids) -> T:
        """Turn ids into text; now and then it is timed."""
        if not self._meter.is_due():
            return read(*ids)
        began_ns = self._clock.now_ns()
        found = read(*ids)
        self._meter.detokenized((self._clock.now_ns() - began_ns) / SECOND)
        return found

    def _plain(self, ids: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """Read ids in a bare channel, in which nothing ends the output: the words, and the ids that no event has told yet.

        The ids wait while there are no words.
        """
        words = self._channel.read(ids)
        if not words:
            self._unsent += ids
            return words, ()
        if self._unsent:
            ids = (*self._unsent, *ids)
            self._unsent.clear()
        self._sent += len(ids)
        return words, ids

    def _parsed(self, ids: tuple[int, ...], logprobs: Sequence[TokenLogprobs]) -> Sequence[Text]:
        """Read ids in any other channel, and end the generation where a stop string does."""
        self._unsent += ids
        deltas = self._channel.push(ids, logprobs if self._logprobs_asked else None)
        stop = self._channel.stop
        if stop is not None and self._door is not None:
            self._door.stop(stop.count)
        return self._texts(deltas)

    def _stop(self) -> Delta | None:
        """Return the delta in which a stop string ended the output."""
        return self._channel.stop

    def _texts(self, deltas: Sequence[Delta]) -> list[Text]:
        channel = self._channel
        stop = channel.stop
        count = channel.count if stop is None else stop.count
        return [
            Text(self._index, delta, count, self._ids(count), channel.reasoning_count)
            for delta in deltas
            if delta.text or delta.tokens or delta.reasoning or delta.call is not None
        ]

    def _ids(self, count: int) -> tuple[int, ...]:
        """Take the ids up to `count` that no event has told yet."""
        some = tuple(self._unsent)
        if len(some) == count - self._sent:
            self._unsent.clear()
        else:
            some = some[: max(0, count - self._sent)]
            del self._unsent[: len(some)]
        self._sent += len(some)
        return some

    def _measure(self, count: int) -> None:
        vitals, now_ns = self._vitals, self._clock.now_ns()
        elapsed_s = (now_ns - self._last_ns) / SECOND
        node = None if self._door is None else self._door.node
        if self._last_ns == self._began_ns:
            self._meter.first_token(elapsed_s)
            vitals.first_token(now_ns, elapsed_s)
            vitals.tokens(now_ns, node, count)
        else:
            self._meter.next_tokens(elapsed_s)
            vitals.delivered(now_ns, elapsed_s, node, count)
        self._last_ns = now_ns

    async def _on_end(self, event: EndEvent) -> None:
        await self._start()
        for text in self._texts(self._channel.finish()):
            await self._emit(text)
        ended = self._ended(event)
        self._record(ended.finish)
        await self._emit(ended)

    def _ended(self, event: EndEvent) -> Ended:
        reason: str | int | None = None
        count = self._channel.count
        finish = "stop"
        stop = self._stop()
        if stop is not None:
            reason, count = stop.stop, stop.count
        elif event.reason is FinishReason.STOP:
            if event.stop_id is not None and event.stop_id in self._request.stop_ids:
                reason = event.stop_id
        elif event.reason is FinishReason.LENGTH:
            finish = "length"
        else:
            raise _unfinished(event.reason)
        calls = self._channel.calls
        if finish == "stop" and calls.complete and not calls.broken:
            finish = "tool_calls"
        thoughts = self._channel.reasoning_count
        ids = self._ids(count)
        told = (event.cached, event.moves, ids, thoughts, event.queued_ms)
        return Ended(self._index, finish, reason, count, *told)


def _unfinished(reason: FinishReason) -> GenerationError:
    """Make the error of a generation that did not come to its end: never a faked stop."""
    if reason is FinishReason.DEADLINE:
        return GenerationError("the deadline passed", code=ErrorCode.DEADLINE_EXCEEDED)
    return GenerationError(f"the generation was {reason.value}", code=ErrorCode.NODE_LOST)
