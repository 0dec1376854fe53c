"""`python -m tests.chaos`: real processes under faults, a table of what became of their clients, exit 1 on a missed bar.

python -m tests.chaos                            all scenarios
python -m tests.chaos --only C1 --runs 30 --seed 7   one of them, with so many faults
python -m tests.chaos --json FILE                the figures for a program, too
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import traceback
from pathlib import Path

from superfluid_core.clock import SECOND, SystemClock
from superfluid_head.bench.report import table
from tests.chaos import on_hosts, on_nodes, on_wires
from tests.chaos.crowd import end_on_sigterm
from tests.chaos.scenario import HEADERS, Row, Scale

SCENARIOS = {**on_nodes.SCENARIOS, **on_wires.SCENARIOS, **on_hosts.SCENARIOS}
# What mostly waits runs side by side; what is measured in milliseconds runs alone.
GROUPS: tuple[tuple[str, ...], ...] = (
    ("C1",), ("C2", "C3", "C9"), ("C4", "C5"), ("C7", "C8", "C11", "C12"), ("C10", "C13", "C14"), ("C6",),
)  # fmt: skip
SCENARIO_SECONDS = 300.0


async def run_one(name: str, scale: Scale) -> Row:
    """Run a scenario; whatever breaks in it is a missed bar."""
    clock = SystemClock()
    began_ns = clock.now_ns()
    try:
        async with asyncio.timeout(SCENARIO_SECONDS):
            row = await SCENARIOS[name](scale)
    except Exception as error:  # noqa: BLE001 # the outermost edge of a scenario: the others still run
        traceback.print_exception(error)
        row = Row(name, SCENARIOS[name].__name__, missed=[f"broke: {error!r}"])
    row.notes.append(f"{(clock.now_ns() - began_ns) / SECOND:.0f} s")
    print(f"{row.name}: {row.verdict}", *row.missed, *row.notes, sep="\n    ", flush=True)
    return row


async def run_all(names: list[str], scale: Scale) -> list[Row]:
    end_on_sigterm()
    rows: list[Row] = []
    for group in GROUPS:
        wanted = [name for name in group if name in names]
        rows += await asyncio.gather(*(run_one(name, scale) for name in wanted))
    return sorted(rows, key=lambda row: int(row.name[1:]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(SCENARIOS), metavar="ID")
    parser.add_argument("--runs", type=int, default=0, help="faults of each scenario")
    parser.add_argument("--clients", type=int, default=0, help="clients of each scenario")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    clock = SystemClock()
    began_ns = clock.now_ns()
    scale = Scale(options.seed, options.runs, options.clients)
    rows = asyncio.run(run_all(options.only or list(SCENARIOS), scale))
    wall_s = (clock.now_ns() - began_ns) / SECOND
    print("\n" + table(HEADERS, [row.cells() for row in rows]))
    faults = sum(row.faults for row in rows)
    missed = [row.name for row in rows if row.missed]
    print(f"\n{faults} faults in {wall_s:.0f} s; bars missed: {', '.join(missed) or 'none'}")
    if options.json is not None:
        fields = {"seed": options.seed, "wall_s": wall_s, "rows": [row.fields() for row in rows]}
        options.json.write_text(json.dumps(fields, indent=1), encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
