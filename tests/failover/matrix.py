"""Runs a row of the matrix: its unbroken answer, then the same request with its node lost at every place.

Owns what equal means: every byte of text, every log-probability, every end, all of the usage; and, for a request without a
seed, the answer that the seed has which the head drew for it. Counts the losses that really happened: one that did not is a fault of the
matrix, except behind the last token, where nothing is left to move.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.failover.kit import Path, Reply
from tests.failover.rows import Row, cuts_of


@dataclass
class Outcome:
    """What became of a row. `unlike` are the cuts whose answer was another one."""

    row: str
    runs: int = 0
    cuts: int = 0
    unlike: list[tuple[int, ...]] = field(default_factory=list)
    uncut: list[tuple[int, ...]] = field(default_factory=list)
    differences: list[tuple[Reply, Reply]] = field(default_factory=list)


def length_of(reply: Reply, choices: int) -> int:
    """Tokens of the longest possible choice, by the usage."""
    return int(-(-reply.usage["completion_tokens"] // choices))


async def one(path: Path, row: Row, number: int, cuts: Sequence[int], oracle: Reply) -> Outcome:
    """One broken run against the unbroken one."""
    reply, name = await path.ask(row, number, cuts)
    wanted = oracle
    if not row.is_seeded:
        wanted, _ = await path.ask(row, number, seed=path.fleet.seeds[name, 0])
    done = path.cuts_of(name)
    outcome = Outcome(row.name, 1, done)
    if reply != wanted or not reply.is_done:
        outcome.unlike.append(tuple(cuts))
        outcome.differences.append((reply, wanted))
    if done < len(cuts):
        outcome.uncut.append(tuple(cuts))
    return outcome


async def run_row(path: Path, row: Row, number: int, *, step: int = 1) -> Outcome:
    """Lose a node once at each place, and thrice in a row here and there."""
    choices = int(row.members.get("n", 1))
    members: dict[str, Any] = {} if row.is_seeded else {"seed": 1}
    oracle, _ = await path.ask(row, number, **members)
    assert oracle.status == 200, oracle
    length = length_of(oracle, choices)
    places = cuts_of(row, length, step)
    plans: list[tuple[int, ...]] = [(place,) for place in places]
    plans += [(n, n, n + 1) for n in range(0, length - 1, 3 * step)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(path, row, number, plan, oracle)) for plan in plans]
    whole = Outcome(row.name)
    for task in tasks:
        part = task.result()
        whole.runs += part.runs
        whole.cuts += part.cuts
        whole.unlike += part.unlike
        whole.differences += part.differences
        whole.uncut += [cuts for cuts in part.uncut if cuts[-1] < length]
    return whole
