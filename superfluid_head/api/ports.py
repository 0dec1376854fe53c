"""What the HTTP side needs of the fleet, as protocols: the door is `superfluid_head.fleet.fleet.Fleet`, tests bring a fake.

Nothing here decides or does anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from superfluid_head.fleet.events import GenerationEvent, GenerationRequest


class GenerationDoor(Protocol):
    """One running choice. Leaving the context cancels what still runs and releases everything."""

    async def __aenter__(self) -> GenerationDoor: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def __aiter__(self) -> GenerationDoor: ...

    async def __anext__(self) -> GenerationEvent: ...

    @property
    def node(self) -> str | None:
        """Where it runs now."""
        ...

    def stop(self, count: int) -> None:
        """End the output at `count` ids; the next event is EndEvent(STOP)."""
        ...


class Served(Protocol):
    """A model that the fleet serves or served."""

    @property
    def name(self) -> str: ...

    @property
    def window(self) -> int: ...

    @property
    def is_up(self) -> bool: ...

    @property
    def text(self) -> str: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...


class NodeView(Protocol):
    """A node as health and metrics see it."""

    @property
    def name(self) -> str: ...

    @property
    def is_up(self) -> bool: ...


class HealthView(Protocol):
    """Whether at least one model can be served end to end."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def nodes(self) -> Sequence[NodeView]: ...


class FleetDoor(Protocol):
    """The fleet as endpoints see it."""

    def generate(self, request: GenerationRequest) -> GenerationDoor: ...

    def models(self) -> Sequence[Served]: ...

    def health(self) -> HealthView: ...
