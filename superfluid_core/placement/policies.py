"""Which node takes a request: one pure function over a view, by a policy chosen from a table.

Nodes that cannot take it fall away first, each with its reason. The rest get a score, lower is better; scores that are
equal to a millionth are a tie, which goes to the node that was chosen longest ago, so that equal nodes share alike; among nodes that
never were a drawn value decides, so that several heads do not all begin with the same one. What was compared is kept in
the answer: it is what `superfluid fleet why` prints. A refusal says whether waiting can help.

New requests are answered from the view's ranking without looking at every node. Moves, and requests that avoid a node or
need certain weights, are few and have rules of their own: for them every node is judged, and so it is for a tenant that has
as much of the best node as it may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from superfluid_core.placement.estimate import (
    HIT_TOKENS_MIN,
    hit_tokens,
    weighed_less,
    weighed_tokens,
)
from superfluid_core.placement.ranking import Card, Lot, ModelCards, Policy, Ranking, ranking_of
from superfluid_core.placement.shelves import Found, Query, Shelf
from superfluid_core.placement.view import (
    Fit,
    FleetView,
    PlacementLimits,
    PlacementRequest,
    Room,
    fit,
    fits_window,
    is_tenant_full,
)
from superfluid_core.session import QosClass

__all__ = [
    "Choice", "Policy", "Refusal", "RefusalKind", "Score", "choose", "choose_among_all",
]  # fmt: skip

# Of a larger fleet the answer keeps the best that were looked at, not every node.
NODES_KEPT_MAX = 64
ROWS_KEPT_MAX = 16
# A moved session does not count on a node's last lane of so many, nor on more of them than sessions may wait there.
LANES_PER_MARGIN = 8


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


@dataclass(slots=True)
class Compared:
    """What a choice was made of, as it was at that moment; made readable only when somebody asks. Nobody changes it."""

    policy: Policy
    request: PlacementRequest
    query: Query
    rows: tuple[tuple[str, Fit, tuple[int, tuple[float, ...], int]], ...] = ()

    def scores(self) -> tuple[Score, ...]:
        return tuple(self._score(*row) for row in self.rows)

    def _score(self, name: str, verdict: Fit, entry: tuple[int, tuple[float, ...], int]) -> Score:
        if verdict is not Fit.CAPABLE:
            return Score(name, verdict.value)
        position, (backlog, per_prompt, waiting, slowing, per_output), in_progress = entry
        match self.policy:
            case Policy.LOAD_AWARE:
                hit, output = hit_tokens(self.request, name), self.query.output
                weighed = weighed_less(self.query.uncached, hit)
                copied = weighed - (self.request.context - hit)
                prefill = backlog + (self.request.context - hit) * per_prompt
                detail = (
                    f"prefill {prefill:.3f} s, lane wait {output * waiting:.3f} s, "
                    f"slowdown {output * slowing:.3f} s"
                )
                if hit:
                    detail += f", {hit} cached"
                if copied:
                    detail += f", {copied} held elsewhere"
                seconds = backlog + weighed * per_prompt + output * per_output
                return Score(name, verdict.value, seconds, detail)
            case Policy.LEAST_LOADED:
                return Score(name, verdict.value, float(in_progress))
            case Policy.ROUND_ROBIN:
                distance = (position - self.query.turn) % self.query.nodes
                return Score(name, verdict.value, float(distance))


@dataclass(slots=True)
class Choice:
    """The node that takes the request. `max_output` is lower than asked when only a smaller window was left. Nobody changes it."""

    node: str
    max_output: int
    policy: Policy
    compared: Compared

    @property
    def scores(self) -> tuple[Score, ...]:
        return self.compared.scores()


@dataclass(frozen=True, slots=True)
class Refusal:
    """No node now. `fits` holds the reasons, `scores` each node's; `window` is the largest that was considered."""

    kind: RefusalKind
    compared: Compared | None = None
    window: int = 0
    fits: frozenset[Fit] = frozenset()

    @property
    def scores(self) -> tuple[Score, ...]:
        return () if self.compared is None else self.compared.scores()


def choose(
    view: FleetView,
    request: PlacementRequest,
    policy: Policy,
    limits: PlacementLimits,
    *,
    draw: float,
    now_ns: int,
) -> Choice | Refusal:
    """Pick a node for `request`, or say why there is none. Places nothing; see `reserve.place`."""
    ranking = ranking_of(view, policy, limits, now_ns)
    model = ranking.models.get(request.model)
    if model is None:
        return Refusal(RefusalKind.UNKNOWN_MODEL)
    query = Query(
        weighed_tokens(request), max(1, request.expected_output), view.turn, len(ranking.order)
    )
    ask = _Ask(view, ranking, model, request, query, draw)
    if request.is_move or request.avoid or request.weights is not None:
        return ask.among_all(now_ns)
    verdict = ask.from_shelves()
    if isinstance(verdict, Choice) and is_tenant_full(view.nodes[verdict.node], request, limits):
        return ask.among_all(now_ns)
    return verdict


def choose_among_all(
    view: FleetView,
    request: PlacementRequest,
    policy: Policy,
    limits: PlacementLimits,
    *,
    draw: float,
    now_ns: int,
) -> Choice | Refusal:
    """Pick as `choose` does, but by judging every node: what the shelves are held against."""
    ranking = ranking_of(view, policy, limits, now_ns)
    model = ranking.models.get(request.model)
    if model is None:
        return Refusal(RefusalKind.UNKNOWN_MODEL)
    query = Query(
        weighed_tokens(request), max(1, request.expected_output), view.turn, len(ranking.order)
    )
    return _Ask(view, ranking, model, request, query, draw).among_all(now_ns)


@dataclass(slots=True)
class _Ask:
    """One request, put to one ranking of the view."""

    view: FleetView
    ranking: Ranking
    model: ModelCards
    request: PlacementRequest
    query: Query
    draw: float

    # --- from the shelves -------------------------------------------------------------------------

    def from_shelves(self) -> Choice | Refusal:
        request = self.request
        asked = request.prompt + request.max_output
        wide = [lot for lot in self.model.lots.values() if asked <= lot.window]
        if not wide:
            return self._too_long()
        shelves = self._shelves(wide)
        if not shelves:
            kind = RefusalKind.NO_NODE
            if any(lot.is_passing for lot in wide):
                kind = RefusalKind.FULL
            fits = frozenset(word for lot in wide for word, count in lot.counts.items() if count)
            return Refusal(kind, self._compared(None), fits=fits)
        found = Found()
        hits = self._offer_hits(shelves, found)
        for shelf in shelves:
            shelf.search(self.query, found)
        name = self._tied(found.ties(hits))
        return Choice(name, request.max_output, self.ranking.policy, self._compared(found))

    def _shelves(self, wide: Sequence[Lot]) -> list[Shelf]:
        """Return those with room for this class; nodes whose pool is nearly full only when no other has room."""
        rooms: tuple[Room, ...] = (Room.OPEN,)
        if self.request.qos is QosClass.INTERACTIVE:
            rooms = (Room.OPEN, Room.INTERACTIVE)
        for is_high in (False, True):
            shelves = [lot.shelves[room, is_high] for lot in wide for room in rooms]
            shelves = [shelf for shelf in shelves if len(shelf)]
            if shelves:
                return shelves
        return []

    def _offer_hits(self, shelves: Sequence[Shelf], found: Found) -> set[int]:
        """Score the nodes that hold a part of the context, each by itself; returns their positions."""
        hits: set[int] = set()
        if self.ranking.policy is not Policy.LOAD_AWARE:
            return hits
        # `Figures.seconds` of `weighed_less`, written out: a long prompt may have parts on every node.
        cards, weighed, output = self.model.cards, self.query.uncached, self.query.output
        context, saved = self.request.context, weighed_less(0, 1)
        limit = found.limit
        for name, tokens in self.request.cached.items():
            card = cards.get(name)
            if tokens < HIT_TOKENS_MIN or card is None or card.shelf not in shelves:
                continue
            position, (backlog, per_prompt, _, _, per_output), _ = card.entry
            uncached = weighed + saved * (tokens if tokens < context else context)
            score = backlog + uncached * per_prompt + output * per_output
            hits.add(position)
            if score <= limit:
                found.offer(score, [position])
                limit = found.limit
        return hits

    # --- among all --------------------------------------------------------------------------------

    def among_all(self, now_ns: int) -> Choice | Refusal:
        request = self.request
        serving = self.model.in_order()
        wide = [card for card in serving if fits_window(card.offer, request)]
        max_output = request.max_output
        if not any(self._may_come(card) for card in wide):
            narrower = self._narrower(serving)
            if narrower is not None:
                wide, max_output = narrower
        if not wide:
            return self._too_long()
        limits = self.ranking.limits
        judged = [(card, fit(card.node, request, limits, now_ns)) for card in wide]
        if request.is_move and not any(
            verdict is Fit.CAPABLE and self._has_lanes_left(card) for card, verdict in judged
        ):
            judged = [(card, self._unspared(card, verdict, now_ns)) for card, verdict in judged]
        able = [card for card, verdict in judged if verdict is Fit.CAPABLE]
        able = [c for c in able if c.node.name not in request.avoid] or _only_avoided(judged)
        if not able:
            passing = any(verdict.is_passing for _, verdict in judged)
            kind = RefusalKind.FULL if passing else RefusalKind.NO_NODE
            fits = frozenset(verdict for _, verdict in judged)
            return Refusal(kind, self._compared_all(judged), fits=fits)
        able = [card for card in able if not card.is_high] or able
        if request.is_move:
            free = [card for card in able if _has_free_lane(card)]
            if not free and self._is_soon_free(judged):
                judged = [_passed_over(card, verdict) for card, verdict in judged]
                fits = frozenset(verdict for _, verdict in judged)
                return Refusal(RefusalKind.FULL, self._compared_all(judged), fits=fits)
            if free:
                able = [card for card in free if self._has_lanes_left(card)] or free
                judged = [_passed_over(card, verdict) for card, verdict in judged]
        found = Found()
        rank = RANK[self.ranking.policy]
        for card in able:
            found.offer(rank(card, request, self.query), [card.entry.position])
        name = self._tied(found.ties(set()))
        return Choice(name, max_output, self.ranking.policy, self._compared_all(judged))

    def _has_lanes_left(self, card: Card) -> bool:
        """Say whether a lane will still be free when a moved session gets there: the last ones are given to newcomers meanwhile."""
        offer = card.offer
        margin = min(self.ranking.limits.sessions_over_lanes, offer.lanes // LANES_PER_MARGIN)
        is_free = card.entry.in_progress + margin < offer.lanes
        return is_free and card.node.name not in self.request.avoid

    def _unspared(self, card: Card, verdict: Fit, now_ns: int) -> Fit:
        """Judge a node with a free lane as if it were warm: who is in mid-sentence waits nowhere because it is given less."""
        if verdict is not Fit.FULL or not _has_free_lane(card):
            return verdict
        return fit(card.node, self.request, self.ranking.limits, now_ns, is_spared=False)

    def _is_soon_free(self, judged: Sequence[tuple[Card, Fit]]) -> bool:
        """Say whether a node with a free lane only reads other moved contexts first: that takes less time than a lane's end."""
        return any(
            verdict is Fit.REPREFILLS
            and _has_free_lane(card)
            and not card.is_high
            and card.node.name not in self.request.avoid
            for card, verdict in judged
        )

    def _may_come(self, card: Card) -> bool:
        """Say whether to hope for this node: a moved session does not wait for one that is down."""
        return not self.request.is_move or (card.node.is_up and not card.node.is_draining)

    def _narrower(self, serving: Sequence[Card]) -> tuple[list[Card], int] | None:
        """For a move that fits nowhere whole: the widest windows that are up, and the output that fits them.

        An empty list says that nodes are up and none can hold another token; None that none is up.
        """
        request = self.request
        up = [card for card in serving if card.node.is_up and not card.node.is_draining]
        up = [card for card in up if request.weights in (None, card.offer.weights)]
        if not request.is_move or not up:
            return None
        window = max(card.offer.window for card in up)
        if window <= request.context:
            return [], request.max_output
        widest = [card for card in up if card.offer.window == window]
        return widest, min(request.max_output, window - request.prompt)

    def _tied(self, ties: Sequence[int]) -> str:
        """Among equals take the one that was chosen longest ago, or the one that the draw falls on if several never were."""
        chosen = self.view.chosen
        first = min(ties, key=chosen.__getitem__)
        if not chosen[first]:
            new = [position for position in ties if not chosen[position]]
            first = new[min(len(new) - 1, int(self.draw * len(new)))]
        return self.ranking.order[first]

    # --- what was compared ------------------------------------------------------------------------

    def _too_long(self) -> Refusal:
        window = max(window for window, _ in self.model.lots)
        judged = [(card, Fit.WINDOW) for card in self.model.in_order()]
        compared = self._compared_all(judged)
        return Refusal(RefusalKind.TOO_LONG, compared, window, frozenset((Fit.WINDOW,)))

    def _compared(self, found: Found | None) -> Compared:
        """Keep every node of a small fleet, and of a large one those that came closest."""
        cards = self.model.cards
        if len(cards) <= NODES_KEPT_MAX:
            able = Fit.CAPABLE
            rows = tuple(
                [
                    (name, able if card.shelf is not None else card.fit, card.entry)
                    for name, card in cards.items()
                ]
            )
            return Compared(self.ranking.policy, self.request, self.query, rows)
        rows = ()
        if found is not None:
            names = [self.ranking.order[positions[0]] for _, positions in found.rows]
            best = dict.fromkeys(reversed(names[-ROWS_KEPT_MAX:]))
            rows = tuple((name, Fit.CAPABLE, cards[name].entry) for name in best)
        return Compared(self.ranking.policy, self.request, self.query, rows)

    def _compared_all(self, judged: Sequence[tuple[Card, Fit]]) -> Compared:
        rows = tuple(
            (card.node.name, verdict, card.entry) for card, verdict in judged[:NODES_KEPT_MAX]
        )
        return Compared(self.ranking.policy, self.request, self.query, rows)


def _has_free_lane(card: Card) -> bool:
    """Say whether a session would run there at once: somebody is in the middle of reading what a moved one says."""
    return card.entry.in_progress < card.offer.lanes


def _passed_over(card: Card, verdict: Fit) -> tuple[Card, Fit]:
    """Say of a node that could have taken a moved session why another one was better."""
    is_full = verdict is Fit.CAPABLE and not _has_free_lane(card)
    return card, Fit.FULL if is_full else verdict


def _only_avoided(judged: Sequence[tuple[Card, Fit]]) -> list[Card]:
    """Use the node that failed again only when no other could take it, now or after a wait."""
    if any(verdict.is_passing for _, verdict in judged):
        return []
    return [card for card, verdict in judged if verdict is Fit.CAPABLE]


def _seconds(card: Card, request: PlacementRequest, query: Query) -> float:
    hit = hit_tokens(request, card.node.name)
    return card.figures.seconds(weighed_less(query.uncached, hit), query.output)


def _sessions(card: Card, _request: PlacementRequest, _query: Query) -> float:
    return float(card.entry.in_progress)


def _distance(card: Card, _request: PlacementRequest, query: Query) -> float:
    """From the node whose turn it is, over all nodes: a node that is left out passes its turn on."""
    return float((card.entry.position - query.turn) % query.nodes)


RANK: dict[Policy, Callable[[Card, PlacementRequest, Query], float]] = {
    Policy.LOAD_AWARE: _seconds,
    Policy.LEAST_LOADED: _sessions,
    Policy.ROUND_ROBIN: _distance,
}
