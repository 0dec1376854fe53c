"""`python -m tests.sim.soak`: many seeds, figures at the end, the seeds of every broken promise.

python -m tests.sim.soak --hours 100 --jobs 2       until that much time was simulated
python -m tests.sim.soak --seed 1234                one seed again, with what it counted
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from itertools import count

from tests.sim.effects import EFFECTS
from tests.sim.scenario import Outcome, run_seed


def outcomes(first: int, jobs: int) -> Iterator[Outcome]:
    """Run seed after seed for as long as somebody asks; in other processes when there are several jobs."""
    seeds = count(first)
    if jobs == 1:
        yield from map(run_seed, seeds)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(run_seed, next(seeds)) for _ in range(2 * jobs)}
        try:
            while True:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                running |= {pool.submit(run_seed, next(seeds)) for _ in done}
                yield from (future.result() for future in done)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class Tally:
    """Sums over seeds."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seeds = 0
        self.simulated_s = 0.0
        self.cpu_s = 0.0
        self.events = 0
        self.broken: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.counts.update(outcome.counts)
        self.simulated_s += outcome.simulated_s
        self.cpu_s += outcome.cpu_s
        self.events += outcome.events
        if outcome.violation:
            self.broken.append(outcome)

    def effectless(self) -> list[str]:
        """Kinds of faults that struck and showed no effect."""
        return [
            kind
            for kind, effect in EFFECTS.items()
            if not self.counts[effect] or not (self.counts[f"fault: {kind}"] or kind in PASSIVE)
        ]

    def text(self) -> str:
        counts, cpu_s = self.counts, max(1e-9, self.cpu_s)
        return (
            f"{self.simulated_s / 3600:.2f} simulated hours, {self.seeds} seeds, "
            f"{counts['faults']} faults, {counts['moves']} moves, {counts['sessions']} sessions, "
            f"{counts['tokens']} tokens, {len(self.broken)} violations; {self.cpu_s:.0f} CPU-s, "
            f"{self.simulated_s / cpu_s:.0f} x real time, {self.events / cpu_s:.0f} events/s"
        )


PASSIVE = ("poison", "slow client", "client leaves", "drift", "single return", "rekey")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0, help="simulated hours")
    parser.add_argument("--seeds", type=int, default=0, help="at least so many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, help="one seed, in detail")
    parser.add_argument("--log", action="store_true", help="with --seed: what the product logs")
    parser.add_argument("--counts", action="store_true", help="print every counter")
    options = parser.parse_args(arguments)
    tally = Tally()
    if options.seed is not None:
        tally.add(run_seed(options.seed, is_told=options.log))
        options.counts = True
    else:
        began = time.perf_counter()
        for outcome in outcomes(options.first, options.jobs):
            tally.add(outcome)
            if outcome.violation:
                print(f"seed {outcome.seed}: {outcome.violation}", flush=True)
            if tally.simulated_s >= options.hours * 3600 and tally.seeds >= options.seeds:
                break
        print(f"wall {time.perf_counter() - began:.0f} s, {options.jobs} jobs")
    print(tally.text())
    for outcome in tally.broken:
        print(f"  seed {outcome.seed} at {outcome.simulated_s:.3f} s: {outcome.violation}")
    if options.counts:
        for name, count in sorted(tally.counts.items()):
            print(f"  {count:9} {name}")
    print("without effect:", ", ".join(tally.effectless()) or "none")
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
