"""The same cases under every combination of some flags' values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from superfluid_core.errors import ConfigError
from superfluid_core.simulator.flags import parse_setting, set_flags
from superfluid_core.simulator.records import RunResult
from superfluid_core.simulator.report import table
from superfluid_core.simulator.scenario import Case

RUNS_MAX = 1_024
Settings = tuple[tuple[str, str], ...]


def parse_over(texts: Sequence[str]) -> tuple[Settings, ...]:
    """Read `name=a,b,c` per flag; returns one tuple of settings per combination."""
    axes: list[list[tuple[str, str]]] = []
    for text in texts:
        name, values = parse_setting(text)
        axes.append([(name, value.strip()) for value in values.split(",") if value.strip()])
        if not axes[-1]:
            raise ConfigError(f"{text[:60]!r} names no value")
    combinations = tuple(product(*axes))
    if len(combinations) > RUNS_MAX:
        raise ConfigError(f"{len(combinations)} combinations; at most {RUNS_MAX}")
    return combinations


def combine(cases: Sequence[Case], combinations: Sequence[Settings]) -> tuple[Case, ...]:
    """Make every case under every combination, each different run once; the label says which."""
    made: dict[object, Case] = {}
    for case in cases:
        for settings in combinations:
            text = " ".join(f"{name}={value}" for name, value in settings)
            flags = set_flags(case.flags, settings)
            # cases that only differed in the swept flags have become one
            run = (repr(flags), case.arrivals, case.until_ns, case.steps_max)
            made.setdefault(run, replace(case, label=f"{case.label} / {text}", flags=flags))
    runs = tuple(made.values())
    if len(runs) > len(combinations):
        return runs
    return tuple(replace(run, label=run.label.partition(" / ")[2]) for run in runs)


def sweep_table(results: Sequence[RunResult], unit: str) -> list[str]:
    """Print a row per run."""
    per = "s" if unit == "ms" else unit.removesuffix("s")
    heads = ("ttft p50", "ttft p99", "itl p50", "itl p99")
    rows = [
        [f"times in {unit}", *heads, f"tokens/{per}", f"good/{per}", "preempted", "again %", "left"]
    ]
    for result in results:
        total, stats = result.all, result.stats
        assert stats is not None, "a run ends with its statistics"
        units = max(1e-9, result.units(result.ended_ns)) / (1_000 if unit == "ms" else 1)
        times: list[int] = [
            getattr(total, name).percentile(percent)
            for name in ("ttft", "itl")
            for percent in (50, 99)
        ]
        rows.append(
            [
                result.label,
                *(f"{result.units(each):.2f}" for each in times),
                f"{total.output_tokens / units:.2f}",
                f"{total.good_tokens / units:.2f}",
                str(stats.preemptions),
                f"{100 * result.recompute_ratio:.1f}",
                str(result.stranded),
            ]
        )
    return table(rows)
