"""The door to the fleet: what HTTP knocks on. Owns the nodes' tasks and the ticking of time, decides nothing itself.

`run` is the owner task: it keeps a link to every node until it is cancelled, then every generation that still runs ends with an
error. `generate` refuses at once what can never work and otherwise returns a Generation, which starts when its context is
entered. What people are told about nodes (the lines at start-up, health, the snapshot for /v1/fleet) is made here.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

from superfluid_core.clock import Clock
from superfluid_core.errors import CapacityError, ErrorCode, GenerationError, InvalidRequestError
from superfluid_core.logs import log
from superfluid_core.wire.messages import DrainOrder, Prefix, SessionRow, Welcome
from superfluid_head.fleet.chronicle import Listener, PlacementRecord
from superfluid_head.fleet.context import FleetOptions, NodeContext
from superfluid_head.fleet.desk import Desk
from superfluid_head.fleet.directory import Admission, Directory, NodeAddress, ServedModel
from superfluid_head.fleet.embeds import EmbedRequest, embed
from superfluid_head.fleet.events import (
    EndEvent,
    GenerationEvent,
    GenerationRequest,
    MovedEvent,
    ProgressEvent,
    TokensEvent,
)
from superfluid_head.fleet.generation import GenerationMachine
from superfluid_head.fleet.health import FleetHealth, NodeState, state_of
from superfluid_head.fleet.joins import Joins
from superfluid_head.fleet.members import Members, Reloaded
from superfluid_head.fleet.node import FleetNode, SessionMessage
from superfluid_head.fleet.pins import Naming, PinnedPrefix, Pinner, PrefixPin, unpin
from superfluid_head.fleet.quarantine import QuarantineTable
from superfluid_head.fleet.reach import say_windows, tried
from superfluid_head.fleet.runner import Runner
from superfluid_head.fleet.standing import Counters, Slot, Standing
from superfluid_head.fleet.stream import Generation
from superfluid_head.fleet.transitions import Loss
from superfluid_head.fleet.warmth import Warmth

__all__ = [
    "EndEvent",
    "Fleet",
    "FleetHealth",
    "FleetOptions",
    "Generation",
    "GenerationEvent",
    "GenerationRequest",
    "MovedEvent",
    "NodeAddress",
    "NodeState",
    "ProgressEvent",
    "ServedModel",
    "TokensEvent",
]

logger = logging.getLogger(__name__)

TICK_MS = 100
FIRST_DIAL_MS = 3_000
RETRY_MS = 2_000
SESSION_BITS = 64
LEAVING_SHARE = 3
# A node that was ordered to drain ends nothing by itself for a day: heads move what runs there, in peace.
ORDER_GRACE_MS = 86_400_000


class Fleet:
    """All nodes of one head and all generations on them."""

    def __init__(self, options: FleetOptions, clock: Clock, drawn: random.Random | None = None):
        self._options = options
        self._clock = clock
        self._drawn = drawn or random.SystemRandom()
        limits = (options.fleet_limits, options.link_limits)
        self._context = context = NodeContext(
            options.keys, options.head, clock, limits[1], limits[0], self._drawn, options.conns
        )
        self.directory = Directory(allow_mixed=options.allow_mixed, texts=options.texts)
        self._nodes = {address.key: FleetNode(address, context, self) for address in options.nodes}
        salt = b"" if options.keys is None else options.keys.prefix_salt
        policy, fleet_limits = options.policy, options.fleet_limits
        self._desk = Desk(self._nodes, policy, fleet_limits, self._drawn, Warmth(salt))
        # Without a fleet key the quarantine's hashes are keyed by chance: they only live in this process.
        secret = salt or self._drawn.randbytes(32)
        quarantine = QuarantineTable(secret, options.fleet_limits)
        self._runner = Runner(self._nodes, self._desk, quarantine, clock, limits)
        self._runner.knows = self.directory.knows
        self._runner.chronicle.observer = options.observer
        self._runner.relief.new_session = self._new_session
        self._members = Members(
            self._nodes,
            lambda address: FleetNode(address, context, self),
            self._desk,
            self._runner.relief,
            clock,
        )
        self._joins = Joins(options, clock, self._nodes, self._adopt) if options.listen else None
        self._pinner = Pinner()
        self._ordered: set[str] = set()
        self._changed = asyncio.Event()
        self._is_closing = False

    # --- running ---

    async def run(self) -> None:
        """Keep every node linked until cancelled. Everything that runs then ends with an error."""
        try:
            async with asyncio.TaskGroup() as group:
                self._members.start(group)
                if self._joins is not None:
                    group.create_task(self._joins.serve())
                try:
                    while True:
                        await asyncio.sleep(TICK_MS / 1_000)
                        self._tick(self._clock.now_ns())
                finally:
                    self._is_closing = True
        finally:
            for generation in list(self._runner.generations.values()):
                generation.break_off(
                    CapacityError(
                        "the head stops", code=ErrorCode.DRAINING, retry_after_ms=RETRY_MS
                    )
                )

    async def listen(self) -> list[tuple[str, int]]:
        """Bind where nodes may dial in, before `run`; returns what was bound. Raises SuperfluidError."""
        return [] if self._joins is None else await self._joins.start()

    def _tick(self, now_ns: int) -> None:
        self._runner.tick()
        self._members.tick(now_ns)
        for node in [] if self._joins is None else self._joins.forgotten(now_ns):
            self._members.forget(node)
            self._tell("node-forgotten", node)

    def _adopt(self, address: NodeAddress) -> FleetNode:
        node = FleetNode(address, self._context, self, is_joined=True)
        self._members.adopt(node)
        return node

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait until a node is up, and for a moment until each was tried; then say what is served.

        Returns whether the fleet can serve. Reports every node that could not be reached so far.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self.health().is_ready:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        await tried(self._nodes.values(), min(timeout_s, FIRST_DIAL_MS / 1_000))
        say_windows(self.directory.models())
        return True

    def relocate(self, key: str, host: str, port: int) -> None:
        """Say where the node named `key` listens now (a local node after a start)."""
        self._nodes[key].relocate(host, port)

    # --- generations ---

    def generate(self, request: GenerationRequest) -> Generation:
        """Make a generation; it starts when its context is entered.

        Raises InvalidRequestError, GenerationError or CapacityError for what cannot even start.
        """
        self._judge(request)
        machine = GenerationMachine(request, self._options.fleet_limits)
        return Generation(self._runner, self._new_session(), request, machine)

    def _new_session(self) -> int:
        session, runner = 0, self._runner
        while session == 0 or session in runner.generations or session in runner.relief:
            session = self._drawn.getrandbits(SESSION_BITS)
        return session

    def _judge(self, request: GenerationRequest) -> None:
        if self._is_closing:
            raise CapacityError("the head stops", code=ErrorCode.DRAINING, retry_after_ms=RETRY_MS)
        model = self.directory.model(request.model)
        if model is None:
            if not self.directory.models():
                text = "no node has been reached yet"
                raise CapacityError(text, code=ErrorCode.NO_WORKER, retry_after_ms=RETRY_MS)
            raise InvalidRequestError(
                f"the model '{request.model[:200]}' does not exist",
                param="model",
                code=ErrorCode.MODEL_NOT_FOUND,
            )
        asked = len(request.prompt) + request.max_output
        if asked > model.window:
            raise InvalidRequestError(
                f"the prompt has {len(request.prompt)} tokens and asks for up to "
                f"{request.max_output}; the context window is {model.window} tokens",
                code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            )
        if self._runner.quarantine.holds(request, self._clock.now_ns()):
            raise GenerationError(
                "a request like this was running each time that a node's process died",
                code=ErrorCode.REQUEST_QUARANTINED,
                retryable=False,
            )

    # --- what people and programs are told ---

    def models(self) -> list[ServedModel]:
        return self.directory.models()

    def health(self) -> FleetHealth:
        """Say how the fleet stands, for /health and /readyz."""
        now_ns = self._clock.now_ns()
        nodes = [state_of(node, now_ns) for node in self._nodes.values()]
        is_ready = not self._is_closing and any(
            node.is_up and not node.is_draining and node.models for node in nodes
        )
        return FleetHealth(
            is_ready,
            nodes,
            waiting=len(self._runner.room),
            running=len(self._runner.generations),
            is_insecure=self._options.keys is None,
        )

    @property
    def counters(self) -> Counters:
        found = self._runner.counters
        found.join_refusals = 0 if self._joins is None else self._joins.refusals
        return found

    def waiting_by_class(self) -> tuple[int, ...]:
        return self._runner.room.by_class()

    def counts(self) -> dict[str, dict[str, int]]:
        """Count what happened to links and placements, for metrics."""
        return self.counters.shown()

    def snapshot(self) -> dict[str, Any]:
        """Everything about the fleet as plain values, for GET /v1/fleet."""
        health = self.health()
        return {
            "ready": health.is_ready,
            "policy": self._options.policy.value,
            "nodes": [asdict(node) for node in health.nodes],
            "models": [asdict(model) for model in self.models()],
            "waiting": self.waiting_by_class(),
            "running": health.running,
            "counters": asdict(self.counters),
        }

    def why(self, request_id: str) -> list[PlacementRecord]:
        """Return the placements of a recent request with the scores that were compared."""
        return self._runner.chronicle.why(request_id)

    def events(self, *, since: int | None = None) -> AbstractContextManager[Listener]:
        """Hear what happens in the fleet, for GET /v1/fleet/events. Raises CapacityError when too many listen."""
        return self._runner.chronicle.listen(since=since)

    # --- asking nodes ---

    async def fetch_file(self, model: str, name: str) -> bytes | None:
        """Fetch one of the model's small text files from a node that serves it."""
        for node in self._nodes.values():
            if node.is_linked and model in node.view.offers:
                return await node.asks.file(node, model, name)
        text = "no node that serves this model is up"
        raise CapacityError(text, code=ErrorCode.NO_WORKER, retry_after_ms=RETRY_MS)

    async def node_stats(self, name: str) -> bytes:
        """Fetch a node's metrics and scheduler stats, as JSON."""
        node = self._named(name)
        return await node.asks.stats(node)

    async def node_sessions(self, name: str) -> Sequence[SessionRow]:
        """Fetch what runs and waits on a node."""
        node = self._named(name)
        return await node.asks.sessions(node)

    async def embed(self, wanted: EmbedRequest) -> bytes:
        """Make the vector of a text, little-endian float32. Raises SuperfluidError."""
        return await embed(self._nodes.values(), wanted)

    async def pin_prefix(self, pin: PrefixPin) -> PinnedPrefix:
        """Have a node keep a prefix that is in its cache. Raises SuperfluidError."""
        node = self._named(pin.node)
        standing = node.standing
        if standing is None or pin.model not in standing.offers:
            raise GenerationError("the node is not linked", code=ErrorCode.NODE_LOST)
        keys, welcome = self._options.keys, standing.welcome
        salt = welcome.salt or (b"" if keys is None else keys.prefix_salt)
        naming = Naming.of(standing.offers[pin.model], welcome.features, salt)
        return await self._pinner.pin(node, naming, pin)

    def unpin_prefix(self, pinned: PinnedPrefix) -> None:
        """Let go of it, if its node still goes by that name."""
        try:
            unpin(self._named(pinned.node), pinned)
        except InvalidRequestError:
            return

    # --- changing the fleet ---

    def drain(self, name: str, grace_ms: int | None = None) -> None:
        """Give a node no new sessions; what still runs there after the grace moves in peace.

        The node is told, so that other heads see it draining; a node that is not linked hears it when it is. Undone by `undrain`
        of any head, and by the node itself when it comes back as another process.
        """
        node = self._named(name)
        grace = self._options.fleet_limits.drain_grace_ms if grace_ms is None else grace_ms
        node.set_drained(is_drained=True)
        self._runner.relief.begin(node, grace)
        self._ordered.add(node.key)
        node.send(DrainOrder(ORDER_GRACE_MS))
        self._tell("drain", node, grace_ms=grace)

    def undrain(self, name: str) -> None:
        """Use a drained node again, whichever head drained it. What has moved away stays where it is."""
        node = self._named(name)
        self._runner.relief.end(node)
        node.set_drained(is_drained=False)
        self._ordered.discard(node.key)
        node.send(DrainOrder(None))
        self._tell("undrain", node)
        self._runner.pump_soon()

    def reload(self, nodes: Sequence[NodeAddress]) -> Reloaded:
        """Take a new list of nodes: some join, some leave in peace, some are elsewhere now."""
        changes = self._members.reload(nodes, self._options.fleet_limits.drain_grace_ms)
        fields = {name: ", ".join(keys) for name, keys in asdict(changes).items()}
        self._runner.chronicle.tell("reloaded", **fields)
        log(logger, "info", "the list of nodes was read again", **fields)
        return changes

    def _tell(self, kind: str, node: FleetNode, **fields: str | int) -> None:
        self._runner.chronicle.tell(kind, node=node.title, **fields)
        log(logger, "info", f"fleet node: {kind}", node=node.title, **fields)

    def _named(self, name: str) -> FleetNode:
        for node in self._nodes.values():
            if name in (node.title, node.identity, node.key):
                return node
        raise InvalidRequestError(f"no node is called '{name[:200]}'", param="node")

    # --- hooks of the nodes ---

    def admit(self, node: FleetNode, welcome: Welcome) -> Admission:
        admission = self.directory.admit(node.key, node.title, welcome)
        if admission.offers:
            self._desk.warmth.attach(node.key, welcome, admission.offers)
        return admission

    def node_up(self, node: FleetNode) -> None:
        standing = node.standing
        assert standing is not None, "up without a link"
        for offer in standing.offers.values():
            log(
                logger,
                "info",
                f"fleet node '{node.title}' at {node.address}: {offer.name}, "
                f"context window {offer.window} tokens, {offer.lanes} lanes",
            )
        if not node.is_drained:
            self._runner.relief.end(node)
            self._ordered.discard(node.key)
        elif node.key in self._ordered:
            node.send(DrainOrder(ORDER_GRACE_MS))
        node.circuit.warm_up(self._clock.now_ns())
        self._desk.unsettle(node)
        models = ", ".join(standing.offers)
        chronicle = self._runner.chronicle
        chronicle.tell("node-up", node=node.title, address=str(node.address), models=models)
        self._changed.set()
        self._runner.pump_soon()

    def node_down(self, node: FleetNode, loss: Loss) -> None:
        if loss is not Loss.HUNG:
            self.directory.leave(node.key)
            self._desk.warmth.detach(node.key)
        self._runner.chronicle.tell("node-down", node=node.title, reason=loss.value)
        if not self._is_closing:
            self._runner.node_lost(node, loss)
        self._changed.set()

    def boot_judged(self, boot: str, *, is_lost: bool) -> None:
        self._runner.boot_judged(boot, is_lost=is_lost)

    def link_added(self, node: FleetNode, standing: Standing) -> None:
        """Count and log a link; reports of cached blocks begin anew on a further one that carries them."""
        counters = self.counters
        counters.joins += node.is_joined
        if len(node.links) < 2:
            return
        if standing.is_warm:
            self._desk.warmth.attach(node.key, standing.welcome, standing.offers)
        replaced = sum(each.retired_ns is not None for each in node.links)
        counters.rekeys += bool(replaced)
        self._tell("link", node, links=len(node.links), replaced=replaced)

    def link_lost(self, node: FleetNode, link: int, loss: Loss) -> None:
        self._tell("link-lost", node, reason=loss.value)
        self._runner.link_lost(node, link, loss)

    def relink(self, slot: Slot, fresh: int) -> None:
        self._runner.relink(slot, fresh)

    def heard(self, node: FleetNode, link: int, message: SessionMessage) -> None:  # noqa: ARG002
        self._runner.heard(link, message)

    def refused(self) -> None:
        self.counters.link_refusals += 1

    def loaded(self, node: FleetNode) -> None:
        if node.view.is_up:
            self._runner.pump_soon()

    def stalled(self, slot: Slot) -> None:
        self._runner.stalled(slot)

    def prefixed(self, node: FleetNode, report: Prefix) -> None:
        self._desk.warmth.take(node.key, report)

    def leaving(self, node: FleetNode) -> None:
        """Empty a node that drains by its own will: it does not say how long it waits, so not too late."""
        self._tell("node-leaving", node)
        grace_ms = self._options.fleet_limits.drain_grace_ms // LEAVING_SHARE
        self._runner.relief.begin(node, grace_ms)

    def returned(self, node: FleetNode) -> None:
        """Let what runs on a node that drained by another's will go on there."""
        self._tell("node-returned", node)
        if not node.is_drained:
            self._runner.relief.end(node)
            self._runner.pump_soon()
