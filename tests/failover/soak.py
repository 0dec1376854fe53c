"""The matrix over many prompts, for `make soak`: `python -m tests.failover.soak --prompts 20`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from tests.failover.kit import path
from tests.failover.matrix import Outcome, run_row
from tests.failover.rows import ROWS


async def run(prompts: int) -> list[Outcome]:
    outcomes = []
    for number in range(prompts):
        async with path() as asked:
            outcomes += [await run_row(asked, row, 1_000 + number) for row in ROWS]
    return outcomes


def main() -> int:
    """Run, print a line a row, exit 1 when any answer differed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=20)
    logging.disable(logging.WARNING)
    outcomes = asyncio.run(run(parser.parse_args().prompts))
    for row in ROWS:
        mine = [outcome for outcome in outcomes if outcome.row == row.name]
        unlike = [cuts for outcome in mine for cuts in outcome.unlike]
        print(
            f"{row.name:26} {sum(o.cuts for o in mine):7} cuts, {len(unlike)} unlike {unlike[:5]}"
        )
    print(f"{sum(o.cuts for o in outcomes)} cuts")
    return 1 if any(outcome.unlike or outcome.uncut for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
