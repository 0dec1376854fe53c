"""Links of one node that wear out or break while others stand: what becomes of them and of their sessions.

    worn     12 h or 32 GiB: a fresh link is asked for (a node that joins is told GOAWAY: it dials another)
    retired  the fresh one stands: new sessions go there. After a grace those that still run are opened anew on it, at the same
             node, a few at a time; when the old one carries nothing more, it is closed
    broken   the others tell within ORPHAN_MS whether the process went with it; if not, only this link's sessions move

Synchronous; the node's pulse calls it. What a session does is the fleet's: it hears `lost` and `relink`.
"""

from __future__ import annotations

from collections.abc import Callable

from superfluid_core.clock import MS
from superfluid_core.wire.messages import Goaway
from superfluid_head.fleet.asks import ASK_MS_MAX
from superfluid_head.fleet.nodestate import NodeState
from superfluid_head.fleet.standing import Slot, Standing
from superfluid_head.fleet.transitions import Loss

ORPHAN_MS = 100
RELINKS_PER_BEAT = 4
LONG_GRACES = 4
"""A session that has not begun is opened anew only after so many graces: it would wait or prefill twice."""


class Wear:
    """The old age of the links of one node."""

    def __init__(
        self,
        node: NodeState,
        lost: Callable[[int, Loss], None],
        relink: Callable[[Slot, int], None],
    ) -> None:
        self._node = node
        self._lost = lost
        self._relink = relink
        self._orphans: dict[int, tuple[int, Loss]] = {}

    def is_over(self, standing: Standing, now_ns: int) -> bool:
        """Look at the age of a link. True when it has been replaced and carries nothing more: it is out, close it."""
        node = self._node
        if standing.retired_ns is not None:
            return self._wind_up(standing, standing.retired_ns, now_ns)
        if not standing.is_worn and standing.link.wants_rekey(now_ns):
            standing.is_worn = True
            node.want()
            if node.is_joined:
                node.send_on(standing.number, Goaway("another link, please: this one is worn"))
        return False

    def replace(self, now_ns: int) -> None:
        """Retire a worn link in favour of the newest, or one that is too many."""
        node = self._node
        worn = [standing for standing in node.links.current if standing.is_worn]
        if worn:
            node.rekeys += 1
            self._retire(worn[0], now_ns)
        elif len(node.links.fresh) > node.conns:
            self._retire(next(s for s in node.links.fresh if s is not node.links.primary), now_ns)

    def orphan(self, number: int, loss: Loss) -> None:
        """Note a link that broke while others stand."""
        self._orphans[number] = (self._node.now_ns(), loss)
        self._node.rouse()

    @property
    def has_orphans(self) -> bool:
        return bool(self._orphans)

    def settle_orphans(self, now_ns: int) -> None:
        """Move the sessions of broken links, once it is clear that the node is still there."""
        for number, (lost_ns, loss) in list(self._orphans.items()):
            if now_ns - lost_ns >= ORPHAN_MS * MS:
                del self._orphans[number]
                self._lost(number, loss)

    def forget(self) -> None:
        """Forget the broken links: the whole node is lost, and everything on it moves."""
        self._orphans.clear()

    def _retire(self, standing: Standing, now_ns: int) -> None:
        standing.retired_ns, standing.last_ask = now_ns, self._node.asks.newest
        self._node.rouse()

    def _wind_up(self, standing: Standing, retired_ns: int, now_ns: int) -> bool:
        node = self._node
        slots, grace_ms = node.slots_on(standing), node.rekey_grace_ms
        waited_ms = (now_ns - retired_ns) // MS
        if not slots and (node.asks.are_answered(standing.last_ask) or waited_ms >= ASK_MS_MAX):
            standing.loss = Loss.GOING
            node.links.remove(standing)
            return True
        fresh = node.links.choose(node.slots.values())
        if fresh is None or waited_ms < grace_ms or node.view.is_draining:
            return False
        is_late = waited_ms >= LONG_GRACES * grace_ms
        for slot in [slot for slot in slots if slot.is_begun or is_late][:RELINKS_PER_BEAT]:
            self._relink(slot, fresh.number)
        return False
