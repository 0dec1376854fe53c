"""A row per node on the head's own page: whoever scrapes the head alone still sees the whole fleet.

Values are those of the fleet's last look (STATUS, pings, the dial loop); a node that left the fleet leaves the page. The label
`node` is bounded: beyond so many nodes the rest has no rows, because sums over strangers would mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

NODES_MAX = 512
STATES = ("up", "suspect", "draining", "hung", "down")
CIRCUITS = ("closed", "half-open", "open")


class NodeFigures(Protocol):
    """What of a node is shown (`fleet.health.NodeState`)."""

    @property
    def name(self) -> str: ...
    @property
    def is_up(self) -> bool: ...
    @property
    def state(self) -> str: ...
    @property
    def lanes(self) -> int: ...
    @property
    def lanes_busy(self) -> int: ...
    @property
    def queued(self) -> int: ...
    @property
    def sessions(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def blocks_used(self) -> int: ...
    @property
    def prefill_rate(self) -> float: ...
    @property
    def circuit(self) -> str: ...
    @property
    def links(self) -> int: ...
    @property
    def link_age_s(self) -> int: ...
    @property
    def rekeys(self) -> int: ...
    @property
    def rtt_ms(self) -> float | None: ...
    @property
    def dial_failures(self) -> int: ...
    @property
    def faults(self) -> int: ...


Values = Callable[[NodeFigures], Mapping[str, float]]


class _Family:
    """One family: what it is called, its second label if it has one, and how its values are read off a node."""

    def __init__(
        self, name: str, text: str, read: Values, label: str = "", *, is_counter: bool = False
    ) -> None:
        self.read = read
        self._name, self._text = f"superfluid_head_node_{name}", text
        self._labels = ("node", label) if label else ("node",)
        self._is_counter = is_counter

    def empty(self) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if self._is_counter else GaugeMetricFamily
        return kind(self._name, self._text, labels=self._labels)

    def filled(self, nodes: Sequence[NodeFigures]) -> Metric:
        family = self.empty()
        for node in nodes:
            for second, value in self.read(node).items():
                family.add_metric((node.name, second)[: len(self._labels)], value)
        return family


def _one(read: Callable[[NodeFigures], float | None]) -> Values:
    def values(node: NodeFigures) -> Mapping[str, float]:
        value = read(node)
        return {} if value is None else {"": value}

    return values


def _lanes(node: NodeFigures) -> Mapping[str, float]:
    return {"busy": node.lanes_busy, "free": max(0, node.lanes - node.lanes_busy)}


def _blocks(node: NodeFigures) -> Mapping[str, float]:
    return {"used": node.blocks_used, "free": max(0, node.blocks - node.blocks_used)}


_FAMILIES = (
    _Family("up", "Whether a node is usable.", _one(lambda n: n.is_up)),
    _Family("state", "1 for the state that a node is in.",
            lambda n: {state: float(state == n.state) for state in STATES}, "state"),
    _Family("lanes", "Lanes of a node, over its engines, as its last STATUS said.", _lanes, "state"),
    _Family("queued", "Sessions that wait on a node, of all heads.", _one(lambda n: n.queued)),
    _Family("sessions", "Sessions of this head that are placed on a node.", _one(lambda n: n.sessions)),
    _Family("kv_blocks", "Blocks of a node's KV pools.", _blocks, "state"),
    _Family("prefill_tokens_per_second", "A node's measured prefill rate.", _one(lambda n: n.prefill_rate)),
    _Family("circuit", "1 for the state of a node's circuit: open rests it, half-open lets one probe through.",
            lambda n: {state: float(state == n.circuit) for state in CIRCUITS}, "state"),
    _Family("links", "Links to a node that stand.", _one(lambda n: n.links)),
    _Family("link_age_seconds", "Age of the oldest link to a node.", _one(lambda n: n.link_age_s)),
    _Family("link_rtt_seconds", "Last measured time from PING to PONG, a node's event loop included.",
            _one(lambda n: None if n.rtt_ms is None else n.rtt_ms / 1_000)),
    _Family("link_rekeys", "Links to a node that a fresh one replaced.", _one(lambda n: n.rekeys), is_counter=True),
    _Family("dial_failures", "Dials of a node that came to nothing; each is tried again.",
            _one(lambda n: n.dial_failures), is_counter=True),
    _Family("faults", "Faults that were laid to a node.", _one(lambda n: n.faults), is_counter=True),
)  # fmt: skip


class Nodes(Collector):
    """Reads the fleet's nodes at scrape time."""

    def __init__(self) -> None:
        self.read: Callable[[], Iterable[NodeFigures]] = tuple

    def describe(self) -> Iterable[Metric]:
        return [family.empty() for family in _FAMILIES]

    def collect(self) -> Iterator[Metric]:
        nodes = tuple(self.read())[:NODES_MAX]
        for family in _FAMILIES:
            yield family.filled(nodes)
