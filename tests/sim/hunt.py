"""`python -m tests.sim.hunt`: replay the killing seed of every planted bug, look for another where it kills no more, keep what was found.

python -m tests.sim.hunt                        renew killers.json
python -m tests.sim.hunt --only 'no fence'      one bug, with what the run said
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.sim.planted import KILLERS, KILLERS_PATH, PLANTED, SEEDS_MAX, Planted, hunt, try_seed
from tests.sim.scenario import Outcome


def renew(planted: Planted, seeds: int) -> Outcome | None:
    """Say which run finds the bug now: the one that did before, if it still does."""
    outcome = try_seed(planted, planted.killer)
    return outcome if outcome.violation else hunt(planted, seeds)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.hunt", description=__doc__)
    parser.add_argument("--only", default="", help="the bugs whose names have this in them")
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX, help="how many seeds to try")
    options = parser.parse_args(arguments)
    killers = {planted.name: KILLERS.get(planted.name, 0) for planted in PLANTED}
    missed = 0
    for planted in PLANTED:
        if options.only not in planted.name:
            continue
        outcome = renew(planted, options.seeds)
        missed += outcome is None
        if outcome is not None:
            killers[planted.name] = outcome.seed
        found = "not found" if outcome is None else f"seed {outcome.seed}: {outcome.violation}"
        print(f"{planted.name}: {found}", flush=True)
    KILLERS_PATH.write_text(json.dumps(killers, indent=1, sort_keys=True) + "\n")
    print(f"{missed} of {len(PLANTED)} planted bugs were not found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
