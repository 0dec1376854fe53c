"""The schedulers' own figures for a monitoring system, read from their snapshots at scrape time.

Labels are enumerations: classes, states, gates, causes. A node with a second model adds the label `model` to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from superfluid_core.clock import SECOND
from superfluid_core.scheduler.stats import SchedulerStats
from superfluid_core.session import QosClass

Snapshot = Callable[[], SchedulerStats]

TEXTS = {
    "superfluid_queue_depth": "Sessions that wait.",
    "superfluid_queued_tokens": "Prompt tokens of sessions that wait.",
    "superfluid_lanes": "Lanes: prefilling, decoding, free.",
    "superfluid_kv_blocks": "Blocks of the KV pool: used, cached (prefixes nobody uses now), free.",
    "superfluid_kv_reserved_tokens": "Tokens that active sessions have reserved.",
    "superfluid_kv_admit_blocked": "Holds at a gate of admission, counted per tick.",
    "superfluid_preemptions": "Preempted sessions, by cause and by what became of their KV.",
    "superfluid_recompute_ratio": "Recomputed tokens over new ones, over 30 s.",
    "superfluid_thrash_trips": "How often the thrash gate closed.",
    "superfluid_thrash_lanes": "Lanes that the thrash gate allows now.",
    "superfluid_prefix_hit_tokens": "Prompt tokens found in the prefix cache.",
    "superfluid_prefix_miss_tokens": "Prompt tokens not found in it.",
    "superfluid_prefix_evicted_blocks": "Cached blocks given up, by cause.",
    "superfluid_park_bytes": "KV in host memory.",
    "superfluid_park_bytes_max": "Bound of the KV in host memory.",
    "superfluid_parked_sessions": "Preempted sessions whose KV is in host memory.",
    "superfluid_parked_prefixes": "Prefix blocks in host memory.",
    "superfluid_park_refused": "Times that host memory had no room for a session's KV.",
    "superfluid_park_dropped": "Prefix blocks in host memory given up for room.",
    "superfluid_prefill_budget_tokens": "Prefill budget of the last tick.",
    "superfluid_decode_grant_tokens": "Decode grant of the last tick.",
    "superfluid_prefill_tokens_per_second": "Measured prefill rate.",
    "superfluid_step_predicted_seconds": "Predicted duration of the step that runs or comes next.",
    "superfluid_draining": "1 while no new sessions are taken.",
    "superfluid_prompt_tokens": "Prompt tokens computed.",
    "superfluid_output_tokens": "Output tokens.",
    "superfluid_recomputed_tokens": "Tokens computed more than once.",
    "superfluid_restored_tokens": "Tokens whose KV came back from host memory for preempted sessions.",
    "superfluid_imported_tokens": "Tokens whose KV came back from host memory as prefixes.",
    "superfluid_ticks": "Ticks.",
    "superfluid_steps": "Forward passes.",
    "superfluid_interrupts": "Ticks stopped for somebody urgent.",
    "superfluid_refused_plans": "Plans that the engine could not hold.",
}


class LinkFigures(NamedTuple):
    """Links that stand, links that this node dialled, and handshakes of both kinds that came to nothing."""

    links: int
    joins: int
    refusals: int


class LinkCollector(Collector):
    """Reads the links at scrape time."""

    def __init__(self, read: Callable[[], LinkFigures]) -> None:
        self.read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        figures = self.read()
        yield GaugeMetricFamily("superfluid_links", "Links to heads.", figures.links)
        yield CounterMetricFamily(
            "superfluid_joins", "Links that this node dialled.", figures.joins
        )
        text = "Links that did not come to WELCOME, or ended at once."
        yield CounterMetricFamily("superfluid_link_refusals", text, figures.refusals)


class Row(NamedTuple):
    """One family of one scheduler: label names, and a value for each tuple of label values."""

    name: str
    labels: tuple[str, ...]
    values: Mapping[tuple[str, ...], float]
    is_counter: bool = False


class SchedulerCollector(Collector):
    """Reads one snapshot of each model per scrape. `models` may grow."""

    def __init__(self, models: Mapping[str, Snapshot], facts: Mapping[str, str]) -> None:
        self._models = models
        self._facts = dict(facts)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("superfluid_node_info", "This node.", labels=tuple(self._facts))
        info.add_metric(tuple(self._facts.values()), 1)
        yield info
        more = ("model",) if len(self._models) > 1 else ()
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for model, snapshot in self._models.items():
            name = (model,) if more else ()
            for row in rows(snapshot()):
                family = families.get(row.name)
                if family is None:
                    kind = CounterMetricFamily if row.is_counter else GaugeMetricFamily
                    family = families[row.name] = kind(
                        row.name, TEXTS[row.name], labels=(*row.labels, *more)
                    )
                for labels, value in row.values.items():
                    family.add_metric((*labels, *name), value)
        yield from families.values()


def rows(stats: SchedulerStats) -> Iterator[Row]:
    """Everything that one snapshot says."""
    yield from _states(stats)
    yield from _gauges(stats)
    yield from _counters(stats)


def _by(label: str, name: str, values: Mapping[str, float], *, is_counter: bool = False) -> Row:
    return Row(name, (label,), {(key,): value for key, value in values.items()}, is_counter)


def _states(stats: SchedulerStats) -> Iterator[Row]:
    queue = {qos.label: stats.queued[qos] for qos in QosClass}
    yield _by("class", "superfluid_queue_depth", queue)
    lanes = {
        "prefilling": stats.lanes_prefilling,
        "decoding": stats.lanes_decoding,
        "free": stats.lanes - stats.lanes_busy,
    }
    yield _by("state", "superfluid_lanes", lanes)
    blocks = {
        "used": stats.blocks_used,
        "cached": stats.blocks_cached,
        "free": stats.blocks - stats.blocks_used - stats.blocks_cached,
    }
    yield _by("state", "superfluid_kv_blocks", blocks)


def _gauges(stats: SchedulerStats) -> Iterator[Row]:
    plain = {
        "superfluid_queued_tokens": stats.queued_tokens,
        "superfluid_kv_reserved_tokens": stats.kv_reserved_tokens,
        "superfluid_prefill_budget_tokens": stats.prefill_budget_tokens,
        "superfluid_decode_grant_tokens": stats.decode_grant_tokens,
        "superfluid_recompute_ratio": stats.recompute_ratio,
        "superfluid_prefill_tokens_per_second": stats.prefill_rate,
        "superfluid_step_predicted_seconds": stats.step_predicted_ns / SECOND,
        "superfluid_park_bytes": stats.park_bytes,
        "superfluid_park_bytes_max": stats.park_bytes_max,
        "superfluid_parked_sessions": stats.parked_sessions,
        "superfluid_parked_prefixes": stats.parked_prefixes,
        "superfluid_thrash_lanes": stats.thrash_lanes,
        "superfluid_draining": int(stats.draining),
    }
    for name, value in plain.items():
        yield Row(name, (), {(): value})


def _counters(stats: SchedulerStats) -> Iterator[Row]:
    gates = {
        "blocks": stats.held_blocks,
        "reservation": stats.held_reservation,
        "class": stats.held_class,
        "step": stats.held_step,
        "tenant": stats.held_tenant,
        "thrash": stats.held_thrash,
        "pressure": stats.held_pressure,
    }
    yield _by("gate", "superfluid_kv_admit_blocked", gates, is_counter=True)
    causes = {
        "class": (stats.preempted_for_class, stats.swapped_for_class),
        "blocks": (stats.preempted_for_blocks, stats.swapped_for_blocks),
        "pressure": (stats.preempted_for_pressure, stats.swapped_for_pressure),
    }
    by_mode: dict[tuple[str, ...], float] = {}
    for cause, (preempted, swapped) in causes.items():
        by_mode[cause, "recompute"] = preempted - swapped
        by_mode[cause, "swap"] = swapped
    yield Row("superfluid_preemptions", ("cause", "mode"), by_mode, is_counter=True)
    evicted = {
        "pressure": stats.evicted_for_pressure,
        "need": max(0, stats.prefix_evicted_blocks - stats.evicted_for_pressure),
    }
    yield _by("cause", "superfluid_prefix_evicted_blocks", evicted, is_counter=True)
    plain = {
        "superfluid_prefix_hit_tokens": stats.prefix_hit_tokens,
        "superfluid_prefix_miss_tokens": stats.prefix_miss_tokens,
        "superfluid_prompt_tokens": stats.prompt_tokens,
        "superfluid_output_tokens": stats.output_tokens,
        "superfluid_recomputed_tokens": stats.recomputed_tokens,
        "superfluid_restored_tokens": stats.restored_tokens,
        "superfluid_imported_tokens": stats.imported_tokens,
        "superfluid_park_refused": stats.park_refused,
        "superfluid_park_dropped": stats.park_dropped,
        "superfluid_thrash_trips": stats.thrash_trips,
        "superfluid_ticks": stats.ticks,
        "superfluid_steps": stats.steps,
        "superfluid_interrupts": stats.interrupts,
        "superfluid_refused_plans": stats.refused_plans,
    }
    for name, value in plain.items():
        yield Row(name, (), {(): value}, is_counter=True)


def figures_of(stats: SchedulerStats) -> dict[str, Any]:
    """Give a snapshot as JSON knows it, with names for its columns."""
    raw = asdict(stats)
    raw["queued"] = {qos.label: stats.queued[qos] for qos in QosClass}
    raw["decode_rates"] = {str(batch): rate for batch, rate in stats.decode_rates}
    raw["finished"] = {reason.value: count for reason, count in stats.finished}
    raw["refused"] = {code.value: count for code, count in stats.refused}
    return raw
