"""`superfluid simulate`: the real scheduler in virtual time, on the command line.

It owns arguments, files and progress; what is simulated and how it reads is `superfluid_core.simulator`.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import click

from superfluid_core.engine.record import replay
from superfluid_core.errors import ConfigError
from superfluid_core.placement.policies import Policy
from superfluid_core.progress import Meter
from superfluid_core.simulator.flags import Flags, parse_setting, set_flags
from superfluid_core.simulator.fleet import FleetPlan, run_fleet
from superfluid_core.simulator.fleet_report import FleetResult
from superfluid_core.simulator.plot.files import check_plot_path, pictures_of, write_plot
from superfluid_core.simulator.records import RunResult
from superfluid_core.simulator.report import as_json, figure_lines, render
from superfluid_core.simulator.run import run_case
from superfluid_core.simulator.scenario import Case
from superfluid_core.simulator.scenarios import SCENARIOS, find_scenario
from superfluid_core.simulator.sweep import combine, parse_over, sweep_table
from superfluid_core.simulator.trace import read_trace
from superfluid_head.commands.groups import SuggestingGroup

TRACE_COST = "roofline(h100, 8b, 50)"
PROGRESS_FROM = 2_000
LINES_FROM = 100_000

_SET = click.option(
    "--set", "settings", multiple=True, metavar="FLAG=VALUE", help="Change a flag; repeatable."
)
_JSON = click.option("--json", "is_json", is_flag=True, help="Print JSON.")
_PLOT = click.option(
    "--plot", metavar="FILE", help="Also write a plot: FILE.html (self-contained) or FILE.png."
)
_TIMELINE = click.option(
    "--timeline",
    type=click.IntRange(0, 4_096),
    default=0,
    metavar="N",
    help="Print what the first N steps were made of.",
)


@click.group("simulate", cls=SuggestingGroup)
def simulate() -> None:
    """Run the real scheduler in virtual time."""


@simulate.command("list")
def list_() -> None:
    """Name the scenarios."""
    width = max(len(name) for name in SCENARIOS)
    for name, scenario in SCENARIOS.items():
        click.echo(f"{name:<{width}}  {scenario.title}")


@simulate.command("run")
@click.argument("name")
@_SET
@_JSON
@_PLOT
@_TIMELINE
def run(
    name: str,
    *,
    settings: tuple[str, ...],
    is_json: bool,
    plot: str | None,
    timeline: int,
) -> None:
    """Run one scenario. Lines with = have a known answer and meet it; lines with ! do not.

    With --set the known answers do not apply and the figures are printed without them. Exits with status 1 when a known
    answer is missed.
    """
    _check_plot(plot)
    scenario = find_scenario(name)
    cases = _with_settings(scenario.cases(), settings)
    results = {case.label: _run_case(case) for case in cases}
    figures = scenario.figures(results)
    if settings:
        figures = tuple(replace(each, golden=None) for each in figures)
    runs = list(results.values())
    text = "\n\n".join(render(each, scenario.unit, timeline) for each in runs)
    text += "\n\n" + "\n".join(figure_lines(figures))
    if is_json:
        values = [{"name": f.name, "value": f.value, "must_be": f.golden} for f in figures]
        cases_json = [as_json(each, timeline) for each in runs]
        _echo_json({"scenario": name, "figures": values, "cases": cases_json})
    else:
        click.echo(f"{name}: {scenario.title}\n\n{text}")
    if plot is not None:
        write_plot(plot, f"{name}: {scenario.title}", pictures_of(runs, scenario.unit), text)
    if not all(each.is_met for each in figures):
        raise click.exceptions.Exit(1)


@simulate.command("sweep")
@click.argument("name")
@click.option(
    "--over",
    "axes",
    multiple=True,
    required=True,
    metavar="FLAG=A,B,C",
    help="Values of one flag; several flags are combined.",
)
@_SET
@_JSON
@_PLOT
def sweep(
    name: str,
    *,
    axes: tuple[str, ...],
    settings: tuple[str, ...],
    is_json: bool,
    plot: str | None,
) -> None:
    """Run one scenario under every combination of some flags' values."""
    _check_plot(plot)
    scenario = find_scenario(name)
    cases = combine(_with_settings(scenario.cases(), settings), parse_over(axes))
    with Meter("runs", len(cases), has_lines=False) as meter:
        results = [_counted(run_case, case, meter.step) for case in cases]
    text = "\n".join(sweep_table(results, scenario.unit))
    if is_json:
        _echo_json({"scenario": name, "cases": [as_json(each) for each in results]})
    else:
        click.echo(text)
    if plot is not None:
        write_plot(plot, f"{name}: sweep", pictures_of(results, scenario.unit), text)


@simulate.command("trace")
@click.argument("file")
@_SET
@_JSON
@_PLOT
@_TIMELINE
def trace(
    file: str,
    *,
    settings: tuple[str, ...],
    is_json: bool,
    plot: str | None,
    timeline: int,
) -> None:
    """Replay a recorded arrival trace: a JSON object a line.

    Members: timestamp (seconds), prompt_tokens, output_tokens, and optionally class, tenant, prefix, prefix_tokens.
    """
    _check_plot(plot)
    flags = set_flags(Flags(cost=TRACE_COST), [parse_setting(each) for each in settings])
    result = _run_case(Case(file, flags, read_trace(file)))
    text = render(result, "ms", timeline)
    if is_json:
        _echo_json({"trace": file, "cases": [as_json(result, timeline)]})
    else:
        click.echo(text)
    if plot is not None:
        write_plot(plot, f"trace {file}", pictures_of([result], "ms"), text)


@simulate.command("replay")
@click.argument("file")
@_JSON
def replay_(file: str, *, is_json: bool) -> None:
    """Replay what `superfluid-noded --record FILE` wrote; exit 1 where the scheduler decides otherwise."""
    try:
        with open(file, encoding="utf-8") as lines:
            done = replay(lines)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recording {file}: {error}") from None
    if is_json:
        _echo_json({"recording": file, **asdict(done)})
    else:
        click.echo(f"{done.calls} calls replayed, digest {done.digest}")
        if not done.is_whole and done.diverged_at is None:
            click.echo("the recording has no end: its node did not stop in order")
        if done.diverged_at is not None:
            click.echo(f"line {done.diverged_at}: this scheduler decides otherwise", err=True)
    if done.diverged_at is not None:
        sys.exit(1)


@simulate.command("fleet")
@click.option("--nodes", type=click.IntRange(1, 10_000), default=10, show_default=True)
@click.option("--sessions", type=click.IntRange(1), default=10_000, show_default=True)
@click.option(
    "--placement",
    "policies",
    type=click.Choice([*(str(each) for each in Policy), "all"]),
    default=str(Policy.LOAD_AWARE),
    show_default=True,
)
@click.option(
    "--prompt", type=click.IntRange(1), default=300, show_default=True, help="Mean prompt tokens."
)
@click.option(
    "--output", type=click.IntRange(1), default=60, show_default=True, help="Mean output tokens."
)
@click.option(
    "--load",
    type=click.FloatRange(0.01, 4.0),
    default=0.8,
    show_default=True,
    help="Offered load over capacity.",
)
@click.option("--seed", type=int, default=1, show_default=True)
@_SET
@_JSON
def fleet(*, policies: str, settings: tuple[str, ...], is_json: bool, **plan: Any) -> None:
    """Place sessions on many nodes, each with a scheduler of its own, by the head's placement code."""
    base = FleetPlan(**plan)
    base = replace(base, flags=set_flags(base.flags, [parse_setting(each) for each in settings]))
    chosen = list(Policy) if policies == "all" else [Policy(policies)]
    results: list[FleetResult] = []
    for policy in chosen:
        with _rare_collections(), _meter(str(policy), base.sessions) as meter:
            results.append(run_fleet(replace(base, policy=policy), meter.step))
    if is_json:
        _echo_json({"fleet": [each.as_json() for each in results]})
    else:
        click.echo("\n".join(FleetResult.table(results)))


# --- within ---------------------------------------------------------------------------------------


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for circles of references rarely: there are none, and looking costs a sixth of a long run."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 1_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _check_plot(path: str | None) -> None:
    if path is not None:
        check_plot_path(path)


def _with_settings(cases: Sequence[Case], settings: Sequence[str]) -> tuple[Case, ...]:
    pairs = [parse_setting(each) for each in settings]
    return tuple(replace(case, flags=set_flags(case.flags, pairs)) for case in cases)


def _meter(label: str, sessions: int) -> Meter:
    """Show how far a run has come; where nobody looks, long ones alone have a word."""
    return Meter(label, sessions, has_lines=sessions >= LINES_FROM)


def _run_case(case: Case) -> RunResult:
    sessions = len(case.arrivals) if isinstance(case.arrivals, tuple) else 0
    if sessions < PROGRESS_FROM:
        return run_case(case)
    with _meter(case.label, sessions) as meter:
        return run_case(case, meter.step)


def _counted(run_: Callable[[Case], RunResult], case: Case, step: Callable[[], None]) -> RunResult:
    result = run_(case)
    step()
    return result


def _echo_json(value: object) -> None:
    try:
        click.echo(json.dumps(value, indent=2, allow_nan=False))
    except ValueError as error:
        raise ConfigError(f"a figure is not a number: {error}") from error
