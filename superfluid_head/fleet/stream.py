"""What the caller of a generation holds: an async context manager and an async iterator over its events.

The link reader never waits for it. Ids wait here as events, bounded by the journal, which is bounded by the window; of
progress only the newest report waits. Leaving the context ends whatever still runs and gives everything back, once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from superfluid_core.errors import SuperfluidError
from superfluid_core.session import FinishReason, QosClass
from superfluid_head.fleet.events import (
    EndEvent,
    GenerationEvent,
    GenerationRequest,
    MovedEvent,
    ProgressEvent,
    TokensEvent,
)
from superfluid_head.fleet.generation import GenerationMachine
from superfluid_head.fleet.standing import Slot
from superfluid_head.fleet.transitions import ClientGone, Input, Place, StopAt
from superfluid_head.fleet.warmth import ContextNames


class Owner(Protocol):
    """What a generation asks of the fleet that runs it."""

    async def prepare(self, generation: Generation) -> None: ...

    def begin(self, generation: Generation) -> None: ...

    def feed(self, generation: Generation, event: Input) -> None: ...

    def finish(self, generation: Generation) -> None: ...

    def set_class(self, generation: Generation, qos: QosClass) -> None: ...


@dataclass(slots=True)
class Waiting:
    """What the placing side remembers about a generation between a Place and its answer."""

    place: Place | None = None
    since_ns: int = 0
    slot: Slot | None = None
    last_node: str | None = None

    def take(self, slot: Slot) -> None:
        """Note where it runs from now on."""
        self.slot, self.last_node = slot, slot.title


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
        self._owner = owner
        self._pending: deque[GenerationEvent] = deque()
        self._error: SuperfluidError | None = None
        self._is_over = False
        self._is_begun = False
        self._wake = asyncio.Event()

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
            self._wake.clear()
            await self._wake.wait()
        event = self._pending.popleft()
        if isinstance(event, EndEvent):
            self._is_over = True
        return event

    def stop(self, count: int) -> None:
        """End the output at `count` ids: a stop string matched. Nothing later is delivered or counted."""
        if self._is_over:
            return
        self._owner.feed(self, StopAt(count))
        self._error = None
        self._pending.clear()
        journal = self.machine.journal
        self._pending.append(EndEvent(FinishReason.STOP, None, journal.cached, journal.moves))
        self._wake.set()

    def set_class(self, qos: QosClass) -> None:
        """Serve it as `qos` from now on, wherever it is."""
        self._owner.set_class(self, qos)

    # --- for the fleet: never waits ---

    def push(self, event: TokensEvent | ProgressEvent | MovedEvent | EndEvent) -> None:
        if isinstance(event, ProgressEvent) and self._pending:
            last = self._pending[-1]
            if isinstance(last, ProgressEvent):
                self._pending.pop()
        self._pending.append(event)
        self._wake.set()

    def break_off(self, error: SuperfluidError) -> None:
        self._error = error
        self._wake.set()
