"""`python -m tests.chaos.soak`: C15, the same head for a long time under kills, freezes, black holes and cut links.

python -m tests.chaos.soak --minutes 1440        a day
python -m tests.chaos.soak --minutes 5 --seed 9  what `make soak` does

Every transcript is judged; the head's memory may grow by a mebibyte an hour after it has warmed up, its descriptors and those of
a node that nobody touches stay flat, and no log holds an exception that nobody retrieved.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from superfluid_core.clock import SECOND, SystemClock
from superfluid_head.bench.prose import Draws
from superfluid_head.bench.report import table
from tests.chaos.crowd import Load, Run, end_on_sigterm, running
from tests.chaos.history import History
from tests.chaos.on_nodes import opened
from tests.chaos.proxy import End
from tests.chaos.scenario import HEADERS, Row
from tests.chaos.site import MOCK, Setup, Site, open_files, rates, rss_bytes

MIB = 1 << 20
NODES = 4
UNTOUCHED = f"node-{NODES - 1}"
ROUND_SECONDS = 12.0
FREEZE_SECONDS = 5.0
WARM_ROUNDS = 5
FILES_SLACK = 24
KINDS = ("kill", "freeze", "hole", "rst")


def slope_mib_per_h(samples: Sequence[tuple[float, int]]) -> float:
    """Least squares over (seconds, bytes)."""
    count = len(samples)
    mean_s = sum(at for at, _ in samples) / count
    mean_b = sum(size for _, size in samples) / count
    spread = sum((at - mean_s) ** 2 for at, _ in samples)
    if spread == 0:
        return 0.0
    return sum((at - mean_s) * (size - mean_b) for at, size in samples) / spread * 3600 / MIB


async def strike(run: Run, draws: Draws) -> None:
    """Do one drawn thing to one drawn node, and make it good again."""
    name = await run.victim(draws, avoid=(UNTOUCHED,))
    kind = KINDS[draws.below(len(KINDS))]
    run.fault(kind, name)
    proxy, node = run.site.proxies[name], run.site.node(name)
    if kind == "kill":
        run.site.kill(name)
        run.site.reap(name)
        await run.outlive()
        await asyncio.to_thread(run.site.restart, name)
    elif kind == "freeze":
        node.freeze()
        await asyncio.sleep(FREEZE_SECONDS)
        node.thaw()
    elif kind == "hole":
        proxy.hold()
        await asyncio.sleep(FREEZE_SECONDS)
        proxy.release()
    else:
        proxy.cut(End.RST)
    await run.outlive()
    await run.until_up(NODES)


class Watch:
    """Memory and descriptors over the rounds."""

    def __init__(self, site: Site) -> None:
        self._pids = {"head": site.head.pid, UNTOUCHED: site.node(UNTOUCHED).pid}
        self._clock = SystemClock()
        self.sizes: dict[str, list[tuple[float, int]]] = {name: [] for name in self._pids}
        self.files: dict[str, list[int]] = {name: [] for name in self._pids}

    def look(self) -> None:
        for name, pid in self._pids.items():
            self.sizes[name].append((self._clock.now_ns() / SECOND, rss_bytes(pid)))
            self.files[name].append(open_files(pid))

    def judge(self, row: Row) -> None:
        for name, sizes in self.sizes.items():
            warm = sizes[WARM_ROUNDS:] or sizes
            hours = (warm[-1][0] - warm[0][0]) / 3600
            slope = slope_mib_per_h(warm)
            words = f"{name}: {slope:+.1f} MiB/h over {hours:.2f} h, {warm[-1][1] / MIB:.0f} MiB"
            # a slope over minutes is noise of the allocator: the bar is for hours
            row.check(slope <= 1.0 or hours < 2.0, words + (" (bar 1, from 2 h on)"))
            grown = max(self.files[name]) - self.files[name][0]
            row.check(
                grown <= FILES_SLACK, f"{name}: at most {grown} more descriptors than at first"
            )


async def soak(minutes: float, seed: int, clients: int) -> Row:
    end_on_sigterm()
    row = Row("C15", f"soak of {minutes:.0f} min")
    clock, draws = SystemClock(), Draws(seed)
    until_ns = clock.now_ns() + int(minutes * 60 * SECOND)
    async with AsyncExitStack() as stack:
        site = await opened(stack, Setup(nodes=NODES, flags=(*MOCK, *rates(25))))
        watch, number = Watch(site), 0
        while clock.now_ns() < until_ns:
            number += 1
            async with running(site, Load(clients, seed=seed * 10_000 + number)) as run:
                await run.until_streaming(clients // 2)
                await strike(run, draws)
                # three faults of a node within a minute would rest it: that is another scenario
                await asyncio.sleep(ROUND_SECONDS)
            row.add(trimmed(run.history))
            watch.look()
        watch.judge(row)
        logs = [child.log_text() for child in site.rig.children]
        lost = sum("never retrieved" in text or "was never awaited" in text for text in logs)
        row.check(lost == 0, f"{lost} logs hold exceptions that nobody retrieved")
    row.check(row.found.failed == 0, f"{row.found.failed} of {row.found.streams} failed")
    return row


def trimmed(history: History) -> History:
    """What is judged once is not kept for a day."""
    history.events = [event for event in history.events if event.kind == "moved"]
    return history


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args(arguments)
    row = asyncio.run(soak(options.minutes, options.seed, options.clients))
    print(table(HEADERS, [row.cells()]))
    print(*row.missed, *row.notes, sep="\n    ")
    return 1 if row.missed else 0


if __name__ == "__main__":
    sys.exit(main())
