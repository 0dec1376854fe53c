"""The figures of a simulated fleet: distributions per class, sums over nodes, one table for several policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from superfluid_core.scheduler.stats import SchedulerStats
from superfluid_core.session import QosClass
from superfluid_core.simulator.distribution import Distribution
from superfluid_core.simulator.flags import MS
from superfluid_core.simulator.report import table


@dataclass(slots=True)
class ClassFigures:
    """One class: time to the first token, and until the last one."""

    finished: int = 0
    ttft: Distribution = field(default_factory=Distribution)
    stay: Distribution = field(default_factory=Distribution)


@dataclass(slots=True)
class FleetResult:
    """One policy over one stream of sessions. `waited` found no node at first; `rate` is sessions a second."""

    policy: str
    nodes: int
    rate: float
    arrived: int = 0
    waited: int = 0
    waiting_max: int = 0
    ended_ns: int = 0
    busy_ns: int = 0
    steps: int = 0
    lane_steps: int = 0
    reports: int = 0
    preemptions: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    recomputed_tokens: int = 0
    accepted_max: int = 0
    classes: dict[QosClass, ClassFigures] = field(
        default_factory=lambda: {qos: ClassFigures() for qos in QosClass}
    )

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add one node's totals, at the end."""
        self.preemptions += stats.preemptions
        self.output_tokens += stats.output_tokens
        self.prompt_tokens += stats.prompt_tokens
        self.prefix_hit_tokens += stats.prefix_hit_tokens
        self.recomputed_tokens += stats.recomputed_tokens
        self.accepted_max = max(self.accepted_max, stats.accepted)

    @property
    def finished(self) -> int:
        return sum(each.finished for each in self.classes.values())

    @property
    def busy_pct(self) -> float:
        return 100 * self.busy_ns / max(1, self.ended_ns * self.nodes)

    @property
    def skew(self) -> float:
        """Sessions of the fullest node over the mean."""
        return self.accepted_max * self.nodes / max(1, self.arrived)

    def _over_all(self, name: str) -> Distribution:
        total = Distribution()
        for each in self.classes.values():
            total.merge(getattr(each, name))
        return total

    def as_json(self) -> dict[str, Any]:
        """All figures as plain values; times are nanoseconds."""
        rows: dict[str, Any] = {}
        for qos, each in self.classes.items():
            rows[qos.label] = {
                "finished": each.finished,
                "ttft_ns": _percentiles(each.ttft),
                "stay_ns": _percentiles(each.stay),
            }
        plain = ("policy", "nodes", "rate", "arrived", "waited", "waiting_max", "ended_ns", "steps")
        sums = ("reports", "preemptions", "output_tokens", "prompt_tokens", "prefix_hit_tokens")
        names = (*plain, *sums, "finished", "busy_pct", "skew")
        figures: dict[str, Any] = {name: getattr(self, name) for name in names}
        return figures | {"classes": rows}

    @staticmethod
    def table(results: Sequence[FleetResult]) -> list[str]:
        """Print a row per policy and class, then a line per policy."""
        heads = ("ended", "ttft p50", "p90", "p99", "until the end p50", "p90", "p99")
        rows = [["times in ms", *heads]]
        lines = []
        for result in results:
            for qos, each in result.classes.items():
                rows.append(
                    _row(f"{result.policy} {qos.label}", each.finished, each.ttft, each.stay)
                )
            overall = (result._over_all("ttft"), result._over_all("stay"))
            rows.append(_row(f"{result.policy} all", result.finished, *overall))
            lines.append(result._line())
        return [*table(rows), "", *lines]

    def _line(self) -> str:
        seconds = self.ended_ns / 1e9
        return (
            f"{self.policy}: {self.finished} of {self.arrived} sessions on {self.nodes} nodes in {seconds:.1f} s "
            f"({self.rate:.0f} arrivals/s), {self.output_tokens / max(1e-9, seconds):.0f} output tokens/s, "
            f"nodes busy {self.busy_pct:.1f} %, fullest node {self.skew:.2f} of the mean, "
            f"{self.waited} waited in the head (at most {self.waiting_max}), {self.preemptions} preemptions, "
            f"prefix hits {self.prefix_hit_tokens} of {self.prefix_hit_tokens + self.prompt_tokens} prompt tokens"
        )


def _percentiles(values: Distribution) -> dict[str, int]:
    return {f"p{percent}": values.percentile(percent) for percent in (50, 90, 99)}


def _row(name: str, ended: int, ttft: Distribution, stay: Distribution) -> list[str]:
    times = [values.percentile(p) for values in (ttft, stay) for p in (50, 90, 99)]
    return [name, str(ended), *(f"{each / MS:.1f}" for each in times)]
