"""What every link of a program has in common: bounds, the clock, and where a PONG's status comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from superfluid_core.clock import Clock
from superfluid_core.limits import LinkLimits, WireLimits
from superfluid_core.wire.messages import Status


@dataclass(frozen=True, slots=True)
class LinkSetup:
    """A head has no `status_source`: its PONGs are bare."""

    limits: LinkLimits
    clock: Clock
    wire: WireLimits = field(default_factory=WireLimits)
    status_source: Callable[[], Status | None] | None = None
