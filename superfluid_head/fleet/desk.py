"""Where a generation meets a node: builds the placement request, asks `placement`, keeps what was compared.

Owns the view, the learned output lengths, the circuits' say and the record behind `superfluid fleet why`. Choice and
reservation are one synchronous step. Ties are broken by a low-discrepancy sequence from a random start: as unpredictable
between heads as a coin, but over any run of ties each of the equal nodes gets its share.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass

from superfluid_core.limits import FleetLimits
from superfluid_core.placement.estimate import OutputLengths
from superfluid_core.placement.policies import Choice, Policy, Refusal
from superfluid_core.placement.reserve import Placed, place
from superfluid_core.placement.view import FleetView, PlacementLimits, PlacementRequest
from superfluid_head.fleet.node import FleetNode
from superfluid_head.fleet.stream import Generation
from superfluid_head.fleet.transitions import Place

GOLDEN = 0.6180339887498949
REQUESTS_KEPT_MAX = 1_024
RECORDS_KEPT_MAX = 32


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """One placement of one choice, as `why` shows it."""

    choice: int
    epoch: int
    node: str
    reason: str
    policy: str
    waited_ms: int
    scores: tuple[str, ...]


class Desk:
    """Chooses for the runner. `nodes` is the fleet's own table, shared."""

    def __init__(
        self,
        nodes: dict[str, FleetNode],
        policy: Policy,
        limits: FleetLimits,
        drawn: random.Random,
    ) -> None:
        self.lengths = OutputLengths()
        self._nodes = nodes
        self._policy = policy
        self._limits = PlacementLimits(
            limits.sessions_over_lanes, limits.reprefills_per_node, limits.pool_high_pct
        )
        self._view = FleetView({key: node.view for key, node in nodes.items()})
        self._draw = drawn.random()
        self._records: OrderedDict[str, list[PlacementRecord]] = OrderedDict()

    def add(self, node: FleetNode) -> None:
        self._view.nodes[node.key] = node.view

    def place(self, generation: Generation, wanted: Place, now_ns: int) -> Placed | Refusal:
        """Choose a node for `generation` and reserve it, or say why not."""
        self._hear_circuits(generation.request.model, now_ns)
        self._draw = (self._draw + GOLDEN) % 1.0
        request = self._request(generation, wanted)
        verdict = place(
            self._view, request, self._policy, self._limits, draw=self._draw, now_ns=now_ns
        )
        if isinstance(verdict, Placed):
            self._nodes[verdict.choice.node].circuit.probe()
        return verdict

    def record(
        self, generation: Generation, wanted: Place, choice: Choice, waited_ms: int
    ) -> PlacementRecord:
        """Keep what was compared, for `why` and for the log."""
        scores = tuple(
            f"{self._nodes[score.node].title}: "
            + (score.fit if score.score is None else f"{score.score:.4f} {score.detail}".rstrip())
            for score in choice.scores
        )
        kept = PlacementRecord(
            choice=generation.request.choice,
            epoch=generation.machine.journal.epoch,
            node=self._nodes[choice.node].title,
            reason=wanted.reason,
            policy=choice.policy.value,
            waited_ms=waited_ms,
            scores=scores,
        )
        records = self._records.setdefault(generation.request.request_id, [])
        records.append(kept)
        del records[:-RECORDS_KEPT_MAX]
        while len(self._records) > REQUESTS_KEPT_MAX:
            self._records.popitem(last=False)
        return kept

    def why(self, request_id: str) -> list[PlacementRecord]:
        return list(self._records.get(request_id, ()))

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
        )

    def _hear_circuits(self, model: str, now_ns: int) -> None:
        """Bring the circuits' word into the view; if all that are up rest, all are used."""
        standing = []
        for node in self._nodes.values():
            view = node.view
            view.is_ready = node.circuit.lets_through(now_ns)
            view.allowance = node.circuit.allowance(now_ns)
            if view.is_up and not view.is_draining and model in view.offers:
                standing.append(view)
        if not any(view.is_ready for view in standing):
            for view in standing:
                view.is_ready, view.allowance = True, 1.0
