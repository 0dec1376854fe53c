"""The known answers, written down a second time: a scenario that moves one of them must say why."""

from __future__ import annotations

from functools import cache

import pytest

from superfluid_core.simulator.run import run_scenario
from superfluid_core.simulator.scenario import Figure
from superfluid_core.simulator.scenarios import SCENARIOS, find_scenario

KNOWN: dict[str, dict[str, str]] = {
    "decode-utilization": {
        "batch 1: step ms": "5.01",
        "batch 8: step ms": "8.74",
        "batch 16: step ms": "13.00",
        "batch 32: step ms": "21.52",
        "batch 1: tok/s": "199",
        "batch 8: tok/s": "915",
        "batch 16: tok/s": "1231",
        "batch 32: tok/s": "1487",
        "batch 1: FLOP %": "1.94",
        "batch 8: FLOP %": "8.90",
        "batch 16: FLOP %": "11.96",
        "batch 32: FLOP %": "14.45",
        "sequences that fit in 24 GB": "36",
    },
    "static-batching": {
        "steps": "35",
        "lane-steps": "75 of 140 (53 %)",
        "finish": "20 20 20 20 35 35 35 35",
        "mean finish": "27.5",
    },
    "continuous-batching": {
        "steps": "27",
        "lane-steps": "75 of 108 (69 %)",
        "finish": "12 3 7 20 8 16 12 27",
        "mean finish": "13.125",
    },
    "prefill-interference": {"gap of the decoders": "80.08", "first token after": "80.08"},
    "chunked-prefill": {
        "step-tokens=4004: steps": "1",
        "step-tokens=2048: steps": "2",
        "step-tokens=512: steps": "8",
        "step-tokens=256: steps": "16",
        "step-tokens=4004: first token": "80.08",
        "step-tokens=2048: first token": "80.16",
        "step-tokens=512: first token": "81.68",
        "step-tokens=256: first token": "160.00",
        "step-tokens=4004: worst gap": "80.08",
        "step-tokens=2048: worst gap": "40.96",
        "step-tokens=512: worst gap": "10.24",
        "step-tokens=256: worst gap": "10.00",
    },
    "policies": {
        "fifo: order": "A B C D E F",
        "fifo: mean wait": "43.17",
        "shortest: order": "A D F B C E",
        "shortest: mean wait": "37.00",
        "priority: order": "A B E C D F",
        "priority: mean wait": "47.83",
    },
    "starvation": {
        "without aging: the long job starts at": "80",
        "with aging: the long job starts at": "16",
    },
    "littles-law": {
        "p=0.20: L": "3.96",
        "p=0.36: L": "8.93",
        "p=0.44: L": "447.50",
        "p=0.44 max-queue=16: L": "20.30",
        "p=0.20: lambda": "0.1976",
        "p=0.36: lambda": "0.3581",
        "p=0.44: lambda": "0.3996",
        "p=0.44 max-queue=16: lambda": "0.3996",
        "p=0.20: W": "20.06",
        "p=0.36: W": "24.93",
        "p=0.44: W": "1019.46",
        "p=0.44 max-queue=16: W": "50.71",
        "p=0.20: rejected": "0",
        "p=0.36: rejected": "0",
        "p=0.44: rejected": "0",
        "p=0.44 max-queue=16: rejected": "815",
        "p=0.20: arrived": "3955",
        "p=0.36: arrived": "7172",
        "p=0.44: arrived": "8831",
        "p=0.44 max-queue=16: arrived": "8831",
    },
    "preempt-recompute": {
        "preempted": "step 21: r3, 4 blocks, 60 tokens",
        "KV tokens after step 40": "r0=100 r1=90 r2=110",
        "waiting": "r3",
    },
    "swap-or-recompute": {
        "swap 2,000 tokens": "16.6 ms",
        "recompute 2,000 tokens": "388.9 ms",
        "a copy takes beside its bytes": "0.010 ms",
        "8 tokens at 31.5 GB/s": "0.087 ms against 0.002 ms: auto chooses recompute",
        "38 tokens at 31.5 GB/s": "0.336 ms against 0.186 ms: auto chooses recompute",
        "39 tokens at 31.5 GB/s": "0.345 ms against 0.381 ms: auto chooses swap",
        "2000 tokens at 31.5 GB/s": "16.664 ms against 381.660 ms: auto chooses swap",
        "auto at 31.5 GB/s swaps from": "39 tokens",
        "2000 tokens at 1 GB/s": "524.308 ms against 381.660 ms: auto chooses recompute",
        "auto at 1 GB/s swaps from": "no length",
    },
    "tenants": {
        "fifo: B finishes at": "40, 40",
        "fair: B finishes at": "20, 20",
        "fair, cap 3: B finishes at": "11, 20",
    },
    "disaggregation": {
        "1024 tokens: prefill": "33.3 ms",
        "8192 tokens: prefill": "266.1 ms",
        "32768 tokens: prefill": "1064.2 ms",
        "1024 tokens: transfer ms at 450, 50, 12.5 GB/s": "0.30 2.68 10.74",
        "8192 tokens: transfer ms at 450, 50, 12.5 GB/s": "2.39 21.47 85.90",
        "32768 tokens: transfer ms at 450, 50, 12.5 GB/s": "9.54 85.90 343.60",
    },
    "mixed-batch-256": {
        **{f"step {number}": "1 + 255" for number in range(1, 10)},
        "step 10": "1 + 155",
        "steps with prompt": "10",
    },
    "token-level-preemption": {
        "step 1": "A+8 (5 free)",
        "step 2": "A+2 B+6 (2 free)",
        "step 3": "A+1 B+1 C+5 (0 free)",
        "step 4": "A+1 B+1 C+1 (0 free)",
        "step 5": "A+1 B+1, C preempted, A finished (0 free)",
        "step 6": "B+1 C+7, C finished (2 free)",
        "step 7": "B+1, B finished (4 free)",
        "steps": "7",
    },
    "oversized-prompts": {
        "whole prompts, 512: stranded": "55",
        "chunked, 64: stranded": "0",
        "chunked, 256: stranded": "0",
        "chunked, 512: stranded": "0",
        "chunked, 2048: stranded": "0",
    },
    "thrash": {"over 20 % without the gate": "yes", "at least twice": "yes"},
    "agents-and-chat": {
        "at most one step and its own prefill": "yes",
        "agents that finished": "8 of 8",
    },
    "shared-prefix": {"the prefix was computed": "1 times"},
}
SLOW = frozenset(("littles-law", "thrash", "swap-or-recompute"))


@cache
def _figures(name: str) -> tuple[Figure, ...]:
    scenario = find_scenario(name)
    return scenario.figures(run_scenario(scenario))


def _marked(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name


@pytest.mark.parametrize("name", [_marked(name) for name in KNOWN])
def test_a_scenario_prints_its_known_answers_exactly(name: str) -> None:
    printed = {figure.name: figure.value for figure in _figures(name)}
    assert {each: printed.get(each) for each in KNOWN[name]} == KNOWN[name]


@pytest.mark.parametrize("name", [_marked(name) for name in KNOWN])
def test_what_the_command_calls_met_is_met(name: str) -> None:
    assert [figure for figure in _figures(name) if not figure.is_met] == []


def test_every_scenario_of_the_table_exists_and_no_other() -> None:
    assert set(SCENARIOS) == set(KNOWN)


def test_the_gate_against_thrashing_more_than_doubles_goodput() -> None:
    printed = {figure.name: figure.value for figure in _figures("thrash")}
    assert float(printed["goodput with the gate over without"]) >= 2
    assert int(printed["admissions held by the gate"]) > 0


def test_a_shared_prefix_brings_the_first_token_at_least_ten_times_sooner() -> None:
    printed = {figure.name: figure.value for figure in _figures("shared-prefix")}
    assert float(printed["ratio of the medians"]) >= 10
