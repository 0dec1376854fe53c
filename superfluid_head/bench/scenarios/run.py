"""Runs one scenario: a JSON line a round, a table of medians, and the verdict against every bar.

Knows no scenario but by the list. The first round warms up; refusals are the scenario's to count as failures. With other servers
beside ours every round visits all of them in turn, each with the same requests, and ours are judged.
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
from superfluid_head.bench.scenarios.beside import Player, alone, together

Say = Callable[[str], None]


def cores() -> int:
    """Give the processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measured(kind: type[Scenario], plan: Plan, say: Say) -> list[Player]:
    """Run the warm-up and all counted rounds of every server. Raises RigError when one of ours breaks."""
    count = plan.rounds or kind.rounds
    with ExitStack() as stack:
        entered = together(kind, plan, stack, say) if plan.is_beside else alone(kind, plan, stack)
        playing = list(entered)
        meter = stack.enter_context(Meter(kind.name, count + 1, has_lines=False))
        for number in range(count + 1):
            for player in list(playing):
                try:
                    play(player, number, say)
                except RigError as error:
                    if player.is_ours:
                        raise
                    say(f"{player.name}: left out from round {number} on: {error}")
                    playing.remove(player)
            meter.step()
    return entered


def play(player: Player, number: int, say: Say) -> None:
    """Play one round against one server and say what was measured; round 0 is not kept."""
    scenario = player.scenario
    figures = {name: +value for name, value in scenario.round(number).items()}
    fields = {"scenario": scenario.name, "round": number, "warm_up": number == 0}
    say(json_line(fields | {"engine": player.name, "cores": cores(), **figures}))
    if number > 0:
        player.rounds.append(figures)


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
    rows: list[list[object]] = []
    for name in _names(rounds):
        values = [figures[name] for figures in rounds if name in figures]
        rows.append([name, median(values), min(values), max(values), len(values)])
    return table(["figure", "median", "min", "max", "rounds"], rows)


def side_by_side(players: Sequence[Player]) -> str:
    """Draw the medians of every server, a column each."""
    names = _names([figures for player in players for figures in player.rounds])
    rows: list[list[object]] = []
    for name in names:
        found = [
            [figures[name] for figures in player.rounds if name in figures] for player in players
        ]
        rows.append([name, *(median(values) for values in found)])
    rows.append(["rounds", *(len(player.rounds) for player in players)])
    return table(["median", *(player.name for player in players)], rows)


def _names(rounds: Sequence[Figures]) -> list[str]:
    return list(dict.fromkeys(name for figures in rounds for name in figures))


def run_scenario(kind: type[Scenario], plan: Plan, say: Say, *, is_json: bool = False) -> bool:
    """Measure and judge; true when every bar is met. `is_json` leaves the table out. Raises RigError."""
    if (plan.base_url or plan.is_beside) and kind.needs_rig:
        raise RigError(f"{kind.name} cannot run against a server of others: {kind.needs_rig}")
    players = measured(kind, plan, say)
    judged = [
        (player, player.scenario.judge(player.rounds)) for player in players if player.is_ours
    ]
    is_passed = all(verdict.is_met for _, verdicts in judged for verdict in verdicts)
    if is_json:
        lines = [_words(player, each, plan) for player, every in judged for each in every]
        say(json_line({"scenario": kind.name, "passed": is_passed, "verdicts": lines}))
        return is_passed
    drawn = side_by_side(players) if plan.is_beside else medians(players[0].rounds)
    say(f"\n{kind.name}: {kind.about}; {cores()} cores\n\n{drawn}\n")
    for player, verdicts in judged:
        for words in (*player.scenario.notes, *(_words(player, each, plan) for each in verdicts)):
            say(words)
    return is_passed


def _words(player: Player, verdict: Verdict, plan: Plan) -> str:
    return f"{verdict.words} ({player.name})" if plan.is_beside else verdict.words
