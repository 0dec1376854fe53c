"""What a node tells a monitoring system: snapshots of the scheduler, and what passed by on the links.

The scheduler's own figures are read at scrape time from its stats; histograms are observed where the event happens. Label sets are bounded:
classes, gates and finish reasons are enumerations, and tenants beyond `TENANTS_MAX` are counted together. No label holds
content, addresses or session ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from superfluid_core.clock import SECOND
from superfluid_core.errors import ErrorCode
from superfluid_core.scheduler.plan import StepDone, TickDone, TickPlan
from superfluid_core.scheduler.stats import SchedulerStats
from superfluid_core.session import QosClass

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TENANTS_MAX = 256
OTHER_TENANTS = "(other)"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0)
_PLANS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)

Snapshot = Callable[[], SchedulerStats]


class NodeMetrics:
    """All metrics of a node in a registry of its own; implements the agent's Observer and the loop's Watch."""

    def __init__(self, snapshot: Snapshot, facts: Mapping[str, str], block_tokens: int) -> None:
        self.registry = CollectorRegistry()
        self._tenants: set[str] = set()
        registry = self.registry
        registry.register(_SchedulerCollector(snapshot, facts, block_tokens))

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(name, text, registry=registry, buckets=tuple(buckets))

        def by_class(name: str, text: str, buckets: Iterable[float]) -> dict[QosClass, Histogram]:
            """Make all children at once: looking one up by its label for every token is slow."""
            whole = Histogram(name, text, ("class",), registry=registry, buckets=tuple(buckets))
            return {qos: whole.labels(qos.label) for qos in QosClass}

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


class _SchedulerCollector(Collector):
    """Reads one snapshot per scrape."""

    def __init__(self, snapshot: Snapshot, facts: Mapping[str, str], block_tokens: int) -> None:
        self._snapshot = snapshot
        self._facts = dict(facts)
        self._block_tokens = block_tokens

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        stats = self._snapshot()
        yield _labelled(GaugeMetricFamily, "superfluid_node_info", self._facts, 1)
        yield from self._gauges(stats)
        yield from _counters(stats)

    def _gauges(self, stats: SchedulerStats) -> Iterable[Metric]:
        queue = {qos.label: stats.queued[qos] for qos in QosClass}
        yield _family(GaugeMetricFamily, "superfluid_queue_depth", "class", queue)
        lanes = {
            "prefilling": stats.lanes_prefilling,
            "decoding": stats.lanes_decoding,
            "free": stats.lanes - stats.lanes_busy,
        }
        yield _family(GaugeMetricFamily, "superfluid_lanes", "state", lanes)
        blocks = {
            "used": stats.blocks_used,
            "cached": stats.blocks_cached,
            "free": stats.blocks - stats.blocks_used - stats.blocks_cached,
        }
        yield _family(GaugeMetricFamily, "superfluid_kv_blocks", "state", blocks)
        reserved = stats.reserved_blocks * self._block_tokens
        computed = max(1, stats.prompt_tokens + stats.output_tokens)
        plain = {
            "superfluid_queued_tokens": stats.queued_tokens,
            "superfluid_kv_reserved_tokens": reserved,
            "superfluid_prefill_budget_tokens": stats.prefill_budget_tokens,
            "superfluid_decode_grant_tokens": stats.decode_grant_tokens,
            "superfluid_recompute_ratio": stats.recomputed_tokens / computed,
            "superfluid_prefill_tokens_per_second": stats.prefill_rate,
            "superfluid_step_predicted_seconds": stats.step_predicted_ns / SECOND,
            "superfluid_draining": int(stats.draining),
        }
        for name, value in plain.items():
            yield GaugeMetricFamily(name, name, value)


def _counters(stats: SchedulerStats) -> Iterable[Metric]:
    gates = {
        "blocks": stats.held_blocks,
        "class": stats.held_class,
        "tenant": stats.held_tenant,
        "thrash": stats.held_thrash,
    }
    yield _family(CounterMetricFamily, "superfluid_kv_admit_blocked", "gate", gates)
    preemptions = CounterMetricFamily(
        "superfluid_preemptions", "superfluid_preemptions", labels=("cause", "mode")
    )
    causes = {
        "class": stats.preempted_for_class,
        "blocks": stats.preempted_for_blocks,
        "pressure": stats.preempted_for_pressure,
    }
    for cause, value in causes.items():
        preemptions.add_metric((cause, "recompute"), value)
    yield preemptions
    evicted = {
        "pressure": stats.evicted_for_pressure,
        "need": max(0, stats.prefix_evicted_blocks - stats.evicted_for_pressure),
    }
    yield _family(CounterMetricFamily, "superfluid_prefix_evicted_blocks", "cause", evicted)
    plain = {
        "superfluid_prefix_hit_tokens": stats.prefix_hit_tokens,
        "superfluid_prefix_miss_tokens": stats.prefix_miss_tokens,
        "superfluid_prompt_tokens": stats.prompt_tokens,
        "superfluid_output_tokens": stats.output_tokens,
        "superfluid_recomputed_tokens": stats.recomputed_tokens,
        "superfluid_ticks": stats.ticks,
        "superfluid_steps": stats.steps,
        "superfluid_interrupts": stats.interrupts,
        "superfluid_refused_plans": stats.refused_plans,
    }
    for name, value in plain.items():
        yield CounterMetricFamily(name, name, value)


_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


def _family(kind: _Family, name: str, label: str, values: Mapping[str, float]) -> Metric:
    family = kind(name, name, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def _labelled(kind: _Family, name: str, labels: Mapping[str, str], value: float) -> Metric:
    family = kind(name, name, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def figures(stats: SchedulerStats, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Give the same as JSON: the scheduler's stats with names for its columns."""
    raw = asdict(stats)
    raw["queued"] = {qos.label: stats.queued[qos] for qos in QosClass}
    raw["decode_rates"] = {str(batch): rate for batch, rate in stats.decode_rates}
    raw["finished"] = {reason.value: count for reason, count in stats.finished}
    return {"node": dict(facts), "scheduler": raw}
