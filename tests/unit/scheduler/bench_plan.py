"""What `receive` and `plan` cost at 256 lanes, over queue lengths. A script, not a test: it prints CPU time, and draws it.

python -m tests.unit.scheduler.bench_plan [--lanes 256] [--ticks 300] [--plot FILE.png|FILE.html]
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from time import process_time_ns
from typing import NamedTuple

from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.plan import StepDone, Submit, TickDone, TickOutcome
from superfluid_core.scheduler.scheduler import PoolShape, Scheduler
from superfluid_core.session import QosClass
from superfluid_core.simulator.plot.chart import Bar, draw_bars
from superfluid_core.simulator.plot.files import check_plot_path, write_plot
from superfluid_core.simulator.plot.shapes import Picture
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


class Row(NamedTuple):
    """All ticks at one queue length; `collections` counts the garbage collector's looks meanwhile."""

    queued: int
    submit_us: float
    costs: list[Cost]
    collections: int

    def us(self, share: float) -> float:
        return at([cost.total for cost in self.costs], share)

    def line(self) -> str:
        return (
            f"  queue {self.queued:6}: submit {self.submit_us:5.1f}"
            f"  plan {at([cost.plan for cost in self.costs], 0.5):5.0f}"
            f"  StepDone {at([cost.step for cost in self.costs], 0.5):5.0f}"
            f"  TickDone {at([cost.done for cost in self.costs], 0.5):4.0f}"
            f"  receive+plan {self.us(0.5):5.0f} p99 {self.us(0.99):5.0f}"
            f"  collections {self.collections}"
        )


def measure(lanes: int, ticks: int, queued: int) -> Row:
    bench = Bench(lanes, queued)
    gc.collect()
    before = sum(each["collections"] for each in gc.get_stats())
    costs = [bench.tick() for _ in range(ticks)]
    looks = sum(each["collections"] for each in gc.get_stats()) - before
    assert bench.scheduler.stats().lanes_decoding == lanes
    return Row(queued, bench.submit_us, costs, looks)


def pictures(lanes: int, rows: Sequence[Row]) -> list[Picture]:
    """A bar per queue length: flat bars are the point."""
    drawn = []
    for name, share in (("median", 0.5), ("p99", 0.99)):
        bars = [
            Bar(f"{row.queued} queued", row.us(share), f"{row.us(share):.0f} us") for row in rows
        ]
        drawn.append(draw_bars(f"receive + plan of {lanes} decoding lanes, CPU, {name}", bars))
    return drawn


def run(lanes: int, ticks: int, plot: str | None) -> None:
    if plot is not None:
        check_plot_path(plot)
    print(f"{lanes} lanes decode, {ticks} ticks of one step, CPU us (median; total also p99):")
    rows = []
    for queued in QUEUES:
        rows.append(measure(lanes, ticks, queued))
        print(rows[-1].line())
    if plot is not None:
        text = "\n".join(row.line() for row in rows)
        write_plot(plot, "What a tick costs", pictures(lanes, rows), text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", type=int, default=256)
    parser.add_argument("--ticks", type=int, default=300)
    parser.add_argument("--plot", metavar="FILE.png|FILE.html")
    run(**vars(parser.parse_args()))
