"""Planned moves: sessions leave a node that drains without their readers noticing.

    grace over --> the context is put to another node as the prompt of a session of a few tokens ("warming")
                   the old node is heard all the while; nothing but its rows is delivered
               --> when the first comes, the other node has the context cached: now the session moves, by the
                   one rule for all moves (epoch raised first), and only the tokens since then are computed again

So the acceptance rule knows nothing of this: a warming has another session id, and its tokens are never looked at. It has more
than one only to keep its lane until it is cancelled in one breath with the OPEN of the session, which gets that lane: one that
ended by itself left it to whoever waited there, and the session waited for the next. What
cannot be warmed (no room for long, refusals, a session that still prefills) moves plainly. Bounded: `warming_max` at a time,
each counted by placement as a prefilling move of its node, WARM_MS_MAX long, WARM_TRIES_MAX times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from superfluid_core.clock import MS, Clock
from superfluid_core.errors import LocalProtocolError
from superfluid_core.limits import FleetLimits, LinkLimits
from superfluid_core.placement.policies import RefusalKind
from superfluid_core.placement.reserve import Placed as Reserved
from superfluid_core.wire.messages import CancelSession
from superfluid_head.fleet import transitions as t
from superfluid_head.fleet.desk import Desk
from superfluid_head.fleet.node import FleetNode
from superfluid_head.fleet.standing import Slot
from superfluid_head.fleet.stream import Generation
from superfluid_head.fleet.translate import open_of

WARM_MS_MAX = 60_000
WARM_TRIES_MAX = 3
WARM_TOKENS = 32
"""Tokens of a warming: as many as a fast node makes in the time of a way to the head and back."""
REASON = "planned move"

Feed = Callable[[Generation, t.Relieved], None]
NewSession = Callable[[], int]


@dataclass(slots=True, eq=False)
class Warming:
    """One context on its way: from the placement in `source` to the node of `slot`."""

    generation: Generation
    source: Slot
    slot: Slot
    since_ns: int


class Relief:
    """Empties nodes that drain. `feed` tells a generation what happened to it; `new_session` draws a free id."""

    def __init__(
        self,
        nodes: Mapping[str, FleetNode],
        desk: Desk,
        clock: Clock,
        limits: tuple[FleetLimits, LinkLimits],
        feed: Feed,
    ) -> None:
        self.new_session: NewSession = lambda: 0
        self._nodes = nodes
        self._desk = desk
        self._clock = clock
        self._limits, self._link_limits = limits
        self._feed = feed
        self._due_ns: dict[str, int] = {}
        self._warming: dict[int, Warming] = {}
        self._tries: dict[int, int] = {}

    def __contains__(self, session: object) -> bool:
        return session in self._warming

    def begin(self, node: FleetNode, grace_ms: int) -> None:
        """Empty `node` after `grace_ms`; a second word can only make it sooner."""
        due_ns = self._clock.now_ns() + grace_ms * MS
        self._due_ns[node.key] = min(due_ns, self._due_ns.get(node.key, due_ns))

    def end(self, node: FleetNode) -> None:
        """Let what runs on `node` go on there."""
        self._due_ns.pop(node.key, None)

    def is_due(self, node: FleetNode, now_ns: int) -> bool:
        due_ns = self._due_ns.get(node.key)
        return due_ns is not None and now_ns >= due_ns

    def tick(self, generations: Mapping[int, Generation], now_ns: int) -> None:
        """Give up warmings that are over or too long, and begin those that are due."""
        for session, warming in list(self._warming.items()):
            if warming.generation.waiting.slot is not warming.source:
                self._stop(session, is_told=True)
            elif now_ns - warming.since_ns >= WARM_MS_MAX * MS:
                self._failed(session)
        self._tries = {n: tries for n, tries in self._tries.items() if n in generations}
        warmed = {warming.source.session for warming in self._warming.values()}
        for key in [key for key, due_ns in self._due_ns.items() if now_ns >= due_ns]:
            for slot in list(self._nodes[key].slots.values()):
                generation = generations.get(slot.session)
                if generation is not None and slot.session not in warmed:
                    self._relieve(generation, slot, now_ns)

    def heard(self, session: int, event: t.NodeInput) -> None:
        """Take what a node says of a warming."""
        warming = self._warming[session]
        slot = warming.slot
        if (slot.link, slot.epoch) != (event.link, event.epoch):
            return
        slot.progressed_ns = self._clock.now_ns()
        match event:
            case t.Arrived():
                self._stop(session, is_told=event.finish is None)
                self._move(warming.generation, warming.source, slot.key)
            case t.Acknowledged():
                slot.is_acknowledged = True
                slot.reservation.acknowledge()
            case t.Advanced():
                return
            case t.ClosedByNode() | t.RefusedByNode() | t.Stalled():
                self._failed(session)

    def node_lost(self, node: FleetNode, link: int | None = None) -> None:
        """Forget the warmings on a node that is gone, or on one of its links."""
        slots = {session: warming.slot for session, warming in self._warming.items()}
        for session, slot in slots.items():
            if slot.key == node.key and link in (None, slot.link):
                self._failed(session)

    # --- one session ------------------------------------------------------------------------------

    def _relieve(self, generation: Generation, slot: Slot, now_ns: int) -> None:
        if not slot.is_begun or self._tries.get(slot.session, 0) >= WARM_TRIES_MAX:
            if self._is_room_elsewhere(generation, slot, now_ns):
                self._move(generation, slot, None)
            return
        if len(self._warming) >= self._limits.warming_max:
            return
        placed = self._place(generation, slot, now_ns)
        if placed is not None:
            self._warm(generation, slot, placed, now_ns)

    def _is_room_elsewhere(self, generation: Generation, slot: Slot, now_ns: int) -> bool:
        """Say whether to leave at all: a node that drains is still better than none."""
        placed = self._place(generation, slot, now_ns)
        if placed is None:
            return False
        placed.reservation.release()
        self._nodes[placed.choice.node].circuit.probe_over()
        return True

    def _place(self, generation: Generation, slot: Slot, now_ns: int) -> Reserved | None:
        wanted = t.Place(frozenset((slot.key,)), True, REASON)
        verdict = self._desk.place(generation, wanted, now_ns)
        if isinstance(verdict, Reserved):
            return verdict
        if verdict.kind is RefusalKind.TOO_LONG:
            self._tries[slot.session] = WARM_TRIES_MAX
        return None

    def _warm(self, generation: Generation, source: Slot, placed: Reserved, now_ns: int) -> None:
        node, session = self._nodes[placed.choice.node], self.new_session()
        standing = node.links.choose(node.slots.values())
        assert standing is not None, "a node without a link was chosen"
        slot = Slot(session, 1, standing.number, node.key, node.title, placed.reservation, now_ns)
        self._warming[session] = Warming(generation, source, slot, now_ns)
        node.hold(slot)
        journal = generation.machine.journal
        ttl_ms = min(self._link_limits.lease_ttl_ms, standing.welcome.lease_ttl_max_ms)
        lease = (standing.stamp_ns, ttl_ms)
        count = min(WARM_TOKENS, placed.choice.max_output - len(journal.ids))
        message = open_of(journal, slot, generation.qos, max(1, count), lease)
        # as a prompt of its own: where lanes are short it does not go before those whose readers wait
        context = (*message.prompt, *message.delivered)
        message = replace(message, prompt=context, delivered=(), deadline_ms=WARM_MS_MAX)
        try:
            node.send_on(slot.link, message)
        except LocalProtocolError:
            self._failed(session)

    def _move(self, generation: Generation, source: Slot, target: str | None) -> None:
        if generation.waiting.slot is source:
            self._feed(generation, t.Relieved(source.link, source.epoch, target))

    def _failed(self, session: int) -> None:
        number = self._warming[session].source.session
        self._tries[number] = self._tries.get(number, 0) + 1
        self._stop(session, is_told=True)

    def _stop(self, session: int, *, is_told: bool) -> None:
        slot = self._warming.pop(session).slot
        slot.reservation.release()
        node = self._nodes[slot.key]
        node.slots.pop(session, None)
        node.circuit.probe_over()
        if is_told:
            node.send_on(slot.link, CancelSession(session, slot.epoch, REASON))
