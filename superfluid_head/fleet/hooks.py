"""Where a node reports: what the fleet hears of it. Names and shapes only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from superfluid_core.wire.messages import (
    Closed,
    Opened,
    Prefix,
    ProgressReport,
    Refuse,
    Tokens,
    Welcome,
)
from superfluid_core.wire.notes import Timing
from superfluid_head.fleet.directory import Admission
from superfluid_head.fleet.standing import Slot, Standing
from superfluid_head.fleet.transitions import Loss

if TYPE_CHECKING:
    from superfluid_head.fleet.node import FleetNode

SessionMessage = Opened | ProgressReport | Tokens | Closed | Refuse | Timing


class NodeHooks(Protocol):
    """Where a node reports. All calls are synchronous."""

    def admit(self, node: FleetNode, welcome: Welcome) -> Admission: ...

    def node_up(self, node: FleetNode) -> None: ...

    def node_down(self, node: FleetNode, loss: Loss) -> None: ...

    def boot_judged(self, boot: str, *, is_lost: bool) -> None: ...

    def link_added(self, node: FleetNode, standing: Standing) -> None: ...

    def link_lost(self, node: FleetNode, link: int, loss: Loss) -> None: ...

    def relink(self, slot: Slot, fresh: int) -> None: ...

    def heard(self, node: FleetNode, link: int, message: SessionMessage) -> None: ...

    def refused(self) -> None: ...

    def loaded(self, node: FleetNode) -> None: ...

    def stalled(self, slot: Slot) -> None: ...

    def prefixed(self, node: FleetNode, report: Prefix) -> None: ...

    def leaving(self, node: FleetNode) -> None: ...

    def returned(self, node: FleetNode) -> None: ...
