"""What has been computed of a fleet's nodes so far, kept true by looking again only at those that changed.

A card is one node's offer of one model: its figures, whether it can take an ordinary request, and how full its pool is.
Cards of one model with equal window and weights form a lot; those that can take something lie on the lot's shelves,
by the room that they have and by whether their pool is nearly full. `policies.py` asks the shelves, never all nodes.

Engines that have measured nothing are judged by the mean of those of the same model that have, and rates near the typical ones as
those. Both are taken anew when an eighth of them has reported other rates, and all cards only when the typical rates have moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from superfluid_core.placement.estimate import (
    Curve,
    Figures,
    FleetRates,
    figures,
)
from superfluid_core.placement.shelves import Entry, SecondsShelf, SessionsShelf, Shelf, TurnShelf
from superfluid_core.placement.view import (
    Fit,
    FleetView,
    NodeView,
    Offer,
    PlacementLimits,
    Room,
    room_of,
    standing_of,
)

RATES_STALE_SHARE = 8
# Less than this is no news to the other nodes.
TYPICAL_MOVES = 0.1


class Policy(StrEnum):
    """How capable nodes are ranked."""

    LOAD_AWARE = "load-aware"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"


SHELF: dict[Policy, type[SecondsShelf] | type[SessionsShelf] | type[TurnShelf]] = {
    Policy.LOAD_AWARE: SecondsShelf,
    Policy.LEAST_LOADED: SessionsShelf,
    Policy.ROUND_ROBIN: TurnShelf,
}


@dataclass(slots=True, eq=False)
class Card:
    """One node's offer of one model. `fit` is the verdict on an ordinary request; `shelf` holds `entry`, if any does."""

    node: NodeView
    model: str
    offer: Offer
    entry: Entry
    fit: Fit
    lot: Lot
    curve: Curve
    prefill_rate: float = 0.0
    is_high: bool = False
    shelf: Shelf | None = None

    @property
    def figures(self) -> Figures:
        return self.entry.figures

    @property
    def is_measured(self) -> bool:
        return self.prefill_rate > 0.0 and self.curve.is_known


class Lot:
    """Cards with equal window and weights."""

    __slots__ = ("counts", "shelves", "weights", "window")

    def __init__(self, offer: Offer, policy: Policy) -> None:
        self.window = offer.window
        self.weights = offer.weights
        self.counts = dict.fromkeys(Fit, 0)
        make = SHELF[policy]
        self.shelves: dict[tuple[Room, bool], Shelf] = {
            (room, is_high): make()
            for room in (Room.OPEN, Room.INTERACTIVE)
            for is_high in (False, True)
        }

    @property
    def is_passing(self) -> bool:
        return any(count and fit.is_passing for fit, count in self.counts.items())


@dataclass(slots=True)
class ModelCards:
    """All cards of one model, by node, and the mean of their rates; `news` counts those that it does not know yet."""

    cards: dict[str, Card] = field(default_factory=dict)
    lots: dict[tuple[int, str], Lot] = field(default_factory=dict)
    unmeasured: dict[str, None] = field(default_factory=dict)
    rates: FleetRates | None = None
    news: int = 0

    def in_order(self) -> list[Card]:
        return sorted(self.cards.values(), key=lambda card: card.entry.position)

    def is_stale(self) -> bool:
        """Say whether the mean has to be taken anew."""
        if self.rates is None:
            return True
        return self.news >= max(1, len(self.cards) // RATES_STALE_SHARE)

    def take_mean(self) -> bool:
        """Take mean and typical rates anew; True when the typical ones are others, which concerns every card."""
        self.news = 0
        known = [card.prefill_rate for card in self.cards.values() if card.prefill_rate > 0.0]
        curves = [card.curve for card in self.cards.values() if card.curve.is_known]
        before, self.rates = self.rates, FleetRates(known, curves)
        return before is None or not self.rates.keep_typical(before, TYPICAL_MOVES)


@dataclass(slots=True)
class _Known:
    """What was last seen of a node."""

    node: NodeView
    offers: Mapping[str, Offer] = field(default_factory=dict)
    cards: list[Card] = field(default_factory=list)


class Ranking:
    """Belongs to one view, under one policy and one set of limits."""

    def __init__(self, view: FleetView, policy: Policy, limits: PlacementLimits) -> None:
        self.models: dict[str, ModelCards] = {}
        self.policy = policy
        self.limits = limits
        self.order = list(view.nodes)
        self._view = view
        self._known = {node.name: _Known(node) for node in view.nodes.values()}
        self._busy: dict[str, None] = {}
        self._now_ns = 0
        view.changed.clear()
        for name in self.order:
            view.changed[name] = None

    def refresh(self, now_ns: int) -> None:
        """Look again at what changed, and at who is no longer busy."""
        self._now_ns = now_ns
        changed = self._view.changed
        if self._busy:
            for name in self._busy:
                if self._known[name].node.busy_until_ns <= now_ns:
                    changed[name] = None
        if not changed:
            return
        for model in self._news():
            cards = self.models[model]
            if cards.is_stale():
                concerned = cards.cards if cards.take_mean() else cards.unmeasured
                changed.update(dict.fromkeys(concerned))
        for name in changed:
            self._look(self._known[name])
        changed.clear()

    def card(self, model: str, name: str) -> Card | None:
        found = self.models.get(model)
        return None if found is None else found.cards.get(name)

    # --- looking ----------------------------------------------------------------------------------

    def _news(self) -> dict[str, None]:
        """Note what those that changed offer and measure; returns the models of which there is news."""
        found: dict[str, None] = {}
        for name in self._view.changed:
            known = self._known[name]
            if known.node.offers is not known.offers:
                self._deal(known)
            for card in known.cards:
                if self._note_rates(card):
                    found[card.model] = None
        return found

    def _note_rates(self, card: Card) -> bool:
        """Note what the card's engine has measured; True when that is news, or when its model has no mean yet."""
        cards, load = self.models[card.model], card.node.work(card.offer).load
        before = cards.news
        if load.decode_rates != card.curve.rates:
            card.curve = Curve(load.decode_rates)
            cards.news += 1
        if load.prefill_rate != card.prefill_rate:
            card.prefill_rate = load.prefill_rate
            cards.news += 1
        if cards.news != before:
            if card.is_measured:
                cards.unmeasured.pop(card.node.name, None)
            else:
                cards.unmeasured[card.node.name] = None
        return cards.news != before or cards.rates is None

    def _look(self, known: _Known) -> None:
        node = known.node
        is_busy = node.busy_until_ns > self._now_ns
        if is_busy:
            self._busy[node.name] = None
        else:
            self._busy.pop(node.name, None)
        for card in known.cards:
            self._judge(card, is_busy=is_busy)

    def _deal(self, known: _Known) -> None:
        """Make the node's cards anew: it offers other models."""
        node = known.node
        for card in known.cards:
            _take_off(card)
            card.lot.counts[card.fit] -= 1
            cards = self.models[card.model]
            del cards.cards[node.name]
            cards.unmeasured.pop(node.name, None)
            if not any(card.lot.counts.values()):
                del cards.lots[card.lot.window, card.lot.weights]
            if not cards.cards:
                del self.models[card.model]
        known.offers = node.offers
        known.cards = [self._new_card(node, model, offer) for model, offer in node.offers.items()]

    def _new_card(self, node: NodeView, model: str, offer: Offer) -> Card:
        cards = self.models.setdefault(model, ModelCards())
        lot = cards.lots.get((offer.window, offer.weights))
        if lot is None:
            lot = cards.lots[offer.window, offer.weights] = Lot(offer, self.policy)
        entry = Entry(self._view.positions[node.name], Figures(0.0, 0.0, 0.0, 0.0, 0.0), 0)
        card = Card(node, model, offer, entry, Fit.DOWN, lot, Curve(()))
        lot.counts[Fit.DOWN] += 1
        cards.cards[node.name] = card
        cards.unmeasured[node.name] = None
        return card

    def _judge(self, card: Card, *, is_busy: bool) -> None:
        """Compute one card anew and put it where it belongs."""
        _take_off(card)
        node, offer, lot = card.node, card.offer, card.lot
        verdict, room = standing_of(node, card.model), Room.NONE
        if verdict is Fit.CAPABLE:
            room = room_of(node, offer, self.limits)
            if is_busy:
                verdict = Fit.BUSY
            elif room is not Room.OPEN:
                verdict = Fit.FULL
        if verdict is not card.fit:
            lot.counts[card.fit] -= 1
            lot.counts[verdict] += 1
            card.fit = verdict
        rates, work = self.models[card.model].rates, node.work(offer)
        assert rates is not None, "a model whose cards are judged has a mean"
        part = figures(node, offer, card.curve, rates)
        card.entry = Entry(card.entry.position, part, work.in_progress)
        card.is_high = work.pool_pct(offer) >= self.limits.pool_high_pct
        if room is not Room.NONE and verdict is not Fit.BUSY:
            card.shelf = lot.shelves[room, card.is_high]
            card.shelf.add(card.entry)


def _take_off(card: Card) -> None:
    if card.shelf is not None:
        card.shelf.remove(card.entry)
        card.shelf = None


def _is_same(known: PlacementLimits, limits: PlacementLimits) -> bool:
    return known is limits or known == limits


def ranking_of(view: FleetView, policy: Policy, limits: PlacementLimits, now_ns: int) -> Ranking:
    """Return the view's ranking, up to date."""
    ranking = view.ranking
    if ranking is None or ranking.policy is not policy or not _is_same(ranking.limits, limits):
        ranking = view.ranking = Ranking(view, policy, limits)
    ranking.refresh(now_ns)
    return ranking
