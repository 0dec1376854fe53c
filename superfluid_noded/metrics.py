"""What a node tells a monitoring system: snapshots of the scheduler, and what passed by on the links.

The scheduler's own figures are read at scrape time from its stats; histograms are observed where the event happens. Label sets are bounded:
classes, gates and finish reasons are enumerations, and tenants beyond `TENANTS_MAX` are counted together. No label holds
content, addresses or session ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest

from superfluid_core.clock import SECOND
from superfluid_core.errors import ErrorCode
from superfluid_core.families import Histograms, Read
from superfluid_core.histogram import Histogram
from superfluid_core.scheduler.plan import StepDone, TickDone, TickPlan
from superfluid_core.session import QosClass
from superfluid_noded.gauges import (
    LinkCollector,
    LinkFigures,
    SchedulerCollector,
    Snapshot,
    figures_of,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TENANTS_MAX = 256
OTHER_TENANTS = "(other)"
FACTS = ("identity", "boot", "model", "engine", "device", "dtype", "weights", "window")
"""What `superfluid_node_info` says of a node."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0)
_PLANS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)


class NodeMetrics:
    """All metrics of a node in a registry of its own; implements the agent's Observer and the loop's Watch."""

    def __init__(self, snapshot: Snapshot, facts: Mapping[str, str]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._tenants: set[str] = set()
        registry = self.registry
        self._models = {facts["model"]: snapshot}
        registry.register(SchedulerCollector(self._models, facts))
        self.links = LinkCollector(lambda: LinkFigures(0, 0, 0))
        registry.register(self.links)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            whole = Histograms(name, text, (), tuple(buckets))
            registry.register(whole)
            return whole.of()

        def by_class(name: str, text: str, buckets: Iterable[float]) -> dict[QosClass, Histogram]:
            """Make all children at once: looking one up by its label for every token is slow."""
            whole = Histograms(name, text, ("class",), tuple(buckets))
            registry.register(whole)
            return {qos: whole.of(qos.label) for qos in QosClass}

        self._ttft = by_class("superfluid_ttft_seconds", "From OPEN to the first token.", _SECONDS)
        self._itl = by_class("superfluid_itl_seconds", "Between tokens of a session.", _GAPS)
        self._queue_wait = by_class(
            "superfluid_queue_wait_seconds", "From OPEN to a lane.", _SECONDS
        )
        self._tick = histogram("superfluid_tick_seconds", "Duration of a tick.", _SECONDS)
        self._step = histogram("superfluid_step_seconds", "Duration of a forward pass.", _GAPS)
        self._plan = histogram("superfluid_plan_seconds", "Duration of planning.", _PLANS)
        self._tenant_tokens = Counter(
            "superfluid_tenant_tokens_total",
            "Tokens computed for a tenant.",
            ("tenant", "kind"),
            registry=registry,
        )
        self._ended = Counter(
            "superfluid_sessions_total", "Sessions ended.", ("finish",), registry=registry
        )
        self._refused = Counter(
            "superfluid_refusals_total", "Sessions refused.", ("code",), registry=registry
        )
        text = "Spans of traces: exported, failed (refused or not reached), dropped (the queue was full)."
        self._spans = Read("superfluid_spans", text, ("outcome",), is_counter=True)
        registry.register(self._spans)

    def add_model(self, name: str, snapshot: Snapshot) -> None:
        """Export another scheduler too; from now on every figure of a scheduler says whose it is."""
        self._models[name] = snapshot

    def count_spans(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Count what became of spans of traces."""
        self._spans.read = lambda: {(outcome,): count for outcome, count in read().items()}

    def figures(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """Give the same as JSON: the main scheduler's stats, those of the others, and every metric by name."""
        every = {name: figures_of(snapshot()) for name, snapshot in self._models.items()}
        main, *others = every
        return {
            "node": dict(node),
            "scheduler": every[main],
            "models": {name: every[name] for name in others},
            "metrics": _samples(self.registry),
        }

    def expose(self) -> bytes:
        """Write everything in the text format."""
        return generate_latest(self.registry)

    # --- Observer of the agent ----------------------------------------------------------------

    def queue_waited(self, qos: QosClass, seconds: float) -> None:
        self._queue_wait[qos].observe(seconds)

    def first_token(self, qos: QosClass, seconds: float) -> None:
        self._ttft[qos].observe(seconds)

    def next_token(self, qos: QosClass, seconds: float) -> None:
        self._itl[qos].observe(seconds)

    def tokens(self, tenant: str, kind: str, count: int) -> None:
        if tenant not in self._tenants:
            if len(self._tenants) >= TENANTS_MAX:
                tenant = OTHER_TENANTS
            else:
                self._tenants.add(tenant)
        self._tenant_tokens.labels(tenant, kind).inc(max(0, count))

    def refused(self, code: ErrorCode) -> None:
        self._refused.labels(code.value).inc()

    def ended(self, finish: str) -> None:
        self._ended.labels(finish).inc()

    # --- Watch of the engine loop -------------------------------------------------------------

    def planned(self, plan: TickPlan, elapsed_ns: int) -> None:  # noqa: ARG002 - a Watch's shape
        self._plan.observe(elapsed_ns / SECOND)

    def stepped(self, done: StepDone) -> None:
        self._step.observe(done.elapsed_ns / SECOND)

    def ticked(self, done: TickDone) -> None:
        self._tick.observe(done.elapsed_ns / SECOND)


def _samples(registry: CollectorRegistry) -> dict[str, Any]:
    """Write every sample as a plain value: a number, or a list of labels and numbers."""
    found: dict[str, Any] = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created")):
                continue
            if sample.labels:
                found.setdefault(sample.name, []).append({**sample.labels, "value": sample.value})
            else:
                found[sample.name] = sample.value
    return found
