"""How much memory a head and a node grow by while many short requests pass (decision 39): a table, exit 1 on a missed bar.

    python -m tests.e2e.soak_memory [--requests 10000] [--streams 8]

The real engine on the demo model, over HTTP, prompts and lengths all different. Resident memory is read after the first fifth of the
requests, when caches and worker processes have their size, and at the end; a process and its children count as one. The KV pool is kept
small enough to be full by then: its pages are the system's until they are first written, which is no growth. Beside it stands what
each has mapped as anonymous memory, so that pages of files are not mistaken for growth.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path

from superfluid_core.clock import SECOND, SystemClock
from superfluid_head.bench.load import chat_body, closed_loop, http_client
from superfluid_head.bench.prose import prose
from superfluid_head.bench.report import table
from superfluid_head.bench.rig import Child, Rig, ended_by_signals
from superfluid_head.bench.small_fleet import SmallFleet, real_flags

BAR_MIB = 16.0
SETTLED_SHARE = 5
POOL = "256MiB"
CALLS_A_TURN = 200
WORDS_MAX = 24
TOKENS_MAX = 6
CLOCK = SystemClock()
Sizes = dict[str, tuple[float, float]]


def family(pid: int) -> Iterable[int]:
    """A process and everything that it started."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text(encoding="ascii").split():
            yield from family(int(child))


def status_kib(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(name + ":")), 0)


def sizes_of(children: Iterable[Child]) -> Sizes:
    """(resident, anonymous) MiB of each child with its own children."""
    found: Sizes = {}
    for child in children:
        pids = list(family(child.pid))
        found[child.name] = tuple(  # type: ignore[assignment] # two of two
            sum(status_kib(pid, name) for pid in pids) / 1024 for name in ("VmRSS", "RssAnon")
        )
    return found


async def turn(fleet: SmallFleet, first: int, count: int, streams: int) -> int:
    """Send some requests; how many failed."""
    bodies = [
        chat_body(fleet.served, prose(at, 4 + at % WORDS_MAX), 1 + at % TOKENS_MAX, ignore_eos=True)
        for at in range(first, first + count)
    ]
    async with http_client(streams) as client:
        answers = await closed_loop(client, fleet.url, bodies, streams, CLOCK)
    for answer in answers:
        if answer.error:
            print(answer.error, flush=True)
    return sum(not answer.is_complete for answer in answers)


def run(requests: int, streams: int) -> bool:
    """Send everything; True when nothing failed and nobody grew beyond the bar."""
    settled, failed = requests // SETTLED_SHARE, 0
    before, sizes = Sizes(), Sizes()
    began_ns = CLOCK.now_ns()
    with Rig() as rig:
        flags = (*real_flags(1), "--model", "demo", "--kv-memory", POOL)
        fleet = SmallFleet(rig, flags, "demo", 1)
        watched = (fleet.head, fleet.node("node-0"))
        for first in range(0, requests, CALLS_A_TURN):
            failed += asyncio.run(turn(fleet, first, CALLS_A_TURN, streams))
            sizes = sizes_of(watched)
            if first + CALLS_A_TURN >= settled and not before:
                before = sizes
            shown = ", ".join(f"{name} {each[0]:.1f} MiB" for name, each in sizes.items())
            passed_s = (CLOCK.now_ns() - began_ns) / SECOND
            print(f"{first + CALLS_A_TURN} requests, {passed_s:.0f} s: {shown}", flush=True)
    rows = [
        [name, before[name][0], after[0], after[0] - before[name][0], after[1] - before[name][1]]
        for name, after in sizes.items()
    ]
    headers = ["MiB", f"after {settled}", f"after {requests}", "grown", "of it anonymous"]
    print(table(headers, rows))
    is_small = all(float(row[3]) <= BAR_MIB for row in rows)  # type: ignore[arg-type] # a float
    print(f"failed {failed}; at most {BAR_MIB:.0f} MiB each: {'yes' if is_small else 'no'}")
    return is_small and not failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=8)
    asked = parser.parse_args()
    with ended_by_signals():
        is_good = run(max(CALLS_A_TURN * SETTLED_SHARE, asked.requests), asked.streams)
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
