"""A pool that does not hold everything: who loses its blocks, when, and what recomputing costs."""

from __future__ import annotations

from superfluid_core.kv.blocks import PoolShape
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.rules import Rules
from superfluid_core.simulator.flags import Flags
from superfluid_core.simulator.report import composition
from superfluid_core.simulator.scenario import Arrival, Case, Figure, Results, Scenario, figure
from superfluid_core.simulator.scenarios.words import listed

UNIT_NS = 1_000

# --- preempt-recompute ----------------------------------------------------------------------------

STEPS = 40
PROMPTS = (60, 50, 70, 40)


def _preempt() -> tuple[Case, ...]:
    """All prompts are computed in step 0; `tick-decode-budget` 1 makes every step a tick."""
    flags = Flags(
        limits=SchedulerLimits(lanes=4, decode_budget=1, watermark_pct=0),
        pool=PoolShape(16, 20, 4_096),
        unit_ns=UNIT_NS,
    )
    arrivals = tuple(Arrival(0, prompt, 200, name=f"r{n}") for n, prompt in enumerate(PROMPTS))
    return (Case("pool of 20", flags, arrivals, steps_max=STEPS + 1),)


def _preempt_figures(results: Results) -> tuple[Figure, ...]:
    result = results["pool of 20"]
    events = [
        f"step {step.number - 1}: {each.name}, {each.blocks} blocks, {each.tokens} tokens"
        for step in result.steps
        for each in step.preempted
    ]
    last = set(result.steps[-1].decoding)
    running = [each for each in result.sessions if each.arrival.name in last]
    # the last sampled id has no KV yet
    tokens = [f"{each.arrival.name}={each.arrival.prompt + each.output - 1}" for each in running]
    waiting = [each.arrival.name for each in result.sessions if each not in running]
    return (
        figure("preempted", "; ".join(events), "step 21: r3, 4 blocks, 60 tokens"),
        figure("KV tokens after step 40", listed(tokens), "r0=100 r1=90 r2=110"),
        figure("waiting", listed(waiting), "r3"),
    )


PREEMPT = Scenario(
    "preempt-recompute",
    "20 blocks of 16, prompts of 60 50 70 40 tokens decode for 40 steps",
    _preempt,
    _preempt_figures,
    unit="steps",
)

# --- token-level-preemption -----------------------------------------------------------------------


def _token_level() -> tuple[Case, ...]:
    """B and C come before steps 2 and 3: prompts are given tokens shortest first, and A is to be first."""
    flags = Flags(
        limits=SchedulerLimits(
            lanes=3, step_tokens=8, prefill_budget=8, decode_budget=1, watermark_pct=0
        ),
        rules=Rules(admit_after_preempt=False),
        pool=PoolShape(4, 7, 64),
        unit_ns=UNIT_NS,
    )
    arrivals = (
        Arrival(0, 10, 4, name="A"),
        Arrival(UNIT_NS, 6, 6, name="B"),
        Arrival(2 * UNIT_NS, 5, 3, name="C"),
    )
    return (Case("pool of 7", flags, arrivals),)


def _token_level_figures(results: Results) -> tuple[Figure, ...]:
    goldens = (
        "A+8 (5 free)",
        "A+2 B+6 (2 free)",
        "A+1 B+1 C+5 (0 free)",
        "A+1 B+1 C+1 (0 free)",
        "A+1 B+1, C preempted, A finished (0 free)",
        "B+1 C+7, C finished (2 free)",
        "B+1, B finished (4 free)",
    )
    steps = results["pool of 7"].steps
    figures = [
        figure(
            f"step {place}",
            f"{composition(step)} ({step.free} free)",
            goldens[place - 1] if place <= len(goldens) else "none",
        )
        for place, step in enumerate(steps, 1)
    ]
    return (*figures, figure("steps", str(len(steps)), "7"))


TOKEN_LEVEL = Scenario(
    "token-level-preemption",
    "step budget 8, 3 lanes, 7 blocks of 4: A(10,4) B(6,6) C(5,3)",
    _token_level,
    _token_level_figures,
    unit="steps",
)

# --- thrash ---------------------------------------------------------------------------------------

SMALL_POOL = 480
POOLS = (1_600, 960, SMALL_POOL)


def _thrash_flags(blocks: int, limit_pct: int) -> Flags:
    """16 lanes whose sessions want 100 blocks each in the end; prompts are slow to compute."""
    return Flags(
        limits=SchedulerLimits(lanes=16, starvation_ticks=1, tick_target_ms=2_000),
        rules=Rules(thrash_pct=limit_pct),
        pool=PoolShape(16, blocks, 8_192),
        cost="roofline(rtx4090, 8b-q4, 10)",
        slo_itl_ms=20,
    )


def _thrash() -> tuple[Case, ...]:
    arrivals = tuple(Arrival(0, 100, 1_500) for _ in range(96))
    cases = [Case(f"{n} blocks, G6 off", _thrash_flags(n, 0), arrivals) for n in POOLS]
    return (*cases, Case(GATED, _thrash_flags(SMALL_POOL, 20), arrivals))


GATED = f"{SMALL_POOL} blocks, G6 at 20 %"


def _thrash_figures(results: Results) -> tuple[Figure, ...]:
    figures: list[Figure] = []
    rates: dict[str, float] = {}
    for label, result in results.items():
        rates[label] = result.all.good_tokens * 1e9 / result.ended_ns
        throughput = result.all.output_tokens * 1e9 / result.ended_ns
        figures += [
            figure(f"{label}: recomputed/new", f"{100 * result.recompute_ratio:.1f} %"),
            figure(f"{label}: goodput", f"{rates[label]:.0f} of {throughput:.0f} tokens/s"),
        ]
    gated, free = results[GATED], results[f"{SMALL_POOL} blocks, G6 off"]
    assert gated.stats is not None, "a run ends with its statistics"
    ratio = rates[gated.label] / max(1e-9, rates[free.label])
    return (
        *figures,
        figure("over 20 % without the gate", "yes" if free.recompute_ratio > 0.2 else "no", "yes"),
        figure("admissions held by the gate", str(gated.stats.held_thrash)),
        figure("goodput with the gate over without", f"{ratio:.2f}"),
        figure("at least twice", "yes" if ratio >= 2 else "no", "yes"),
    )


THRASH = Scenario(
    "thrash",
    "the pool is so small that work is done twice: with and without gate G6",
    _thrash,
    _thrash_figures,
)

SCENARIOS = (PREEMPT, TOKEN_LEVEL, THRASH)
