"""What is true of one node whatever is going on: its names, its links, its sessions, its troubles; and how to speak to it."""

from __future__ import annotations

import asyncio
import logging

from superfluid_core.link.link import LinkClosedError
from superfluid_core.logs import log
from superfluid_core.placement.view import NodeView
from superfluid_core.wire.messages import Message
from superfluid_head.fleet.asks import Asks
from superfluid_head.fleet.circuit import Circuit
from superfluid_head.fleet.context import NodeContext, Trouble
from superfluid_head.fleet.directory import NodeAddress
from superfluid_head.fleet.links import Links
from superfluid_head.fleet.pulse import PERIOD_MS
from superfluid_head.fleet.standing import Slot, Standing

logger = logging.getLogger(__name__)

JOINED = "joined/"
"""Before the identity in the key of a node that joined: no name in `--fleet` is to be taken for one."""


class NodeState:
    """One node. `is_joined`: it dials us, and `address` says from where."""

    def __init__(self, address: NodeAddress, context: NodeContext, *, is_joined: bool) -> None:
        self.address = address
        self.is_joined = is_joined
        self.key = JOINED + address.label if is_joined else address.key
        self.identity = ""
        self.view = NodeView(self.key)
        self.circuit = Circuit(context.fleet_limits)
        self.slots: dict[int, Slot] = {}
        self.links = Links()
        self.rekeys = self.dial_failures = self.faults = 0
        self.down_ns = context.clock.now_ns()
        self.is_drained = False
        self._boot = self._drained_boot = ""
        self.tried = asyncio.Event()
        self.asks = Asks()
        self._context = context
        self._trouble = Trouble()

    @property
    def standing(self) -> Standing | None:
        """The primary link."""
        return self.links.primary

    @property
    def title(self) -> str:
        """What people call this node: its label, else what it calls itself, else its address."""
        return self.address.label or self.identity or str(self.address)

    @property
    def complaint(self) -> str:
        return self._trouble.text

    @property
    def is_linked(self) -> bool:
        return len(self.links) > 0

    def send(self, message: Message) -> bool:
        """Queue `message` on the primary link; False when there is none."""
        standing = self.standing
        return standing is not None and self.send_on(standing.number, message)

    def send_on(self, link: int, message: Message) -> bool:
        """Queue `message` on one link; False when it is gone (its sessions move on their own)."""
        standing = self.links.find(link)
        if standing is None or standing.loss is not None:
            return False
        try:
            standing.link.send(message)
        except LinkClosedError:
            return False
        return True

    def hold(self, slot: Slot) -> None:
        """Note a session that is placed here."""
        self.slots[slot.session] = slot
        if len(self.slots) == 1:
            self.rouse()

    def rouse(self) -> None:
        """Have every link looked at within a period, as links are that are in use."""
        for standing in self.links:
            if standing.nap.shorten(PERIOD_MS / 1_000):
                standing.pulse.expect(self.now_ns())

    def slots_on(self, standing: Standing) -> list[Slot]:
        """Return the sessions that were opened on this link."""
        return [slot for slot in self.slots.values() if slot.link == standing.number]

    @property
    def key_id(self) -> str:
        """Name the fleet key that links to this node trust."""
        keys = self._context.keys
        return "none" if keys is None else keys.key_id

    @property
    def conns(self) -> int:
        """How many links are wanted."""
        return self._context.conns

    @property
    def rekey_grace_ms(self) -> int:
        return self._context.link_limits.rekey_grace_ms

    def now_ns(self) -> int:
        return self._context.clock.now_ns()

    def want(self) -> None:
        """Let the dial loop look again: a link is missing or worn."""
        self._trouble.wanted.set()

    def _complain(self, text: str) -> None:
        if not self._trouble.is_news(text, self._context.clock.now_ns()):
            return
        name = (
            f"'{self.title}' at {self.address}" if self.title != str(self.address) else self.title
        )
        then = "waiting for it" if self.is_joined else "retrying"
        log(logger, "warning", f"fleet node {name}: {text}; {then}")
