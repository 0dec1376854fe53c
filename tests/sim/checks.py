"""Who looks on: taps on the product's own methods that hold every step against the promises of the fleet.

Kept apart from what they watch: leases are computed again from stamps, placements from what was sent, usage from what the first node
said. A broken promise raises ViolationError where it happens; counters tell what a run has really seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from superfluid_core.errors import ErrorCode
from superfluid_core.link.link import Link
from superfluid_core.wire.connection import Connection
from superfluid_core.wire.messages import Closed, Message, Open, Refuse, Renew, TokenRow, Tokens
from superfluid_core.wire.schema import Role
from superfluid_head.fleet import transitions as t
from superfluid_head.fleet.circuit import CircuitState
from superfluid_head.fleet.fleet import Fleet
from superfluid_head.fleet.generation import GenerationMachine
from superfluid_head.fleet.node import FleetNode
from superfluid_head.fleet.runner import Runner
from superfluid_head.fleet.stream import Generation
from superfluid_head.fleet.translate import arrived_of
from superfluid_noded.agent import Agent
from tests.sim.world import MS, SECOND, World

JUDGED = frozenset({Closed, Tokens, Renew, Open})
"""Messages of which something is noted when a link is given them."""
WRITTEN = frozenset({Tokens, Closed, Refuse})
"""The same, when a node writes them."""
TTL_MAX_MS = 30_000
LIE_S_MAX = 60


@dataclass(slots=True)
class Ledger:
    """What one generation has been through, written down from its inputs and actions."""

    current: tuple[int, int] | None = None
    epoch_max: int = 0
    length: int = 0
    ends: int = 0
    moves: int = 0
    cached: int = 0
    cached_epoch: int | None = None
    heard_of: tuple[int, int] | None = None


@dataclass(slots=True)
class Lease:
    """One placement's lease, from stamps alone."""

    until_ns: int
    ttl_ns: int
    has_finished: bool = False


class Checks:
    """The taps of one run; `patches` says where they go."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.counts: dict[str, int] = {}
        self.ledgers: dict[GenerationMachine, Ledger] = {}
        self.distort: Callable[[str, Link, Tokens], list[Message] | None] = lambda *_: None
        self.on_down: Callable[[Fleet, FleetNode, t.Loss], None] = lambda *_: None
        self.on_open: Callable[[Open], None] = lambda _message: None
        self.is_starved: Callable[[Link], bool] = lambda _link: False
        self._leases: dict[Connection, dict[tuple[int, int], Lease]] = {}
        self._lied_ns: dict[Connection, int] = {}
        self._opened: dict[tuple[Agent, str, int], int] = {}
        self.received: deque[tuple[Agent, str, Open]] = deque(maxlen=64)

    def count(self, name: str, by: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + by

    def cached_of(self, generation: Generation) -> int:
        return self.ledgers[generation.machine].cached

    def patches(self) -> list[tuple[Any, str, Any]]:
        return [
            (Connection, "send", self._tap_wire(Connection.send)),
            (Link, "send_all", self._tap_link(Link.send_all)),
            (Agent, "receive", self._tap_agent(Agent.receive)),
            (GenerationMachine, "begin", self._tap_begin(GenerationMachine.begin)),
            (GenerationMachine, "on_event", self._tap_event(GenerationMachine.on_event)),
            (GenerationMachine, "take_plain", self._tap_plain(GenerationMachine.take_plain)),
            (Fleet, "node_down", self._tap_down(Fleet.node_down)),
            (Runner, "fault", self._tap_fault(Runner.fault)),
        ]

    # --- what is written -------------------------------------------------------------------------------

    def _tap_wire(self, original: Any) -> Any:
        world = self.world

        def send(connection: Connection, message: Message) -> bytes:
            data: bytes = original(connection, message)
            if world.ghost is None:
                world.note(data)
                if connection.role is Role.NODE and type(message) in WRITTEN:
                    self._node_wrote(connection, message)
            return data

        return send

    def _node_wrote(self, connection: Connection, message: Message) -> None:
        if isinstance(message, Tokens):
            lied_ns = self._lied_ns.get(connection)
            if lied_ns is not None and self.world.now_ns - lied_ns < LIE_S_MAX * SECOND:
                return  # what it forged may name any placement, and may wait for a reader that is slow
            leases = self._leases.get(connection, {})
            now_ns = self._boot_ns()
            for row in message.rows:
                lease = leases.get((row.session, row.epoch))
                if lease is not None and not lease.has_finished and now_ns >= lease.until_ns:
                    late_ms = (now_ns - lease.until_ns) // MS
                    self.world.broken(f"a node spoke {late_ms} ms after its lease")
        elif isinstance(message, Closed):
            self.count(f"closed: {message.code or message.reason}")
        elif isinstance(message, Refuse):
            self.count(f"refused: {message.code}")

    def _boot_ns(self) -> int:
        process = self.world.current
        assert process is not None
        return process.boot_ns()

    def _tap_link(self, original: Any) -> Any:
        def send_all(link: Link, messages: Iterable[Message]) -> None:
            given = tuple(messages)
            if not JUDGED.isdisjoint(map(type, given)):
                given = tuple([each for one in given for each in self._sent_for(link, one)])
            original(link, given)

        return send_all

    def _sent_for(self, link: Link, message: Message) -> Sequence[Message]:
        """Note what is said, and give what goes out instead of it."""
        world = self.world
        if world.ghost is not None or world.current is None:
            return (message,)
        if isinstance(message, Closed):
            self._note_ended(link, (message.session, message.epoch))
        elif isinstance(message, Tokens) and link.role is Role.NODE:
            for row in message.rows:
                if row.finish is not None:
                    self._note_ended(link, (row.session, row.epoch))
            return self._as_told(world.current.name, link, message)
        elif isinstance(message, Renew) and self.is_starved(link):
            self.count("renews withheld")
            return ()
        elif isinstance(message, Open):
            self.on_open(message)
        return (message,)

    def _as_told(self, name: str, link: Link, message: Tokens) -> Sequence[Message]:
        told = self.distort(name, link, message)
        if told is None:
            return (message,)
        self._lied_ns[link._connection] = self.world.now_ns
        return told

    def _note_ended(self, link: Link, placement: tuple[int, int]) -> None:
        """What came to an end, good or bad, within its lease may wait in the queue for a reader that is slow."""
        lease = self._leases.get(link._connection, {}).get(placement)
        if lease is not None:
            lease.has_finished = self._boot_ns() < lease.until_ns

    # --- what a node hears -----------------------------------------------------------------------------

    def _tap_agent(self, original: Any) -> Any:
        def receive(agent: Agent, head: Any, message: Message) -> None:
            if self.world.ghost is not None:
                original(agent, head, message)
                return
            connection = head.link._connection
            if isinstance(message, Renew):
                self._renewed(connection, message.stamp_ns)
            if not isinstance(message, Open):
                original(agent, head, message)
                return
            before = set(agent.roster.live)
            was_draining = agent.is_draining
            original(agent, head, message)
            key = (message.session, message.epoch)
            is_new = bool(set(agent.roster.live) - before)
            self._judge_open(agent, head.name, message, is_new=is_new)
            if was_draining and is_new:
                self.world.broken("a draining node took a session")
            ttl_ns = min(message.lease_ttl_ms, TTL_MAX_MS) * MS
            lease = Lease(message.lease_stamp_ns + ttl_ns, ttl_ns)
            self._leases.setdefault(connection, {})[key] = lease

        return receive

    def _judge_open(self, agent: Agent, head: str, message: Open, *, is_new: bool) -> None:
        name = (agent, head, message.session)
        self.received.append((agent, head, message))
        known = self._opened.get(name, 0)
        if is_new and message.epoch <= known:
            self.world.broken(f"epoch {message.epoch} was opened after {known}")
        if self._boot_ns() >= message.lease_stamp_ns + message.lease_ttl_ms * MS:
            self.count("late OPEN judged")
            if is_new:
                self.world.broken("a session was opened after its lease")
        if is_new:
            self._opened[name] = message.epoch
        elif message.epoch <= known:
            self.count("stale OPEN refused")

    def _renewed(self, connection: Connection, stamp_ns: int) -> None:
        now_ns = self._boot_ns()
        for lease in self._leases.get(connection, {}).values():
            if now_ns < lease.until_ns:
                lease.until_ns = max(lease.until_ns, stamp_ns + lease.ttl_ns)

    # --- what a generation does ------------------------------------------------------------------------

    def _tap_begin(self, original: Any) -> Any:
        def begin(machine: GenerationMachine) -> list[t.Action]:
            self.ledgers[machine] = Ledger()
            actions: list[t.Action] = original(machine)
            self._judge(machine, None, actions)
            return actions

        return begin

    def _tap_event(self, original: Any) -> Any:
        def on_event(machine: GenerationMachine, event: t.Input, now_ns: int) -> list[t.Action]:
            actions: list[t.Action] = original(machine, event, now_ns)
            if self.world.ghost is None:
                self._judge(machine, event, actions)
            return actions

        return on_event

    def _tap_plain(self, original: Any) -> Any:
        """A row on the short way is judged like the same row on the long one."""

        def take_plain(machine: GenerationMachine, link: int, row: TokenRow) -> bool:
            is_taken: bool = original(machine, link, row)
            if is_taken and self.world.ghost is None:
                self.count("plain rows")
                delivered = t.Deliver(row.first, row.ids, row.logprobs)
                self._judge(machine, arrived_of(link, row), [delivered])
            return is_taken

        return take_plain

    def _judge(
        self, machine: GenerationMachine, event: t.Input | None, actions: list[t.Action]
    ) -> None:
        ledger = self.ledgers[machine]
        came_from = ledger.current
        if isinstance(event, t.NodeInput) and came_from == (event.epoch, event.link):
            ledger.heard_of = came_from
        if isinstance(event, t.Acknowledged | t.Advanced) and came_from == (
            event.epoch,
            event.link,
        ):
            if ledger.cached_epoch is None:
                ledger.cached_epoch = event.epoch
            if ledger.cached_epoch == event.epoch:
                cached = min(event.cached, len(machine.journal.request.prompt))
                ledger.cached = max(ledger.cached, cached)
        if ledger.ends and actions:
            self.world.broken(f"{actions[0]} after the end")
        for action in actions:
            self._judge_action(ledger, event, action, came_from)

    def _judge_action(
        self,
        ledger: Ledger,
        event: t.Input | None,
        action: t.Action,
        came_from: tuple[int, int] | None,
    ) -> None:
        match action:
            case t.SendOpen():
                assert isinstance(event, t.Placed | t.Relinked)
                is_replacing = isinstance(event, t.Relinked)
                if (ledger.current is not None) is not is_replacing:
                    self.world.broken("a session is live in two epochs")
                if action.epoch <= ledger.epoch_max:
                    self.world.broken("an epoch that has been there comes again")
                link = event.fresh if isinstance(event, t.Relinked) else event.link
                ledger.current, ledger.epoch_max = (action.epoch, link), action.epoch
                self.count("relinked", int(is_replacing))
            case t.Leave():
                if ledger.current is None or ledger.current[0] != action.epoch:
                    self.world.broken("a placement was left that is not there")
                ledger.current = None
            case t.Deliver():
                self._judge_delivery(ledger, event, action, came_from)
            case t.End() | t.Fail():
                ledger.ends += 1
                if ledger.ends > 1 or ledger.current is not None:
                    self.world.broken("an end with a placement, or a second one")
            case _:
                self._count_action(action)

    def _count_action(self, action: t.Action) -> None:
        match action:
            case t.Announce():
                self.count(f"move: {_short(action.reason)}")
            case t.Blame():
                self.count(f"blame: {_short(action.reason)}")
                is_a_lie = action.reason.startswith(("tokens", "more tokens", "finish", "as many"))
                if is_a_lie and not self.counts.get("forged"):
                    self.world.broken(f"an honest node was blamed: {action.reason}")
            case t.Quarantine():
                self.count("quarantined")
            case _:
                return

    def _judge_delivery(
        self,
        ledger: Ledger,
        event: t.Input | None,
        action: t.Deliver,
        came_from: tuple[int, int] | None,
    ) -> None:
        if not isinstance(event, t.Arrived) or came_from != (event.epoch, event.link):
            self.world.broken("tokens of another placement were accepted")
        if action.first != ledger.length or event.first != ledger.length:
            self.world.broken(f"tokens from {event.first} accepted at {ledger.length}")
        if ledger.current is None and came_from is None:
            self.world.broken("tokens without a placement were accepted")
        ledger.length += len(action.ids)

    def _tap_down(self, original: Any) -> Any:
        def node_down(fleet: Fleet, node: Any, loss: t.Loss) -> None:
            if self.world.ghost is None:
                self.count(f"loss: {loss}")
                self.on_down(fleet, node, loss)
                if node.slots:
                    self.count(f"loss with sessions: {loss}")
            original(fleet, node, loss)

        return node_down

    def _tap_fault(self, original: Any) -> Any:
        """The last node that works is never rested: the others would have to be there to take over."""

        def fault(runner: Runner, node: FleetNode, reason: str) -> None:
            now_ns = runner._clock.now_ns()
            was_open = node.circuit.state(now_ns) is CircuitState.OPEN
            original(runner, node, reason)
            if self.world.ghost is not None or was_open:
                return
            if node.circuit.state(now_ns) is CircuitState.OPEN:
                self.count("circuits opened")
                views = [other for other in runner._nodes.values() if other is not node]
                if not any(
                    other.view.is_up and other.circuit.state(now_ns) is not CircuitState.OPEN
                    for other in views
                ):
                    self.world.broken("the last node that works is rested")

        return fault


def _short(reason: str) -> str:
    return "tokens from" if reason.startswith("tokens from") else reason[:40]


def refused(counts: dict[str, int], code: ErrorCode) -> int:
    return counts.get(f"refused: {code}", 0)


def forged(row: TokenRow, **fields: Any) -> TokenRow:
    """A row with some fields replaced."""
    values = {name: getattr(row, name) for name in TokenRow.__slots__}
    return TokenRow(**(values | fields))
