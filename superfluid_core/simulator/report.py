"""What a person or a program reads of a run: tables, a timeline of steps, JSON.

Times are printed in the scenario's unit. Percentiles are over all sessions of a class and cohort; goodput counts output
tokens of sessions within the service level.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from superfluid_core.simulator.distribution import Distribution
from superfluid_core.simulator.records import Cohort, RunResult, StepRecord
from superfluid_core.simulator.scenario import Figure

PERCENTILES = (50, 90, 99)
SECOND_NS = 1_000_000_000
NAMES_MAX = 6


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns: the first to the left, the others to the right. The first row is the head."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = []
    for place, row in enumerate(rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
        if not place:
            lines.append("  ".join("-" * width for width in widths))
    return lines


def _time(value: float, unit_ns: int) -> str:
    units = value / unit_ns
    return f"{units:.0f}" if units >= 1_000 or units == int(units) else f"{units:.2f}"


def _percentiles(values: Distribution, unit_ns: int) -> list[str]:
    if not values.count:
        return ["-"] * len(PERCENTILES)
    return [_time(values.percentile(percent), unit_ns) for percent in PERCENTILES]


def cohort_table(result: RunResult, unit: str) -> list[str]:
    heads = [f"{name} p{percent}" for name in ("ttft", "itl") for percent in PERCENTILES]
    rows = [[f"times in {unit}", "arrived", "ended", "refused", "wait", *heads]]
    cohorts: list[tuple[str, Cohort]] = list(result.cohorts.items())
    if len(cohorts) > 1:
        cohorts.append(("all", result.all))
    for name, each in cohorts:
        counts = [str(each.arrived), str(each.finished), str(each.rejected)]
        wait = _time(each.wait.mean, result.unit_ns) if each.wait.count else "-"
        cells = _percentiles(each.ttft, result.unit_ns) + _percentiles(each.itl, result.unit_ns)
        rows.append([name, *counts, wait, *cells])
    return table(rows)


def summary(result: RunResult, unit: str) -> list[str]:
    """Sum up the whole run in a few lines."""
    total, stats = result.all, result.stats
    assert stats is not None, "a run ends with its statistics"
    seconds = result.ended_ns / SECOND_NS
    rate = total.output_tokens / seconds if seconds else 0.0
    good = total.good_tokens / seconds if seconds else 0.0
    per = "s" if unit == "ms" else unit.removesuffix("s")
    if unit != "ms":
        units = max(1e-9, result.units(result.ended_ns))
        rate, good = total.output_tokens / units, total.good_tokens / units
    blocks = stats.blocks
    mean_pct = 100 * result.occupancy.mean / blocks
    most_pct = 100 * result.occupancy.largest / blocks
    lines = [
        "; ".join(
            (
                f"{result.step_count} steps in {_time(result.ended_ns, result.unit_ns)} {unit}",
                f"throughput {rate:.2f}, goodput {good:.2f} output tokens/{per}",
            )
        ),
        "; ".join(
            (
                f"preemptions {stats.preemptions}",
                f"recomputed/new {100 * result.recompute_ratio:.1f} %",
                f"prefix hits {stats.prefix_hit_tokens} tokens",
                f"pool {mean_pct:.1f} % on average, {most_pct:.1f} % at most",
            )
        ),
    ]
    if len(result.tenants) > 1:
        lines.append(f"fairness between {len(result.tenants)} tenants: {result.fairness:.3f}")
    if result.stranded:
        lines.append(f"{result.stranded} sessions had not ended when the run did")
    return lines


def timeline(result: RunResult, steps_max: int) -> list[str]:
    """Print what the first steps were made of."""
    rows = [["step", "from", "to", "decode", "prompt", "free", "queued", "composition"]]
    rows += [
        [
            str(step.number),
            _time(step.start_ns, result.unit_ns),
            _time(step.end_ns, result.unit_ns),
            str(len(step.decoding)),
            str(sum(tokens for _, tokens in step.prompts)),
            str(step.free),
            str(step.queued),
            composition(step),
        ]
        for step in result.steps[:steps_max]
    ]
    left = result.step_count - min(steps_max, len(result.steps))
    return table(rows) + ([f"... and {left} more steps"] if left else [])


def composition(step: StepRecord) -> str:
    """Write what a step carried, as in `A+1 C+7, B preempted`; long lists are cut."""
    parts = [f"{name}+1" for name in step.decoding]
    parts += [f"{name}+{tokens}" for name, tokens in step.prompts]
    if len(parts) > NAMES_MAX:
        parts = [*parts[:NAMES_MAX], f"and {len(parts) - NAMES_MAX} more"]
    words = [" ".join(parts)]
    words += [f"{each.name} preempted" for each in step.preempted]
    words += [f"{name} finished" for name in step.finished[:NAMES_MAX]]
    return ", ".join(words)


def figure_lines(figures: Iterable[Figure]) -> list[str]:
    lines = []
    for each in figures:
        if each.golden is None:
            lines.append(f"  {each.name}: {each.value}")
        elif each.is_met:
            lines.append(f"= {each.name}: {each.value}")
        else:
            lines.append(f"! {each.name}: {each.value}, must be {each.golden}")
    return lines


def render(result: RunResult, unit: str, steps_max: int = 0) -> str:
    """Print one case."""
    flags = " ".join(f"{name}={value}" for name, value in result.flags.items())
    lines = [f"## {result.label}" + (f"   [{flags}]" if flags else "")]
    lines += cohort_table(result, unit)
    lines += summary(result, unit)
    if steps_max:
        lines += ["", *timeline(result, steps_max)]
    return "\n".join(lines)


# --- JSON -----------------------------------------------------------------------------------------


def _values(values: Distribution) -> dict[str, Any]:
    numbers: dict[str, Any] = {"count": values.count, "mean": values.mean, "max": values.largest}
    return numbers | {f"p{percent}": values.percentile(percent) for percent in PERCENTILES}


def _cohort(each: Cohort) -> dict[str, Any]:
    return {
        "arrived": each.arrived,
        "finished": each.finished,
        "rejected": each.rejected,
        "good": each.good,
        "output_tokens": each.output_tokens,
        "good_tokens": each.good_tokens,
        "ttft_ns": _values(each.ttft),
        "itl_ns": _values(each.itl),
        "wait_ns": _values(each.wait),
        "stay_ns": _values(each.stay),
    }


def as_json(result: RunResult, steps_max: int = 0) -> dict[str, Any]:
    """All of one case as plain values; times are nanoseconds."""
    stats = result.stats
    assert stats is not None, "a run ends with its statistics"
    return {
        "case": result.label,
        "flags": result.flags,
        "unit_ns": result.unit_ns,
        "ended_ns": result.ended_ns,
        "busy_ns": result.busy_ns,
        "steps": result.step_count,
        "lane_steps": result.lane_steps,
        "prompt_tokens": result.prompt_tokens,
        "mean_in_system": result.mean_in_system,
        "stranded": result.stranded,
        "preemptions": stats.preemptions,
        "recompute_ratio": result.recompute_ratio,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "blocks": stats.blocks,
        "blocks_used": _values(result.occupancy),
        "fairness": result.fairness,
        "cohorts": {name: _cohort(each) for name, each in result.cohorts.items()},
        "tenants": {name: _cohort(each) for name, each in result.tenants.items()},
        "timeline": [
            {
                "step": step.number,
                "start_ns": step.start_ns,
                "end_ns": step.end_ns,
                "decode": list(step.decoding),
                "prompt": [list(each) for each in step.prompts],
                "free_blocks": step.free,
                "queued": step.queued,
                "preempted": [each.name for each in step.preempted],
                "finished": step.finished,
            }
            for step in result.steps[:steps_max]
        ],
    }
