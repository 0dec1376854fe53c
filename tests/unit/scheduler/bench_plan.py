"""What `receive` and `plan` cost at 256 lanes and 4,096 queued sessions. A script, not a test: it prints.

python -m tests.unit.scheduler.bench_plan
"""

from __future__ import annotations

from time import perf_counter_ns

from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.plan import StepDone, Submit, TickDone, TickOutcome
from superfluid_core.scheduler.scheduler import PoolShape, Scheduler
from superfluid_core.session import QosClass
from tests.unit.scheduler.rig import MS, spec


def run(lanes: int = 256, queued: int = 4096, ticks: int = 200) -> None:
    limits = SchedulerLimits(lanes=lanes, queue_max=queued + lanes, step_tokens=1024)
    scheduler = Scheduler(limits, PoolShape(16, 40_000, 8192))
    sessions = [
        Submit(
            spec(number, 500 + number % 100, 4000, QosClass(number % 4), tenant=f"t{number % 9}")
        )
        for number in range(lanes + queued)
    ]
    started = perf_counter_ns()
    scheduler.receive(sessions, 0)
    submit_us = (perf_counter_ns() - started) / 1000 / len(sessions)
    now_ns = 0
    while scheduler.stats().lanes_decoding < lanes:
        now_ns = _tick(scheduler, now_ns)[0]
    costs: list[tuple[int, int, int]] = []
    for _ in range(ticks):
        now_ns, plan_ns, step_ns, done_ns = _tick(scheduler, now_ns)
        costs.append((plan_ns, step_ns, done_ns))
    plan_us, step_us, done_us = (
        sorted(column)[ticks // 2] / 1000 for column in zip(*costs, strict=True)
    )
    stats = scheduler.stats()
    print(f"{stats.lanes_busy} lanes, {sum(stats.queued)} queued, median of {ticks} ticks:")
    print(f"  submit {submit_us:.1f} us  plan {plan_us:.0f} us  StepDone {step_us:.0f} us")
    print(f"  TickDone {done_us:.0f} us  receive + plan {plan_us + step_us + done_us:.0f} us")


def _tick(scheduler: Scheduler, now_ns: int) -> tuple[int, int, int, int]:
    """One tick of one step: 20 ms, a token for every lane whose prompt is complete."""
    now_ns += 20 * MS
    t0 = perf_counter_ns()
    plan = scheduler.plan(now_ns)
    t1 = perf_counter_ns()
    assert plan is not None
    sampling = [lane.lane for lane in plan.lanes if lane.grant]
    prefilled = [(lane.lane, len(lane.inputs)) for lane in plan.lanes if not lane.decoding]
    step = StepDone(plan.tick, 1, sampling, [7] * len(sampling), prefilled, 1, 20 * MS)
    t2 = perf_counter_ns()
    scheduler.receive([step], now_ns)
    t3 = perf_counter_ns()
    scheduler.receive([TickDone(plan.tick, TickOutcome.INTERRUPTED, 1, 20 * MS)], now_ns)
    t4 = perf_counter_ns()
    return now_ns, t1 - t0, t3 - t2, t4 - t3


if __name__ == "__main__":
    run()
