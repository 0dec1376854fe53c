"""Static against continuous batching, and what a mixed step holds."""

from __future__ import annotations

from dataclasses import replace

from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.rules import Batching, Rules
from superfluid_core.simulator.flags import Flags
from superfluid_core.simulator.records import RunResult
from superfluid_core.simulator.scenario import Arrival, Case, Figure, Results, Scenario, figure
from superfluid_core.simulator.scenarios.words import finishes, listed

OUTPUTS = (12, 3, 7, 20, 5, 9, 4, 15)
FOUR_LANES = Flags(limits=SchedulerLimits(lanes=4))


def _jobs() -> tuple[Arrival, ...]:
    return tuple(Arrival(0, 1, output, name=f"r{n}") for n, output in enumerate(OUTPUTS))


def _batching_figures(
    result: RunResult, ends: list[int], golden: dict[str, str]
) -> tuple[Figure, ...]:
    used = sum(each.output for each in result.sessions)
    offered = result.step_count * 4
    values = {
        "steps": str(result.step_count),
        "lane-steps": f"{used} of {offered} ({100 * used // offered} %)",
        "finish": listed(ends),
        "mean finish": f"{sum(ends) / len(ends):g}",
    }
    return tuple(figure(name, value, golden[name]) for name, value in values.items())


CONTINUOUS = Scenario(
    "continuous-batching",
    "outputs 12 3 7 20 5 9 4 15 on 4 lanes, a lane is given on as soon as it is free",
    lambda: (Case("continuous", FOUR_LANES, _jobs()),),
    lambda results: _batching_figures(
        results["continuous"],
        finishes(results["continuous"]),
        {
            "steps": "27",
            "lane-steps": "75 of 108 (69 %)",
            "finish": "12 3 7 20 8 16 12 27",
            "mean finish": "13.125",
        },
    ),
    unit="steps",
)


def _group_ends(result: RunResult) -> list[int]:
    """Read when each session's group was over: those who started together give their lanes back together."""
    ends: dict[int | None, int] = {}
    for each in result.sessions:
        ends[each.started_ns] = max(ends.get(each.started_ns, 0), each.finished_ns or 0)
    return [round(result.units(ends[each.started_ns])) for each in result.sessions]


STATIC = Scenario(
    "static-batching",
    "the same in groups of 4 that run to their longest",
    lambda: (Case("static", replace(FOUR_LANES, rules=Rules(batching=Batching.STATIC)), _jobs()),),
    lambda results: _batching_figures(
        results["static"],
        _group_ends(results["static"]),
        {
            "steps": "35",
            "lane-steps": "75 of 140 (53 %)",
            "finish": "20 20 20 20 35 35 35 35",
            "mean finish": "27.5",
        },
    ),
    unit="steps",
)


def _mixed_figures(results: Results) -> tuple[Figure, ...]:
    steps = [step for step in results["256"].steps if step.prompts][1:]
    goldens = ["1 + 255"] * 9 + ["1 + 155"]
    figures = [
        figure(
            f"step {place}",
            f"{len(step.decoding)} + {sum(tokens for _, tokens in step.prompts)}",
            goldens[place - 1] if place <= len(goldens) else "none",
        )
        for place, step in enumerate(steps, 1)
    ]
    return (*figures, figure("steps with prompt", str(len(steps)), "10"))


MIXED = Scenario(
    "mixed-batch-256",
    "a step budget of 256, one decoder, a 2,450-token prompt",
    lambda: (
        Case(
            "256",
            Flags(limits=SchedulerLimits(step_tokens=256), unit_ns=1_000),
            (Arrival(0, 1, 40, name="decoder"), Arrival(1_000, 2_450, 1, name="prompt")),
        ),
    ),
    _mixed_figures,
    unit="steps",
)

SCENARIOS = (STATIC, CONTINUOUS, MIXED)
