"""What the HTTP side needs of the fleet, as protocols: the door is `superfluid_head.fleet.fleet.Fleet`, tests bring a fake.

Nothing here decides or does anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from superfluid_core.session import QosClass, TokenLogprobs
from superfluid_head.fleet.chronicle import Listener, PlacementRecord
from superfluid_head.fleet.embeds import EmbedRequest
from superfluid_head.fleet.events import GenerationEvent, GenerationRequest
from superfluid_head.fleet.pins import PinnedPrefix, PrefixPin
from superfluid_head.metrics.nodes import NodeFigures


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

    @property
    def last_node(self) -> str | None:
        """Where it runs or ran last."""
        ...

    def offer(self, taker: Callable[[tuple[int, ...], Sequence[TokenLogprobs]], bool]) -> None:
        """Offer ids and their log-probabilities (parallel or empty) to `taker` the moment they come, while nothing waits.

        What it does not take waits as an event.
        """
        ...

    def stop(self, count: int) -> None:
        """End the output at `count` ids; the next event is EndEvent(STOP)."""
        ...

    def set_class(self, qos: QosClass) -> None:
        """Serve it as `qos` from now on, wherever it is."""
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


class HealthView(Protocol):
    """Whether at least one model can be served end to end."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def nodes(self) -> Sequence[NodeFigures]: ...


class FleetDoor(Protocol):
    """The fleet as endpoints see it."""

    def generate(self, request: GenerationRequest) -> GenerationDoor: ...

    def models(self) -> Sequence[Served]: ...

    def health(self) -> HealthView: ...

    def waiting_by_class(self) -> Sequence[int]:
        """How many wait in this head, best class first."""
        ...

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """How often what happened to links and to placements, by families of metrics and by event."""
        ...

    async def node_stats(self, name: str) -> bytes:
        """Ask a node for everything that it measures, as JSON."""
        ...

    async def embed(self, wanted: EmbedRequest) -> bytes:
        """Make the vector of a text, little-endian float32. Raises SuperfluidError."""
        ...

    async def pin_prefix(self, pin: PrefixPin) -> PinnedPrefix:
        """Have a node keep a prefix that it has in its cache. Raises SuperfluidError."""
        ...

    def unpin_prefix(self, pinned: PinnedPrefix) -> None:
        """Let go of it; a node that is not linked has forgotten it by itself or soon will."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Everything about the fleet, as plain values."""
        ...

    def why(self, request_id: str) -> Sequence[PlacementRecord]:
        """Return the placements of a recent request; none when it is unknown."""
        ...

    def events(self, *, since: int | None = None) -> AbstractContextManager[Listener]:
        """Hear what happens, from event `since` on. Raises CapacityError when too many listen."""
        ...

    def drain(self, name: str, grace_ms: int | None = None) -> None:
        """Give a node no new sessions. Raises InvalidRequestError for a node that is unknown."""
        ...

    def undrain(self, name: str) -> None:
        """Use a drained node again. Raises InvalidRequestError for a node that is unknown."""
        ...
