"""What the head measures, in a registry of its own. Labels are bounded: routes, statuses, served models, nodes, tenants.

Knows prometheus_client and the names of classes; callers hand in plain numbers. Names begin with `superfluid_head_`. A tenant may
be shown the rows that carry its name and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from superfluid_core.session import QosClass

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
LABEL_VALUES_MAX = 128
TENANTS_MAX = 2_048
OTHERS = "~other"
"""No tenant can be called this."""


class _LinkEvents(Collector):
    """Counts of what happened to links, as they were when last set."""

    def __init__(self) -> None:
        self.counts: Mapping[str, int] = {}

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "superfluid_head_link_events", "What happened to links to nodes", labels=("event",)
        )
        for event, count in self.counts.items():
            family.add_metric((event,), count)
        yield family


class _OwnRows(Collector):
    """The samples of one tenant."""

    def __init__(self, registry: CollectorRegistry, tenant: str) -> None:
        self._registry = registry
        self._tenant = tenant

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            own = [each for each in family.samples if each.labels.get("tenant") == self._tenant]
            if own:
                shown = Metric(family.name, family.documentation, family.type, family.unit)
                shown.samples = own
                yield shown


class _Tenants:
    """What is counted by tenant, of whom there are so many at most."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "superfluid_head_tenant"
        labels = ["tenant", "status"]
        self.requests = Counter(f"{name}_requests", "Answered requests", labels, registry=registry)
        self.tokens = Counter(f"{name}_tokens", "Tokens", ["tenant", "kind"], registry=registry)
        self._known: set[str] = set()

    def label(self, tenant: str) -> str:
        if tenant not in self._known:
            if len(self._known) >= TENANTS_MAX:
                return OTHERS
            self._known.add(tenant)
        return tenant


class HeadMetrics:
    """The head's metrics. All methods are cheap and run on the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        made = self.registry
        self._requests = Counter(
            "superfluid_head_requests", "Answered requests", ["route", "status"], registry=made
        )
        self._request_s = Histogram(
            "superfluid_head_request_seconds",
            "From the request's head to the end of the reply",
            ["route"],
            buckets=SECONDS,
            registry=made,
        )
        self._generations = Counter(
            "superfluid_head_generations", "Ended generations", ["model", "finish"], registry=made
        )
        self._tokens = Counter("superfluid_head_tokens", "Tokens", ["model", "kind"], registry=made)
        self._ttft_s = Histogram(
            "superfluid_head_ttft_seconds",
            "From acceptance to the first token",
            ["model"],
            buckets=SECONDS,
            registry=made,
        )
        self._itl_s = Histogram(
            "superfluid_head_inter_token_seconds",
            "Between deliveries of tokens of one choice",
            ["model"],
            buckets=SHORT_SECONDS,
            registry=made,
        )
        self._e2e_s = Histogram(
            "superfluid_head_e2e_seconds",
            "From acceptance to the last token",
            ["model"],
            buckets=SECONDS,
            registry=made,
        )
        self.in_flight = Gauge(
            "superfluid_head_requests_in_flight", "Generations being served", registry=made
        )
        self._moves = Counter(
            "superfluid_head_moves", "Sessions moved to another node", ["reason"], registry=made
        )
        self._placements = Counter(
            "superfluid_head_placements", "Sessions placed", ["node"], registry=made
        )
        self._node_up = Gauge(
            "superfluid_head_node_up", "Whether a node is usable", ["node"], registry=made
        )
        self._waiting = Gauge(
            "superfluid_head_queue_depth",
            "Sessions that wait in this head",
            ["class"],
            registry=made,
        )
        self.loop_lag_s = Histogram(
            "superfluid_head_loop_lag_seconds",
            "How late the event loop woke up",
            buckets=SHORT_SECONDS,
            registry=made,
        )
        self._tenants = _Tenants(made)
        self._links = _LinkEvents()
        made.register(self._links)
        self._seen: dict[str, set[str]] = {}

    def _bounded(self, label: str, value: str) -> str:
        """`value`, or "other" once a label has too many values."""
        seen = self._seen.setdefault(label, set())
        if value not in seen:
            if len(seen) >= LABEL_VALUES_MAX:
                return "other"
            seen.add(value)
        return value

    def request_done(self, route: str, status: int, elapsed_s: float) -> None:
        name = self._bounded("route", route)
        self._requests.labels(name, str(status or 499)).inc()
        self._request_s.labels(name).observe(elapsed_s)

    def tenant_done(self, tenant: str, status: int) -> None:
        """Count a request of somebody who was let in."""
        self._tenants.requests.labels(self._tenants.label(tenant), str(status or 499)).inc()

    def first_token(self, model: str, elapsed_s: float) -> None:
        self._ttft_s.labels(self._bounded("model", model)).observe(elapsed_s)

    def next_tokens(self, model: str, elapsed_s: float) -> None:
        self._itl_s.labels(self._bounded("model", model)).observe(elapsed_s)

    def generation_done(self, model: str, finish: str, elapsed_s: float) -> None:
        name = self._bounded("model", model)
        self._generations.labels(name, finish).inc()
        self._e2e_s.labels(name).observe(elapsed_s)

    def tokens(self, whose: tuple[str, str], *, prompt: int, cached: int, completion: int) -> None:
        """Count tokens of a model and a tenant."""
        name, tenant = self._bounded("model", whose[0]), self._tenants.label(whose[1])
        self._tenants.tokens.labels(tenant, "prompt").inc(prompt)
        self._tenants.tokens.labels(tenant, "cached").inc(cached)
        self._tenants.tokens.labels(tenant, "completion").inc(completion)
        self._tokens.labels(name, "prompt").inc(prompt)
        self._tokens.labels(name, "cached").inc(cached)
        self._tokens.labels(name, "completion").inc(completion)

    def moved(self, reason: str) -> None:
        self._moves.labels(self._bounded("reason", reason)).inc()

    def placed(self, node: str) -> None:
        self._placements.labels(self._bounded("node", node)).inc()

    def nodes(self, states: Iterable[tuple[str, bool]]) -> None:
        """Set which nodes are up; called before a scrape."""
        for node, is_up in states:
            self._node_up.labels(self._bounded("node", node)).set(1 if is_up else 0)

    def waiting(self, counts: Sequence[int]) -> None:
        """Set how many wait, best class first; called before a scrape."""
        for qos, count in zip(QosClass, counts, strict=True):
            self._waiting.labels(qos.label).set(count)

    def links(self, counts: Mapping[str, int]) -> None:
        """Set what happened to links so far; called before a scrape."""
        self._links.counts = dict(counts)

    def render(self, tenant: str | None = None) -> bytes:
        """Prometheus text 0.0.4: everything, or one tenant's rows."""
        if tenant is None:
            return generate_latest(self.registry)
        own = CollectorRegistry()
        own.register(_OwnRows(self.registry, tenant))
        return generate_latest(own)
