"""What the head measures, in a registry of its own. Labels are bounded: routes, statuses, served models, nodes.

Knows prometheus_client and the names of classes; callers hand in plain numbers. Names begin with `superfluid_head_`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from superfluid_core.session import QosClass

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
LABEL_VALUES_MAX = 128


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

    def first_token(self, model: str, elapsed_s: float) -> None:
        self._ttft_s.labels(self._bounded("model", model)).observe(elapsed_s)

    def next_tokens(self, model: str, elapsed_s: float) -> None:
        self._itl_s.labels(self._bounded("model", model)).observe(elapsed_s)

    def generation_done(self, model: str, finish: str, elapsed_s: float) -> None:
        name = self._bounded("model", model)
        self._generations.labels(name, finish).inc()
        self._e2e_s.labels(name).observe(elapsed_s)

    def tokens(self, model: str, *, prompt: int, cached: int, completion: int) -> None:
        name = self._bounded("model", model)
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

    def render(self) -> bytes:
        """Prometheus text 0.0.4."""
        return generate_latest(self.registry)
