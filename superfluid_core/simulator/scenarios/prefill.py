"""A long prompt beside decoding lanes: the gap that it tears, and how chunks close it."""

from __future__ import annotations

from dataclasses import replace

from superfluid_core.scheduler.rules import PrefillMode, Rules
from superfluid_core.simulator.flags import Flags
from superfluid_core.simulator.records import RunResult
from superfluid_core.simulator.scenario import Arrival, Case, Figure, Results, Scenario, figure
from superfluid_core.simulator.scenarios.words import units

# small, so that no time limit of a tick comes into it
UNIT_NS = 1_000
PROMPT = 4_000
STREAM = Flags(cost="stream(10, 50)", unit_ns=UNIT_NS)
MONOLITHIC = Rules(prefill_mode=PrefillMode.MONOLITHIC)
BUDGETS = (4004, 2048, 512, 256)


def _arrivals() -> tuple[Arrival, ...]:
    """Four decoders from 0, the long prompt after their third step of ten units."""
    decoders = tuple(Arrival(0, 1, 60, name=f"d{n}") for n in range(4))
    return (*decoders, Arrival(30 * UNIT_NS, PROMPT, 2, name="long"))


def _budget(tokens: int) -> Flags:
    limits = replace(STREAM.limits, step_tokens=tokens)
    return replace(STREAM, limits=limits)


def _first_token(result: RunResult) -> str:
    ttft = result.session("long").ttft_ns
    return "never" if ttft is None else units(result, ttft)


def _worst_gap(result: RunResult) -> str:
    """Find the longest pause that a decoder saw while the prompt was computed."""
    gaps = [step.end_ns - step.start_ns for step in result.steps if step.decoding and step.prompts]
    return units(result, max(gaps, default=0))


def _interference(results: Results) -> tuple[Figure, ...]:
    result = results["monolithic"]
    return (
        figure("gap of the decoders", _worst_gap(result), "80.08"),
        figure("first token after", _first_token(result), "80.08"),
    )


def _chunked(results: Results) -> tuple[Figure, ...]:
    goldens = (
        (1, "80.08", "80.08"),
        (2, "80.16", "40.96"),
        (8, "81.68", "10.24"),
        (16, "160.00", "10.00"),
    )
    figures: list[Figure] = []
    for (label, result), (steps, first, gap) in zip(results.items(), goldens, strict=True):
        own = [step for step in result.steps if any(name == "long" for name, _ in step.prompts)]
        figures += [
            figure(f"{label}: steps", str(len(own)), str(steps)),
            figure(f"{label}: first token", _first_token(result), first),
            figure(f"{label}: worst gap", _worst_gap(result), gap),
        ]
    return tuple(figures)


INTERFERENCE = Scenario(
    "prefill-interference",
    "4 decoders, a 4,000-token prompt before step 4, the whole prompt in one step",
    lambda: (Case("monolithic", replace(STREAM, rules=MONOLITHIC), _arrivals()),),
    _interference,
    unit="units",
)
CHUNKED = Scenario(
    "chunked-prefill",
    "the same under step budgets of 4004, 2048, 512 and 256 tokens",
    lambda: tuple(Case(f"step-tokens={n}", _budget(n), _arrivals()) for n in BUDGETS),
    _chunked,
    unit="units",
)
SCENARIOS = (INTERFERENCE, CHUNKED)
