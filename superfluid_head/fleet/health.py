"""How the fleet stands, as values for /health, /readyz, /v1/fleet and metrics. Reads nodes, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from superfluid_core.clock import MS, SECOND
from superfluid_head.fleet.node import FleetNode


@dataclass(frozen=True, slots=True)
class NodeState:
    """One node for a person or a gauge. `detail` says why it is not up; counts are over its engines, the rate is the first one's."""

    name: str
    address: str
    is_up: bool
    state: str
    detail: str
    boot: str
    models: tuple[str, ...]
    lanes: int
    lanes_busy: int
    queued: int
    sessions: int
    blocks: int
    blocks_used: int
    prefill_rate: float
    circuit: str
    is_draining: bool
    link: str = ""
    links: int = 0
    key: str = ""
    link_age_s: int = 0
    rekeys: int = 0
    queued_by_class: tuple[int, ...] = (0, 0, 0, 0)
    queued_tokens: int = 0
    blocks_cached: int = 0
    rtt_ms: float | None = None
    dial_failures: int = 0
    faults: int = 0


@dataclass(frozen=True, slots=True)
class FleetHealth:
    """The fleet in a few words."""

    is_ready: bool
    nodes: Sequence[NodeState]
    waiting: int = 0
    running: int = 0
    is_insecure: bool = False


def state_of(node: FleetNode, now_ns: int) -> NodeState:
    view, standing = node.view, node.standing
    offers = () if standing is None else tuple(standing.offers.values())
    status = None if standing is None else standing.status
    works = (
        () if standing is None else view.works
    )  # what a node that is gone said last is not so any more
    return NodeState(
        name=node.title,
        address=str(node.address),
        is_up=view.is_up,
        state=_word(node),
        detail="" if view.is_up and not node.complaint else node.complaint,
        boot="" if standing is None else standing.welcome.boot,
        models=tuple(offer.name for offer in offers),
        lanes=sum({offer.engine: offer.lanes for offer in offers}.values()),
        lanes_busy=sum(work.load.lanes_busy for work in works),
        queued=sum(work.load.queued for work in works),
        sessions=view.sessions,
        blocks=sum(work.load.blocks for work in works),
        blocks_used=sum(work.load.blocks_used for work in works),
        prefill_rate=view.load.prefill_rate,
        circuit=node.circuit.state(now_ns).value,
        is_draining=view.is_draining,
        link="joined" if node.is_joined else "dialled",
        links=len(node.links),
        key=node.key_id,
        link_age_s=max((now_ns - each.link.opened_ns for each in node.links), default=0) // SECOND,
        rekeys=node.rekeys,
        queued_by_class=(0, 0, 0, 0) if status is None else status.queued,
        queued_tokens=sum(work.load.queued_tokens for work in works),
        blocks_cached=0 if status is None else status.blocks_cached,
        rtt_ms=_rtt_ms(node),
        dial_failures=node.dial_failures,
        faults=node.faults,
    )


def _rtt_ms(node: FleetNode) -> float | None:
    """Return the last time from PING to PONG of the primary link, if one was measured."""
    rtt_ns = None if node.standing is None else node.standing.pulse.rtt_ns
    return None if rtt_ns is None else rtt_ns / MS


def _word(node: FleetNode) -> str:
    view = node.view
    if not node.is_linked:
        return "down"
    if not view.is_up:
        return "hung"
    if view.is_draining:
        return "draining"
    return "suspect" if view.is_suspect else "up"
