"""I26 at its full length: thousands of unique schemas through a head and a node, and what memory they leave behind.

    python -m tests.cases.soak --schemas 10000

Every schema is judged by the head's process, every tenth is also answered by a node with the demo model's vocabulary. Exit 1 when this
process or the one that judges grew by more than the bar between the 500th schema and the last.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from superfluid_core.grammar.compiler import Grammars, vocabulary_of
from superfluid_core.modelfiles.resolve import resolve
from tests.cases.fleet import asking
from tests.cases.test_structured import rss_mib, unique_schemas
from tests.unit.noded.conftest import TEXTS

OWN = os.getpid()
WARM = 500
GROWTH_MIB_MAX = 256


async def run(schemas: int) -> bool:
    tokenizer = resolve("demo", offline=True, token=None).tokenizer()
    words = vocabulary_of(tokenizer, tokenizer.vocabulary)
    own = vocabulary_of(TEXTS, TEXTS.vocabulary)
    large = Grammars(lambda: words)
    async with asking(grammars=Grammars(lambda: own)) as asked:
        asked.nodes[0].node.grammars.add(("m",), large)
        await unique_schemas(asked, 0, WARM)
        before = after = rss_mib(OWN)
        for first in range(WARM, schemas, WARM):
            await unique_schemas(asked, first, min(WARM, schemas - first))
            after = rss_mib(OWN)
            judges = [rss_mib(pid) for pid in asked.bench.workers.grammars.pids]
            print(
                f"{first + WARM} schemas: head and node {after} MiB, judges {judges} MiB",
                flush=True,
            )
        print(f"grew by {after - before} MiB; {large.compiled} compiled, {len(large)} kept")
    return after - before <= GROWTH_MIB_MAX


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=10_000)
    sys.exit(0 if asyncio.run(run(parser.parse_args().schemas)) else 1)


if __name__ == "__main__":
    main()
