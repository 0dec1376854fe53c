"""What `receive` and `plan` cost at 256 lanes, over queue lengths. A script, not a test: it prints CPU time.

python -m tests.unit.scheduler.bench_plan [lanes] [ticks]
"""

from __future__ import annotations

import gc
import sys
from time import process_time_ns
from typing import NamedTuple

from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.plan import StepDone, Submit, TickDone, TickOutcome
from superfluid_core.scheduler.scheduler import PoolShape, Scheduler
from superfluid_core.session import QosClass
from tests.unit.scheduler.rig import MS, spec

QUEUES = (0, 256, 1024, 4096, 16384)


class Cost(NamedTuple):
    """Nanoseconds of one tick of one step."""

    plan: int
    step: int
    done: int

    @property
    def total(self) -> int:
        return self.plan + self.step + self.done


class Bench:
    """A scheduler whose lanes all decode, with sessions waiting."""

    def __init__(self, lanes: int, queued: int) -> None:
        limits = SchedulerLimits(lanes=lanes, queue_max=queued + lanes, step_tokens=1024)
        self.scheduler = Scheduler(limits, PoolShape(16, 160 * lanes, 8192))
        self.now_ns = 0
        sessions = [
            Submit(spec(n, 500 + n % 100, 4000, QosClass(n % 4), tenant=f"t{n % 9}"))
            for n in range(lanes + queued)
        ]
        started = process_time_ns()
        self.scheduler.receive(sessions, 0)
        self.submit_us = (process_time_ns() - started) / 1000 / len(sessions)
        while self.scheduler.stats().lanes_decoding < lanes:
            self.tick()

    def tick(self) -> Cost:
        """One tick of one step: 20 ms, a token for every lane whose prompt is complete."""
        self.now_ns += 20 * MS
        t0 = process_time_ns()
        plan = self.scheduler.plan(self.now_ns)
        t1 = process_time_ns()
        assert plan is not None
        sampling = [lane.lane for lane in plan.lanes if lane.grant]
        prefilled = [(lane.lane, len(lane.inputs)) for lane in plan.lanes if not lane.decoding]
        step = StepDone(plan.tick, 1, sampling, [7] * len(sampling), prefilled, 1, 20 * MS)
        t2 = process_time_ns()
        self.scheduler.receive([step], self.now_ns)
        t3 = process_time_ns()
        done = TickDone(plan.tick, TickOutcome.INTERRUPTED, 1, 20 * MS)
        t4 = process_time_ns()
        self.scheduler.receive([done], self.now_ns)
        return Cost(t1 - t0, t3 - t2, process_time_ns() - t4)


def at(values: list[int], share: float) -> float:
    """Microseconds."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] / 1000


def run(lanes: int = 256, ticks: int = 300) -> None:
    print(f"{lanes} lanes decode, {ticks} ticks of one step, CPU us (median; total also p99):")
    for queued in QUEUES:
        bench = Bench(lanes, queued)
        gc.collect()
        costs = [bench.tick() for _ in range(ticks)]
        assert bench.scheduler.stats().lanes_decoding == lanes
        totals = [cost.total for cost in costs]
        print(
            f"  queue {queued:6}: submit {bench.submit_us:5.1f}"
            f"  plan {at([cost.plan for cost in costs], 0.5):5.0f}"
            f"  StepDone {at([cost.step for cost in costs], 0.5):5.0f}"
            f"  TickDone {at([cost.done for cost in costs], 0.5):4.0f}"
            f"  receive+plan {at(totals, 0.5):5.0f} p99 {at(totals, 0.99):5.0f}"
        )


if __name__ == "__main__":
    run(*(int(each) for each in sys.argv[1:]))
