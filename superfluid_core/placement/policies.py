"""Which node takes a request: one pure function over a view, by a policy chosen from a table.

Nodes that cannot take it fall away first, each with its reason. The rest get a score, lower is better; scores that are
equal to a millionth are a tie and a drawn value decides, so that equal nodes share alike. What was compared is kept in
the answer: it is what `superfluid fleet why` prints. A refusal says whether waiting can help.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from superfluid_core.placement.estimate import FleetRates, estimate
from superfluid_core.placement.view import (
    Fit,
    FleetView,
    NodeView,
    PlacementLimits,
    PlacementRequest,
    fit,
    fits_window,
)

TIE = 1e-6


class Policy(StrEnum):
    """How capable nodes are ranked."""

    LOAD_AWARE = "load-aware"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"


class RefusalKind(StrEnum):
    """Why nothing was chosen: the first two are final, the others may change by waiting."""

    UNKNOWN_MODEL = "unknown model"
    TOO_LONG = "too long"
    NO_NODE = "no node"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Score:
    """One node's part of a comparison: a score, or the reason why it had none."""

    node: str
    fit: str
    score: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """The node that takes the request. `max_output` is lower than asked when only a smaller window was left."""

    node: str
    max_output: int
    policy: Policy
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """No node now. `scores` holds each node's reason; `window` is the largest that was considered."""

    kind: RefusalKind
    scores: tuple[Score, ...] = ()
    window: int = 0


def choose(
    view: FleetView,
    request: PlacementRequest,
    policy: Policy,
    limits: PlacementLimits,
    *,
    draw: float,
    now_ns: int,
) -> Choice | Refusal:
    """Pick a node for `request`, or say why there is none. Changes nothing; see `reserve.place`."""
    serving = [node for node in view.nodes.values() if request.model in node.offers]
    if not serving:
        return Refusal(RefusalKind.UNKNOWN_MODEL)
    wide = [node for node in serving if fits_window(node.offers[request.model], request)]
    max_output = request.max_output
    if not any(_may_come(node, request) for node in wide):
        narrower = _narrower(serving, request)
        if narrower is not None:
            wide, max_output = narrower
    if not wide:
        window = max(node.offers[request.model].window for node in serving)
        return Refusal(RefusalKind.TOO_LONG, _reasons(serving, Fit.WINDOW), window)
    judged = [(node, fit(node, request, limits, now_ns)) for node in wide]
    able = [node for node, verdict in judged if verdict is Fit.CAPABLE]
    able = [node for node in able if node.name not in request.avoid] or _only_avoided(judged)
    refused = tuple(Score(n.name, f.value) for n, f in judged if f is not Fit.CAPABLE)
    if not able:
        passing = any(verdict.is_passing for _, verdict in judged)
        return Refusal(RefusalKind.FULL if passing else RefusalKind.NO_NODE, refused)
    scores = RANK[policy](view, _below_mark(able, request, limits), request)
    best = _draw(scores, draw)
    return Choice(best.node, max_output, policy, (*scores, *refused))


def _only_avoided(judged: list[tuple[NodeView, Fit]]) -> list[NodeView]:
    """Use the node that failed again only when no other could take it, now or after a wait."""
    if any(verdict.is_passing for _, verdict in judged):
        return []
    return [node for node, verdict in judged if verdict is Fit.CAPABLE]


def _may_come(node: NodeView, request: PlacementRequest) -> bool:
    """Say whether to hope for this node: a moved session does not wait for one that is down."""
    return not request.is_move or (node.is_up and not node.is_draining)


def _narrower(
    serving: list[NodeView], request: PlacementRequest
) -> tuple[list[NodeView], int] | None:
    """For a move that fits nowhere whole: the widest windows that are up, and the output that fits them.

    An empty list says that nodes are up and none can hold another token; None that none is up.
    """
    up = [node for node in serving if node.is_up and not node.is_draining]
    up = [n for n in up if request.weights in (None, n.offers[request.model].weights)]
    if not request.is_move or not up:
        return None
    window = max(node.offers[request.model].window for node in up)
    if window <= request.context:
        return [], request.max_output
    widest = [node for node in up if node.offers[request.model].window == window]
    return widest, min(request.max_output, window - request.prompt)


def _reasons(nodes: list[NodeView], verdict: Fit) -> tuple[Score, ...]:
    return tuple(Score(node.name, verdict.value) for node in nodes)


def _below_mark(
    able: list[NodeView], request: PlacementRequest, limits: PlacementLimits
) -> list[NodeView]:
    """Leave out nodes whose pool is nearly full, while another's is not."""
    below = [n for n in able if n.pool_pct(n.offers[request.model]) < limits.pool_high_pct]
    return below or able


def _load_aware(view: FleetView, able: list[NodeView], request: PlacementRequest) -> list[Score]:
    rates = FleetRates.of(view.nodes.values())
    scores = []
    for node in able:
        parts = estimate(node, node.offers[request.model], request, rates)
        detail = (
            f"prefill {parts.prefill:.3f} s, lane wait {parts.lane_wait:.3f} s, "
            f"slowdown {parts.slowdown:.3f} s"
        )
        scores.append(Score(node.name, Fit.CAPABLE.value, parts.seconds, detail))
    return scores


def _least_loaded(
    _view: FleetView, able: list[NodeView], _request: PlacementRequest
) -> list[Score]:
    return [Score(node.name, Fit.CAPABLE.value, float(node.in_progress)) for node in able]


def _round_robin(view: FleetView, able: list[NodeView], _request: PlacementRequest) -> list[Score]:
    """Distance from the node whose turn it is, over all nodes: a node that is left out passes its turn on."""
    order = {name: place for place, name in enumerate(view.nodes)}
    turn = view.turn % len(order)
    return [
        Score(node.name, Fit.CAPABLE.value, float((order[node.name] - turn) % len(order)))
        for node in able
    ]


Rank = Callable[[FleetView, list[NodeView], PlacementRequest], list[Score]]

RANK: dict[Policy, Rank] = {
    Policy.LOAD_AWARE: _load_aware,
    Policy.LEAST_LOADED: _least_loaded,
    Policy.ROUND_ROBIN: _round_robin,
}


def _draw(scores: list[Score], draw: float) -> Score:
    """Take the best score; among ties the one that the draw falls on."""
    least = min(score.score for score in scores if score.score is not None)
    ties = [s for s in scores if s.score is not None and s.score <= least + TIE * max(1.0, least)]
    return ties[min(len(ties) - 1, int(draw * len(ties)))]
