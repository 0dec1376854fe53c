"""What is true of a node while one link to it stands, and of a session while it is placed there. Plain state.

A `Standing` is made at WELCOME and never revived: `loss` says why it ended. `number` names the link in the acceptance rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from superfluid_core.link.link import Link
from superfluid_core.placement.reserve import Reservation
from superfluid_core.wire.messages import ModelOffer, Status, Welcome
from superfluid_core.wire.notes import Timing
from superfluid_head.fleet.nap import Nap
from superfluid_head.fleet.pulse import Pulse
from superfluid_head.fleet.transitions import Loss


@dataclass(slots=True, eq=False)
class Slot:
    """One session placed on one node: its reservation, when that was, and when it last moved on. `timing` is the node's word."""

    session: int
    epoch: int
    link: int
    key: str
    title: str
    reservation: Reservation
    progressed_ns: int
    is_acknowledged: bool = False
    is_begun: bool = False
    timing: Timing | None = None
    placed_ns: int = field(init=False)

    def __post_init__(self) -> None:
        self.placed_ns = self.progressed_ns


@dataclass(slots=True, eq=False)
class Standing:
    """One link that stands. `stamp_ns` is the newest stamp of the node's clock; the flags are explained in `links.py`."""

    link: Link
    welcome: Welcome
    number: int
    offers: dict[str, ModelOffer]
    pulse: Pulse
    stamp_ns: int
    status: Status | None = None
    loss: Loss | None = None
    is_going: bool = False
    is_warm: bool = False
    is_worn: bool = False
    is_suspect: bool = False
    is_hung: bool = False
    retired_ns: int | None = None
    last_ask: int = 0
    nap: Nap = field(default_factory=Nap)


@dataclass(slots=True)
class Counters:
    """What happened on this head, for metrics. Monotone."""

    placements: int = 0
    moves: int = 0
    stale_rows: int = 0
    faults: int = 0
    quarantined: int = 0
    ended: int = 0
    failed: int = 0
    joins: int = 0
    rekeys: int = 0
    relinked: int = 0
    link_refusals: int = 0
    join_refusals: int = 0

    def shown(self) -> dict[str, dict[str, int]]:
        """Count by event, under the names of the metrics' families."""
        links = {
            "joined": self.joins,
            "rekeyed": self.rekeys,
            "relinked": self.relinked,
            "dial refused": self.link_refusals,
            "join refused": self.join_refusals,
        }
        sessions = {
            "ended": self.ended,
            "failed": self.failed,
            "fault": self.faults,
            "stale row": self.stale_rows,
            "quarantined": self.quarantined,
        }
        return {"link_events": links, "fleet_events": sessions}
