"""What a head knows about its nodes at one instant, as plain values that a policy can compare.

A `NodeView` is folded from what the node said (offers at the handshake, load reports since) and from what this head has
reserved on it in the meantime. Reports are old by the time they are read, so a reservation that no report covers yet is
counted beside them, and one that ended after the last report is subtracted. Nothing here talks to a node: the shell
folds messages in, and a missing or old report never makes a node unusable, only less precisely known. Every change of a
node is noted with the fleets that it is part of, so that what was computed of it (`ranking.py`) is computed again, once.

    sessions in progress = reported (lanes + queue) - departed since + reserved and not yet reported

A node may have several engines, each with lanes, pool and rates of its own; an offer says which one serves it. All that is known
of one engine is a `Work`: the first one's is the node's own, the others stand beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from superfluid_core.session import QosClass

if TYPE_CHECKING:
    from superfluid_core.placement.ranking import Ranking

_UNSET = object()
REPREFILL_MS = 100
REPREFILL_TOKENS = 512
"""From both of these on a moved session's prefill counts as a whole one: so long, and as many tokens as a step takes at once."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One model as one node serves it; `weights` names the exact numbers, `engine` numbers the node's engine that has them.

    `tenant_lanes` is the most lanes that its scheduler gives one tenant, 0 when all.
    """

    weights: str
    window: int
    lanes: int
    block_tokens: int = 16
    blocks: int = 0
    engine: int = 0
    tenant_lanes: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """The last report of an engine. Rates are tokens a second, 0.0 while unknown."""

    lanes_busy: int = 0
    queued: int = 0
    queued_tokens: int = 0
    blocks_used: int = 0
    blocks: int = 0
    prefill_rate: float = 0.0
    decode_rates: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Held:
    """What this head holds on one engine. Changed by `reserve.py` only.

    `unreported_*` is the part that no load report covers yet; `departed` counts the sessions that a report still holds
    although they have ended. `reprefill_ms` is what moved sessions that have not produced a token there yet weigh (see
    `Work.weigh_reprefill`). `by_tenant` are sessions by class of each tenant that has any.
    """

    sessions: int = 0
    by_class: list[int] = field(default_factory=lambda: [0] * len(QosClass))
    by_tenant: dict[str, list[int]] = field(default_factory=dict)
    reprefill_ms: int = 0
    unreported_sessions: int = 0
    unreported_tokens: int = 0
    departed: int = 0


class Work:
    """How loaded one engine is: its last report, and what this head has reserved on it."""

    __slots__ = ()

    load: Load
    held: Held

    @property
    def in_progress(self) -> int:
        load, held = self.load, self.held
        reported = load.lanes_busy + load.queued - held.departed
        return (reported if reported > 0 else 0) + held.unreported_sessions

    @property
    def queued_tokens(self) -> int:
        return self.load.queued_tokens + self.held.unreported_tokens

    def weigh_reprefill(self, tokens: int) -> int:
        """Weigh a moved session that has `tokens` to prefill, in ms, at most REPREFILL_MS: as long as that takes, if it is known.

        Short ones ride in a step together, which alone takes longer than each of them adds: none weighs more than its share of it.
        """
        weight = min(REPREFILL_MS, 1 + REPREFILL_MS * tokens // REPREFILL_TOKENS)
        rate = self.load.prefill_rate
        return weight if rate <= 0 else min(weight, 1 + int(1_000 * tokens / rate))

    def pool_pct(self, offer: Offer) -> int:
        """How full the KV pool is, counting what was placed since the last report."""
        total = self.load.blocks or offer.blocks
        if total <= 0:
            return 0
        coming = self.held.unreported_tokens // max(1, offer.block_tokens)
        return 100 * (self.load.blocks_used + coming) // total


@dataclass(slots=True)
class OtherWork(Work):
    """An engine beside a node's first one."""

    load: Load = Load()
    held: Held = field(default_factory=Held)


@dataclass(slots=True)
class NodeView(Work):
    """One node: what it serves, whether it may be used, how loaded it is.

    `is_up` means that a link stands and the node answers; `is_ready` that its circuit lets sessions through. `allowance`
    is the share of its lanes that may be used while it warms up after a fault; `busy_until_ns` follows a busy refusal.
    `load` and `held` are its first engine's, `others` the works of those beside it, by number. Fields are replaced, never changed in
    place: `held` and `others` alone are, by `reserve.py`, which says so (`touch`).
    """

    name: str
    offers: Mapping[str, Offer] = field(default_factory=dict)
    sessions_max: int = 0
    is_up: bool = False
    is_suspect: bool = False
    is_draining: bool = False
    is_ready: bool = True
    allowance: float = 1.0
    busy_until_ns: int = 0
    load: Load = Load()
    held: Held = field(default_factory=Held)
    others: dict[int, OtherWork] = field(default_factory=dict)
    watchers: tuple[dict[str, None], ...] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, name, _UNSET) is value:
            return
        object.__setattr__(self, name, value)
        for changed in getattr(self, "watchers", ()):
            changed[self.name] = None

    def touch(self) -> None:
        """Note that `held` or `others` changed."""
        name = self.name
        for changed in self.watchers:
            changed[name] = None

    def work(self, offer: Offer) -> Work:
        """Return the work of the engine that serves `offer`."""
        if not offer.engine:
            return self
        found = self.others.get(offer.engine)
        if found is None:
            found = self.others[offer.engine] = OtherWork()
        return found

    @property
    def works(self) -> tuple[Work, ...]:
        return (self, *self.others.values())

    @property
    def sessions(self) -> int:
        """Sessions that this head holds on all engines."""
        return sum(work.held.sessions for work in self.works) if self.others else self.held.sessions

    @property
    def reprefill_ms(self) -> int:
        """What all moved sessions that prefill again weigh, on all engines."""
        return sum(work.held.reprefill_ms for work in self.works)


class FleetView:
    """All nodes in the order in which they were named, and whose turn it is under round-robin.

    `chosen` says by position which choice fell on a node last, counted from 1 by `choices`; 0 is none yet. `changed` names
    the nodes that are no longer as `ranking` knows them; a node that comes or goes makes it void.
    """

    __slots__ = (
        "_nodes", "changed", "choices", "chosen", "nodes", "positions", "ranking", "turn",
    )  # fmt: skip

    def __init__(self, nodes: Mapping[str, NodeView] | None = None) -> None:
        self._nodes: dict[str, NodeView] = {}
        self.nodes: Mapping[str, NodeView] = MappingProxyType(self._nodes)
        self.positions: dict[str, int] = {}
        self.changed: dict[str, None] = {}
        self.ranking: Ranking | None = None
        self.turn = 0
        self.choices = 0
        self.chosen: list[int] = []
        for node in (nodes or {}).values():
            self.add(node)

    def add(self, node: NodeView) -> None:
        """Take `node` in, behind the others."""
        assert node.name not in self._nodes, "two nodes of one name"
        self.positions[node.name] = len(self._nodes)
        self.chosen.append(0)
        self._nodes[node.name] = node
        node.watchers = (*node.watchers, self.changed)
        self.ranking = None

    def remove(self, name: str) -> None:
        """Forget a node; the turn stays with whom it was."""
        node = self._nodes.pop(name)
        node.watchers = tuple(each for each in node.watchers if each is not self.changed)
        if self.positions[name] < self.turn:
            self.turn -= 1
        del self.chosen[self.positions[name]]
        self.positions = {each: place for place, each in enumerate(self._nodes)}
        self.changed.pop(name, None)
        self.ranking = None

    def choose(self, name: str) -> None:
        """Note that a choice fell on a node."""
        position = self.positions[name]
        self.choices += 1
        self.chosen[position] = self.choices
        self.turn = 1 + position


@dataclass(slots=True)
class PlacementRequest:
    """What placement needs to know about one choice. Lengths are tokens; `max_output` is absolute.

    `weights` restricts a session that has begun to equal numbers. `avoid` names the node that just failed it: used only
    if nothing else can. `cached` maps node names to context tokens that their prefix cache holds. Nobody changes it.
    """

    model: str
    prompt: int
    delivered: int
    max_output: int
    qos: QosClass
    expected_output: int
    weights: str | None = None
    avoid: frozenset[str] = frozenset()
    is_move: bool = False
    cached: Mapping[str, int] = field(default_factory=dict)
    tenant: str = ""

    @property
    def context(self) -> int:
        return self.prompt + self.delivered


@dataclass(frozen=True, slots=True)
class PlacementLimits:
    """The bounds that placement keeps: sessions per node, pool mark, moved sessions that prefill again.

    `reprefills_per_node` counts whole prefills (see `Work.weigh_reprefill`); of shorter ones as many may run as weigh that together.
    """

    sessions_over_lanes: int = 2
    reprefills_per_node: int = 4
    pool_high_pct: int = 90


class Fit(StrEnum):
    """Why a node may or may not take a request; the words appear in logs and in `why`."""

    CAPABLE = "capable"
    NOT_SERVED = "does not serve the model"
    OTHER_WEIGHTS = "serves other weights"
    DOWN = "not linked"
    SUSPECT = "silent"
    DRAINING = "draining"
    CIRCUIT_OPEN = "resting after faults"
    WINDOW = "window too small"
    BUSY = "said that it is busy"
    FULL = "lanes full"
    TENANT = "enough sessions of this tenant"
    REPREFILLS = "enough moved sessions prefilling"

    @property
    def is_passing(self) -> bool:
        """True when only load stands in the way: the request may wait for this node."""
        return self in (Fit.BUSY, Fit.FULL, Fit.TENANT, Fit.REPREFILLS)


def fit(
    node: NodeView,
    request: PlacementRequest,
    limits: PlacementLimits,
    now_ns: int,
    *,
    is_spared: bool = True,
) -> Fit:
    """Judge one node for one request, ignoring the window (see `fits_window`). `is_spared`: while it warms up it is given less."""
    standing = standing_of(node, request.model, request.weights)
    if standing is not Fit.CAPABLE:
        return standing
    if node.busy_until_ns > now_ns:
        return Fit.BUSY
    room = room_of(node, node.offers[request.model], limits, is_spared=is_spared)
    is_interactive = request.qos is QosClass.INTERACTIVE
    if room is not Room.OPEN and not (is_interactive and room is Room.INTERACTIVE):
        return Fit.FULL
    if is_tenant_full(node, request, limits):
        return Fit.TENANT
    if request.is_move and node.reprefill_ms >= limits.reprefills_per_node * REPREFILL_MS:
        return Fit.REPREFILLS
    return Fit.CAPABLE


def standing_of(node: NodeView, model: str, weights: str | None = None) -> Fit:
    """Judge everything about a node that waiting for a lane does not change."""
    offer = node.offers.get(model)
    if offer is None:
        return Fit.NOT_SERVED
    if weights is not None and offer.weights != weights:
        return Fit.OTHER_WEIGHTS
    if not node.is_up:
        return Fit.DOWN
    if node.is_draining:
        return Fit.DRAINING
    if not node.is_ready:
        return Fit.CIRCUIT_OPEN
    return Fit.SUSPECT if node.is_suspect else Fit.CAPABLE


class Room(StrEnum):
    """Whom a node still takes, by the number of sessions there."""

    OPEN = "open"
    INTERACTIVE = "interactive"
    NONE = "none"


def room_of(
    node: NodeView, offer: Offer, limits: PlacementLimits, *, is_spared: bool = True
) -> Room:
    """Lanes and a little more; an interactive session may go over it where it can preempt a lower class.

    The lanes are the engine's own; the most sessions that a node takes from one head count over all its engines.
    """
    held = node.work(offer).held
    if is_spared and node.allowance < 1.0:
        lanes = max(1, int(offer.lanes * node.allowance))
        return Room.OPEN if held.sessions < lanes else Room.NONE
    is_full = 0 < node.sessions_max <= node.sessions
    if held.sessions < offer.lanes + limits.sessions_over_lanes and not is_full:
        return Room.OPEN
    ceiling = node.sessions_max or 2 * offer.lanes
    if node.others:
        ceiling = max(2 * offer.lanes, offer.lanes + limits.sessions_over_lanes)
    interactive = held.by_class[QosClass.INTERACTIVE]
    if interactive < offer.lanes and held.sessions < ceiling and not is_full:
        return Room.INTERACTIVE
    return Room.NONE


def is_tenant_full(node: NodeView, request: PlacementRequest, limits: PlacementLimits) -> bool:
    """Say whether more of this tenant would wait at the node although lanes are free there, in the place of others.

    As many wait there as of everybody, so what the cap leaves free of the lanes is left free of the node's places too.
    Interactive sessions preempt, so only others of theirs stand in their way.
    """
    offer = node.offers[request.model]
    counts = node.work(offer).held.by_tenant.get(request.tenant)
    if counts is None or not 0 < offer.tenant_lanes < offer.lanes:
        return False
    is_interactive = request.qos is QosClass.INTERACTIVE
    there = counts[QosClass.INTERACTIVE] if is_interactive else sum(counts)
    return there >= offer.tenant_lanes + limits.sessions_over_lanes


def fits_window(offer: Offer, request: PlacementRequest) -> bool:
    return request.prompt + request.max_output <= offer.window
