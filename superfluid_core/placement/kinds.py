"""Which engines are alike, by how fast they are: noise lies within a kind, and kinds lie apart. Pure.

Two kinds that differ by a factor may each be so noisy that the slowest of one is near the fastest of the other. So what is compared is not
neighbours but middles: the two groups whose middles are nearest become one, again and again, while those are no further apart than noise
makes them. What is so joined last are whole kinds, and those stay apart. Knows factors, not what they are of.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp, log

# Where there is no such gap there are no kinds but engines of every speed: cuts would lie now here, now there.
GAP_LEAST = 1.25
# The first look takes engines as equally slow, the second and the third as slow as the one before found them.
ROUNDS = 3


def kinds_of(factors: Sequence[float], noise: float) -> list[list[int]]:
    """Return the places of `factors`, all above 0.0, by kind: the kind of most first, of as many the lower one."""
    order = sorted(range(len(factors)), key=factors.__getitem__)
    if not order or factors[order[-1]] <= factors[order[0]] * noise:
        return [order] if order else []
    kinds = [[place] for place in order]
    middles = [log(factors[place]) for place in order]
    gaps = [right - left for left, right in pairwise(middles)]
    bar = log(noise)
    while gaps and (least := min(gaps)) <= bar:
        at = gaps.index(least)
        left, right = len(kinds[at]), len(kinds[at + 1])
        middles[at] = (left * middles[at] + right * middles[at + 1]) / (left + right)
        kinds[at] += kinds[at + 1]
        del kinds[at + 1], middles[at + 1], gaps[at]
        for place in (at - 1, at):
            if 0 <= place < len(gaps):
                gaps[place] = middles[place + 1] - middles[place]
    found = [kinds[0]]
    for kind in kinds[1:]:
        if factors[kind[0]] < GAP_LEAST * factors[found[-1][-1]]:
            found[-1] = found[-1] + kind
        else:
            found.append(kind)
    return sorted(found, key=len, reverse=True)


Row = Sequence[tuple[int, float]]
"""Seconds of an engine's steps by batch; never empty."""


def comparable(rows: Sequence[Row]) -> list[int]:
    """Return the places of most rows that can be compared: each shares a batch with one that shares a batch with another, and so on."""
    batches_of = [frozenset(batch for batch, _ in row) for row in rows]
    if rows and frozenset.intersection(*batches_of):
        return list(range(len(rows)))
    left, largest = list(range(len(rows))), list[int]()
    while len(left) > len(largest):
        reached, joined, count = batches_of[left[0]], list[int](), -1
        while count < len(joined):
            count = len(joined)
            joined = [place for place in left if not reached.isdisjoint(batches_of[place])]
            reached = reached.union(*(batches_of[place] for place in joined))
        left = [place for place in left if place not in joined]
        largest = max(largest, joined, key=len)
    return largest


def speeds_of(rows: Sequence[Row]) -> list[float]:
    """Say how fast each engine is beside the others, all of which can be compared.

    Each has measured other batches. What a batch costs and how slow an engine is are told apart by looking at both in turn:
    a batch that only slow engines have measured is no slow batch.
    """
    logs = [[(batch, log(seconds)) for batch, seconds in row] for row in rows]
    slow = [0.0] * len(rows)
    for _ in range(ROUNDS):
        sums: dict[int, list[float]] = {}
        for own, row in zip(slow, logs, strict=True):
            for batch, seconds in row:
                sums.setdefault(batch, []).append(seconds - own)
        costs = {batch: sum(found) / len(found) for batch, found in sums.items()}
        slow = [sum([seconds - costs[batch] for batch, seconds in row]) / len(row) for row in logs]
        if all(len(found) == len(rows) for found in sums.values()):
            break  # all have measured the same, so there is nothing to tell apart
    return [exp(-own) for own in slow]
