"""What the head measures, in a registry of its own. Labels are bounded: routes, statuses, served models, nodes, tenants.

Knows prometheus_client and the names of classes; callers hand in plain numbers. What happens with every token goes through a
`Meter`, bound once per choice: an observation takes no lock and looks up no label. What the fleet knows (nodes, waiting, links) is
read when somebody scrapes. A tenant may be shown the rows that carry its name and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    disable_created_metrics,
    generate_latest,
)

from superfluid_core.families import Counts, Histograms, Read
from superfluid_core.histogram import Histogram
from superfluid_core.session import QosClass
from superfluid_head.fleet.causes import CAUSES, NEW, cause_of
from superfluid_head.metrics.labels import OTHERS, TENANTS_MAX, Bounded
from superfluid_head.metrics.nodes import NodeFigures, Nodes
from superfluid_head.metrics.rows import OwnRows
from superfluid_head.vitals import Vitals

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
BRIEF_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.01, 0.1)
DETOKENIZE_EVERY = 16
"""One delivery in so many is timed."""


class _Tenants:
    """What is counted by tenant, of whom there are so many at most."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.label = Bounded(TENANTS_MAX, OTHERS)
        text = "Answered requests of callers that were let in, by the names of their keys."
        name = "superfluid_head_tenant"
        self.requests = Counts(f"{name}_requests", text, ["tenant", "status"])
        text = "Tokens by tenant: prompt, cached, completion."
        self.tokens = Counts(f"{name}_tokens", text, ["tenant", "kind"])
        registry.register(self.requests)
        registry.register(self.tokens)


class _Durations:
    """The histograms, by what they are observed for."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def made(
            name: str, text: str, labels: Sequence[str] = (), bounds: Sequence[float] = SECONDS
        ) -> Histograms:
            found = Histograms(f"superfluid_head_{name}_seconds", text, labels, bounds)
            registry.register(found)
            return found

        by_model = ("model", "class")
        self.request = made("request", "From a request's head to the end of the reply.", ("route",))
        self.ttft = made("ttft", "From acceptance to the first token.", by_model)
        self.ttft_part = made(
            "ttft_part",
            "What a wait for the first token was made of: queue (in the head and on the node), prefill (a lane's work up to the "
            "first token), network (the rest: link, event loops).",
            ("part",),
        )
        self.itl = made(
            "inter_token", "Between deliveries of tokens of one choice.", by_model, SHORT_SECONDS
        )
        self.e2e = made("e2e", "From acceptance to the end of a choice.", by_model)
        self.lag = made("loop_lag", "How late the event loop woke up.", (), SHORT_SECONDS)
        self.detokenize = made(
            "detokenize",
            f"Ids of one delivery to text: bytes, stops, tools; one delivery in {DETOKENIZE_EVERY} is timed.",
            (),
            BRIEF_SECONDS,
        )


class _Counts:
    """The counters that are raised where the thing happens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def made(name: str, text: str, *labels: str) -> Counts:
            found = Counts(f"superfluid_head_{name}", text, labels)
            registry.register(found)
            return found

        self.requests = made("requests", "Answered requests.", "route", "status")
        self.generations = made("generations", "Ended choices.", "model", "class", "finish")
        self.tokens = made("tokens", "Tokens: prompt, cached, completion.", "model", "kind")
        self.moves = made("moves", "Sessions moved to another node.", "cause")
        for cause in CAUSES:  # a rate of what never happened is 0, not unknown
            if cause != NEW:
                self.moves.add(cause, count=0)
        self.placements = made(
            "placements",
            "Sessions placed, by node, by the policy that chose it and by why it was asked: new, or what ended the last placement.",
            "node",
            "policy",
            "reason",
        )


class _Metered(NamedTuple):
    """What all choices of a model and a class are measured by."""

    ttft: Histogram
    itl: Histogram
    e2e: Histogram
    detokenize: Histogram
    ended: Callable[[str], None]


IS_DUE = (True, *[False] * (DETOKENIZE_EVERY - 1))


class Meter:
    """One choice's durations: its histograms, found once."""

    __slots__ = ("_made", "is_due", "next_tokens")

    def __init__(self, made: _Metered) -> None:
        self._made = made
        self.next_tokens = made.itl.observe
        self.is_due = cycle(IS_DUE).__next__
        """Says whether to time this delivery's way to text."""

    def first_token(self, elapsed_s: float) -> None:
        self._made.ttft.observe(elapsed_s)

    def detokenized(self, elapsed_s: float) -> None:
        self._made.detokenize.observe(elapsed_s)

    def ended(self, finish: str, elapsed_s: float) -> None:
        self._made.ended(finish)
        self._made.e2e.observe(elapsed_s)


class HeadMetrics:
    """The head's metrics. All methods are cheap and run on the event loop."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = made = CollectorRegistry()
        self.counts, self.durations = _Counts(made), _Durations(made)
        self.vitals = Vitals()
        self.model, self._route, self._node = Bounded(), Bounded(), Bounded()
        self.in_flight = Gauge(
            "superfluid_head_requests_in_flight", "Generations being served.", registry=made
        )
        self.loop_lag_s = self.durations.lag.of()
        self._metered: dict[tuple[str, str], _Metered] = {}
        self._tenants = _Tenants(made)
        self._shown = {
            name: Read(f"superfluid_head_{name}", text, labels, is_counter=is_counter)
            for name, text, labels, is_counter in (
                ("queue_depth", "Sessions that wait in this head.", ("class",), False),
                ("link_events", "What happened to links to nodes.", ("event",), True),
                ("fleet_events", "What happened to placements: ends, failures, faults.", ("event",), True),
                ("spans", "Spans of traces: exported, failed (refused or not reached), dropped (the queue was full).",
                 ("outcome",), True),
                ("ready", "Whether a model can be served end to end.", (), False),
                ("workers", "Heads on this port that answer; 1 without --workers.", (), False),
                ("worker_ends", "Workers of --workers that ended unasked and were started again, by cause: died, hung.", ("cause",), True),
                ("info", "Always 1; says which version this is.", ("version",), False),
            )
        }  # fmt: skip
        self._nodes = Nodes()
        for collector in (*self._shown.values(), self._nodes):
            made.register(collector)

    def meter(self, model: str, qos: QosClass) -> Meter:
        """Return what a choice of this model and class measures by."""
        key = self.model(model), qos.label
        found = self._metered.get(key)
        if found is None:
            made = self.durations
            found = self._metered[key] = _Metered(
                made.ttft.of(*key),
                made.itl.of(*key),
                made.e2e.of(*key),
                made.detokenize.of(),
                lambda finish: self.counts.generations.add(*key, finish),
            )
        return Meter(found)

    # --- where things happen ----------------------------------------------------------------------

    def request_done(self, route: str, status: int, elapsed_s: float) -> None:
        name = self._route(route)
        self.counts.requests.add(name, str(status or 499))
        self.durations.request.of(name).observe(elapsed_s)

    def tenant_done(self, tenant: str, status: int) -> None:
        """Count a request of somebody who was let in."""
        self._tenants.requests.add(self._tenants.label(tenant), str(status or 499))

    def tokens(self, whose: tuple[str, str], *, prompt: int, cached: int, completion: int) -> None:
        """Count tokens of a model and a tenant."""
        name, tenant = self.model(whose[0]), self._tenants.label(whose[1])
        for kind, count in (("prompt", prompt), ("cached", cached), ("completion", completion)):
            self._tenants.tokens.add(tenant, kind, count=count)
            self.counts.tokens.add(name, kind, count=count)

    def moved(self, reason: str) -> None:
        self.counts.moves.add(cause_of(reason))

    # --- the fleet's observer -----------------------------------------------------------------------

    def placed(self, node: str, policy: str, reason: str) -> None:
        self.counts.placements.add(self._node(node), policy, cause_of(reason))

    def first_token(self, queue_s: float, prefill_s: float, network_s: float) -> None:
        """Take what one wait for a first token was made of."""
        part = self.durations.ttft_part
        part.of("queue").observe(queue_s)
        part.of("prefill").observe(prefill_s)
        part.of("network").observe(network_s)

    # --- what is read at scrape time ----------------------------------------------------------------

    def show(self, name: str, rows: Mapping[tuple[str, ...], float]) -> None:
        """Set a family of the fleet's or the head's own figures; called before a scrape."""
        self._shown[name].read = lambda: rows

    def nodes(self, nodes: Iterable[NodeFigures]) -> None:
        """Set the nodes as they are; called before a scrape."""
        known = tuple(nodes)
        self._nodes.read = lambda: known

    def waiting(self, counts: Sequence[int]) -> None:
        """Set how many wait, best class first; called before a scrape."""
        labels = ((qos.label,) for qos in QosClass)
        self.show("queue_depth", dict(zip(labels, counts, strict=True)))

    def render(self, tenant: str | None = None) -> bytes:
        """Prometheus text 0.0.4: everything, or one tenant's rows."""
        if tenant is None:
            return generate_latest(self.registry)
        own = CollectorRegistry()
        own.register(OwnRows(self.registry, tenant))
        return generate_latest(own)
