"""Who waits for whom: order within a class, aging, a queue in balance, tenants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.rules import QueueOrder, Rules
from superfluid_core.session import QosClass
from superfluid_core.simulator.draws import Draws
from superfluid_core.simulator.flags import MS, Flags
from superfluid_core.simulator.records import RunResult
from superfluid_core.simulator.scenario import Arrival, Case, Figure, Results, Scenario, figure
from superfluid_core.simulator.scenarios.words import listed, starts

# --- one lane -------------------------------------------------------------------------------------

# two prompt tokens are the least that a step can carry beside a decoding lane
STEP = 2
ONE_LANE = Flags(limits=SchedulerLimits(lanes=1, step_tokens=STEP), unit_ns=1_000)
JOBS = (
    ("A", 0, 40, 1),
    ("B", 1, 5, 0),
    ("C", 2, 10, 1),
    ("D", 3, 2, 1),
    ("E", 4, 20, 0),
    ("F", 5, 3, 1),
)


def _job(name: str, at: int, length: int, unit_ns: int, qos: QosClass = QosClass.AGENT) -> Arrival:
    """Make a job of `length` steps; its prompt is as long, so that `shortest` sees its length."""
    return Arrival(at * unit_ns, STEP * length, 1, name=name, qos=qos)


def _policies() -> tuple[Case, ...]:
    plain = tuple(_job(name, at, length, 1_000) for name, at, length, _ in JOBS)
    ranked = tuple(
        _job(name, at, length, 1_000, QosClass.BACKGROUND if priority else QosClass.AGENT)
        for name, at, length, priority in JOBS
    )
    shortest = replace(ONE_LANE, rules=Rules(queue_order=QueueOrder.SHORTEST))
    return (
        Case("fifo", ONE_LANE, plain),
        Case("shortest", shortest, plain),
        Case("priority", ONE_LANE, ranked),
    )


def _policy_figures(results: Results) -> tuple[Figure, ...]:
    goldens = (("A B C D E F", "43.17"), ("A D F B C E", "37.00"), ("A B E C D F", "47.83"))
    figures: list[Figure] = []
    for (label, result), (order, wait) in zip(results.items(), goldens, strict=True):
        mean = result.units(result.all.wait.mean)
        figures += [
            figure(f"{label}: order", listed(starts(result)), order),
            figure(f"{label}: mean wait", f"{mean:.2f}", wait),
        ]
    return tuple(figures)


POLICIES = Scenario(
    "policies",
    "one lane, six jobs, three orders",
    _policies,
    _policy_figures,
    unit="steps",
)

# --- starvation -----------------------------------------------------------------------------------

# 8 nominal ticks of 2 units
AGING = SchedulerLimits(lanes=1, step_tokens=STEP, starvation_ticks=8, tick_target_ms=2)
NO_AGING = replace(AGING, starvation_ticks=1_000_000)


def _starvation() -> tuple[Case, ...]:
    jobs = [_job("long", 0, 30, MS)]
    jobs += [_job(f"j{at}", at, 2, MS) for at in range(0, 79, 2)]
    shortest = Rules(queue_order=QueueOrder.SHORTEST)
    return (
        Case("without aging", Flags(limits=NO_AGING, rules=shortest), tuple(jobs)),
        Case("with aging", Flags(limits=AGING, rules=shortest), tuple(jobs)),
    )


def _starvation_figures(results: Results) -> tuple[Figure, ...]:
    goldens = {"without aging": "80", "with aging": "16"}
    return tuple(
        figure(
            f"{label}: the long job starts at",
            f"{result.units(result.session('long').started_ns or 0):g}",
            goldens[label],
        )
        for label, result in results.items()
    )


STARVATION = Scenario(
    "starvation",
    "shortest first: a 30-unit job at 0, a 2-unit job every 2 units until 78",
    _starvation,
    _starvation_figures,
    unit="units",
)

# --- a queue in balance ---------------------------------------------------------------------------

TICKS = 20_000
SERVICE = 20
LCG_SEED = 11
LOADS = ((0.20, 0), (0.36, 0), (0.44, 0), (0.44, 16))


def _coins(probability: float) -> Iterator[Arrival]:
    """Draw an arrival for every tick, or none."""
    draws = Draws(LCG_SEED)
    for tick in range(TICKS):
        if draws.double() < probability:
            yield Arrival(tick * MS, 1, SERVICE)


def _littles() -> tuple[Case, ...]:
    cases = []
    for probability, limit in LOADS:
        limits = SchedulerLimits(lanes=8, queue_max=limit or TICKS)
        label = f"p={probability:.2f}" + (f" max-queue={limit}" if limit else "")
        arrivals = tuple(_coins(probability))
        cases.append(Case(label, Flags(limits=limits), arrivals, until_ns=TICKS * MS))
    return tuple(cases)


def _littles_figures(results: Results) -> tuple[Figure, ...]:
    goldens = (
        ("3.96", "0.1976", "20.06", "0", "3955"),
        ("8.93", "0.3581", "24.93", "0", "7172"),
        ("447.50", "0.3996", "1019.46", "0", "8831"),
        ("20.30", "0.3996", "50.71", "815", "8831"),
    )
    figures: list[Figure] = []
    for (label, result), golden in zip(results.items(), goldens, strict=True):
        total = result.all
        values = (
            f"{result.mean_in_system:.2f}",
            f"{total.finished / TICKS:.4f}",
            f"{result.units(total.stay.mean):.2f}",
            str(total.rejected),
            str(total.arrived),
        )
        names = ("L", "lambda", "W", "rejected", "arrived")
        for name, value, known in zip(names, values, golden, strict=True):
            figures.append(figure(f"{label}: {name}", value, known))
    return tuple(figures)


LITTLES = Scenario(
    "littles-law",
    "8 lanes, service 20 ticks, 20,000 ticks, an arrival per tick with probability p",
    _littles,
    _littles_figures,
    unit="ticks",
)

# --- tenants --------------------------------------------------------------------------------------


def _tenants() -> tuple[Case, ...]:
    jobs = [Arrival(0, 1, 10, name=f"A{n}", tenant="A") for n in range(12)]
    jobs += [Arrival(1_000, 1, 10, name=f"B{n}", tenant="B") for n in range(2)]
    flags = Flags(limits=SchedulerLimits(lanes=4), unit_ns=1_000)
    fair = replace(flags, rules=Rules(queue_order=QueueOrder.FAIR))
    capped = replace(flags, rules=Rules(queue_order=QueueOrder.FAIR, tenant_lanes=3))
    arrivals = tuple(jobs)
    return (
        Case("fifo", flags, arrivals),
        Case("fair", fair, arrivals),
        Case("fair, cap 3", capped, arrivals),
    )


def _finish_of(result: RunResult, tenant: str) -> str:
    ends = [
        round(result.units(each.finished_ns))
        for each in result.sessions
        if each.arrival.tenant == tenant and each.finished_ns is not None
    ]
    return ", ".join(str(end) for end in sorted(ends))


def _tenant_figures(results: Results) -> tuple[Figure, ...]:
    goldens = ("40, 40", "20, 20", "11, 20")
    return tuple(
        figure(f"{label}: B finishes at", _finish_of(result, "B"), golden)
        for (label, result), golden in zip(results.items(), goldens, strict=True)
    ) + tuple(
        figure(f"{label}: fairness", f"{result.fairness:.3f}") for label, result in results.items()
    )


TENANTS = Scenario(
    "tenants",
    "4 lanes, 10 steps each: tenant A sends 12 at step 0, tenant B sends 2 at step 1",
    _tenants,
    _tenant_figures,
    unit="steps",
)

SCENARIOS = (POLICIES, STARVATION, LITTLES, TENANTS)
