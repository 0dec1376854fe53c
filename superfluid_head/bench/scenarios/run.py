"""Runs one scenario: a JSON line a round, a table of medians, and the verdict against every bar.

Knows no scenario but by the list. The first round warms up; refusals are the scenario's to count as failures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from superfluid_core.progress import Meter
from superfluid_head.bench.report import json_line, median, table
from superfluid_head.bench.rig import RigError
from superfluid_head.bench.scenarios import NAMES, scenario_named
from superfluid_head.bench.scenarios.base import Figures, Plan, Scenario, Verdict

Say = Callable[[str], None]


def cores() -> int:
    """Give the processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measured(scenario: Scenario, say: Say) -> list[Figures]:
    """Run the warm-up and all counted rounds. Raises RigError."""
    rounds: list[Figures] = []
    count = scenario.plan.rounds or scenario.rounds
    where = "peer" if scenario.plan.base_url else scenario.engine_in_use
    with ExitStack() as stack:
        scenario.setup(stack)
        meter = stack.enter_context(Meter(scenario.name, count + 1, has_lines=False))
        for number in range(count + 1):
            figures = {name: +value for name, value in scenario.round(number).items()}
            fields = {"scenario": scenario.name, "round": number, "warm_up": number == 0}
            say(json_line(fields | {"engine": where, "cores": cores(), **figures}))
            meter.step()
            if number > 0:
                rounds.append(figures)
    return rounds


def listing() -> str:
    """Every scenario with what it does, and where it runs only in a rig of its own, why."""
    rows: list[list[object]] = []
    for name in NAMES:
        kind = scenario_named(name)
        rows.append([name, kind.engine, f"  {kind.about}", f"  {kind.needs_rig or '-'}"])
    widths = [max(len(str(row[n])) for row in rows) for n in range(4)]
    lines = [
        "  ".join(str(cell).ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def medians(rounds: Sequence[Figures]) -> str:
    names = list(dict.fromkeys(name for figures in rounds for name in figures))
    rows: list[list[object]] = []
    for name in names:
        values = [figures[name] for figures in rounds if name in figures]
        rows.append([name, median(values), min(values), max(values), len(values)])
    return table(["figure", "median", "min", "max", "rounds"], rows)


def run_scenario(kind: type[Scenario], plan: Plan, say: Say, *, is_json: bool = False) -> bool:
    """Measure and judge; true when every bar is met. `is_json` leaves the table out. Raises RigError."""
    if plan.base_url and kind.needs_rig:
        raise RigError(f"{kind.name} cannot run against a server of others: {kind.needs_rig}")
    scenario = kind(plan)
    rounds = measured(scenario, say)
    verdicts: list[Verdict] = scenario.judge(rounds)
    is_passed = all(verdict.is_met for verdict in verdicts)
    if is_json:
        lines = [verdict.words for verdict in verdicts]
        say(json_line({"scenario": kind.name, "passed": is_passed, "verdicts": lines}))
        return is_passed
    say(f"\n{kind.name}: {kind.about}; {cores()} cores\n\n" + medians(rounds) + "\n")
    for words in (*scenario.notes, *(verdict.words for verdict in verdicts)):
        say(words)
    return is_passed
