"""Where a generation meets a node: builds the placement request and asks `placement`.

Owns the view, the learned output lengths, the word of the circuits and what nodes have cached. Choice and reservation are one
synchronous step. Ties are broken by a low-discrepancy sequence from a random start: as unpredictable between heads as a
coin, but over any run of ties each of the equal nodes gets its share. Nothing here looks at every node per request: the
view keeps its own ranking, and of circuits only those that are not at rest are asked.
"""

from __future__ import annotations

import random
from dataclasses import replace

from superfluid_core.clock import SECOND
from superfluid_core.limits import FleetLimits
from superfluid_core.placement.estimate import OutputLengths, step_seconds, usable
from superfluid_core.placement.policies import Policy, Refusal
from superfluid_core.placement.reserve import Placed, place
from superfluid_core.placement.view import FleetView, NodeView, PlacementLimits, PlacementRequest
from superfluid_core.session import FinishReason, QosClass
from superfluid_head.fleet.events import GenerationRequest
from superfluid_head.fleet.node import FleetNode
from superfluid_head.fleet.stream import Generation
from superfluid_head.fleet.transitions import Place
from superfluid_head.fleet.warmth import Warmth

GOLDEN = 0.6180339887498949


class Desk:
    """Chooses for the runner. `nodes` is the fleet's own table, shared."""

    def __init__(
        self,
        nodes: dict[str, FleetNode],
        policy: Policy,
        limits: FleetLimits,
        drawn: random.Random,
        warmth: Warmth,
    ) -> None:
        self.lengths = OutputLengths()
        self.warmth = warmth
        self._nodes = nodes
        self._policy = policy
        self._limits = PlacementLimits(
            limits.sessions_over_lanes, limits.reprefills_per_node, limits.pool_high_pct
        )
        self._view = FleetView({key: node.view for key, node in nodes.items()})
        self._restless: dict[str, None] = {}
        self._draw = drawn.random()

    def add(self, node: FleetNode) -> None:
        """Take in a node that was added while running."""
        self._view.add(node.view)

    def remove(self, node: FleetNode) -> None:
        self._view.remove(node.key)
        self._restless.pop(node.key, None)

    def unsettle(self, node: FleetNode) -> None:
        """Ask this node's circuit from now on, until it is at rest again."""
        self._restless[node.key] = None

    def place(self, generation: Generation, wanted: Place, now_ns: int) -> Placed | Refusal:
        """Choose a node for `generation` and reserve it, or say why not."""
        self._hear_circuits(generation.request.model, now_ns)
        self._draw = (self._draw + GOLDEN) % 1.0
        request = self._request(generation, wanted)
        verdict = self._place(request, wanted.target, now_ns)
        if isinstance(verdict, Placed):
            node = self._nodes[verdict.choice.node]
            node.circuit.probe()
            engine = node.view.offers[request.model].engine
            names = generation.names
            verdict.reservation.follow(self.warmth.promise(node.key, engine, names))
        return verdict

    def kind(self, generation: Generation, wanted: Place) -> tuple[object, ...]:
        """Say what a refusal for want of room depends on: what was refused to one is refused to all of its kind, at that moment.

        Beside the tenant: only `Fit.TENANT` looks at that.
        """
        request, ranking = generation.request, self._view.ranking
        model = None if ranking is None else ranking.models.get(request.model)
        asked = len(request.prompt) + request.max_output
        wide = 0 if model is None else sum(asked <= lot.window for lot in model.lots.values())
        return (
            request.model,
            generation.machine.journal.weights,
            wanted.is_move,
            wanted.avoid,
            generation.qos is QosClass.INTERACTIVE,
            wide,
        )

    def _place(
        self, request: PlacementRequest, target: str | None, now_ns: int
    ) -> Placed | Refusal:
        """Take `target` if it still can, else whoever is best."""
        if target in self._nodes:
            others = frozenset(key for key in self._nodes if key != target)
            only = replace(request, avoid=others)
            verdict = place(
                self._view, only, self._policy, self._limits, draw=self._draw, now_ns=now_ns
            )
            if isinstance(verdict, Placed):
                return verdict
        return place(
            self._view, request, self._policy, self._limits, draw=self._draw, now_ns=now_ns
        )

    def is_any_left(self, generation: Generation, wanted: Place) -> bool:
        """Say whether a node that is up and not to be avoided could serve this at all."""
        request, weights = generation.request, generation.machine.journal.weights
        for key, node in self._view.nodes.items():
            offer = node.offers.get(request.model)
            if offer is None or key in wanted.avoid or not node.is_up or node.is_draining:
                continue
            is_wide = len(request.prompt) + request.max_output <= offer.window
            if is_wide and weights in (None, offer.weights):
                return True
        return False

    def expected(self, request: GenerationRequest) -> int:
        """Guess how many tokens will be produced."""
        return self.lengths.expect(request.model, request.tenant, request.max_output)

    def learn(self, generation: Generation, reason: FinishReason) -> None:
        """Remember how many tokens an output that ended by itself had."""
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            request, count = generation.request, len(generation.machine.journal.ids)
            self.lengths.learn(request.model, request.tenant, count)

    def pace_ns(self, request: GenerationRequest) -> int:
        """Time between two lanes that come free when all are busy, by what nodes have measured; 0 while none has."""
        output = self.expected(request)
        per_second = 0.0
        for node in self._view.nodes.values():
            offer = node.offers.get(request.model)
            if offer is None or not node.is_up:
                continue
            rates, lanes = node.work(offer).load.decode_rates, max(1, offer.lanes)
            if usable(rates):
                per_second += lanes / (output * step_seconds(rates, lanes))
        return round(SECOND / per_second) if per_second else 0

    def is_last_healthy(self, node: FleetNode, now_ns: int) -> bool:
        """Say whether no other node could take over what `node` serves."""
        return not any(
            other is not node
            and other.view.is_up
            and not other.view.is_draining
            and other.circuit.lets_through(now_ns)
            and any(model in other.view.offers for model in node.view.offers)
            for other in self._nodes.values()
        )

    def _request(self, generation: Generation, wanted: Place) -> PlacementRequest:
        request, journal = generation.request, generation.machine.journal
        left = max(1, request.max_output - len(journal.ids))
        expected = self.lengths.expect(request.model, request.tenant, left)
        return PlacementRequest(
            model=request.model,
            prompt=len(request.prompt),
            delivered=len(journal.ids),
            max_output=request.max_output,
            qos=generation.qos,
            expected_output=expected,
            weights=journal.weights,
            avoid=wanted.avoid,
            is_move=wanted.is_move,
            cached=self.warmth.cached(request, journal.ids, generation.names),
            tenant=request.tenant,
        )

    def _hear_circuits(self, model: str, now_ns: int) -> None:
        """Bring the circuits' word into the view. If all that are up rest or warm up, all are used."""
        held_back = False
        for key in list(self._restless):
            node = self._nodes[key]
            node.view.is_ready = node.circuit.lets_through(now_ns)
            node.view.allowance = node.circuit.allowance(now_ns)
            if node.circuit.is_settled:
                del self._restless[key]
            held_back = held_back or not _is_whole(node.view)
        if not held_back:
            return
        standing = (
            view
            for view in self._view.nodes.values()
            if view.is_up and not view.is_draining and model in view.offers
        )
        if any(_is_whole(view) for view in standing):
            return
        views = [self._nodes[key].view for key in self._restless]
        views = [view for view in views if view.is_up and model in view.offers]
        is_any_ready = any(view.is_ready and not view.is_draining for view in views)
        for view in views:
            if not is_any_ready:
                view.is_ready = True
            if view.is_ready:
                view.allowance = 1.0


def _is_whole(view: NodeView) -> bool:
    return view.is_ready and view.allowance >= 1.0
