"""How answers feel to their readers just now: waits for first tokens, gaps between tokens, tokens a second, by slots of time.

Owns a bounded row of slots of SLOT_S seconds each, oldest dropped first, with counts in buckets that grow by a fifth: enough for
quantiles that a person reads off a chart, at well under a microsecond a token. What Prometheus scrapes is `metrics.py`; this is
for whoever looks at this head now (the dashboard, `superfluid top`). It knows no clock, no node and no route: time and names
are handed in. What several heads of one machine noted can be added up (`share`, `joined`): slots are numbered by a clock that they share.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from superfluid_core.clock import SECOND

SLOT_S = 5
SLOTS_MAX = 120
NODES_MAX = 1_024
OTHERS = "~other"
"""No node can be called this."""
RATE_SLOTS = 2
QUANTILE_SLOTS = 12
QUANTILES = (50, 95, 99)
GROWTH = 1.2
LEAST_S = 1.0
"""A slot that has just begun is taken for this long, so that its rate is no spike."""
LEAST_MS, MOST_MS = 0.1, 600_000.0


def _bounds() -> tuple[float, ...]:
    found = [LEAST_MS]
    while found[-1] < MOST_MS:
        found.append(found[-1] * GROWTH)
    return tuple(found)


BOUNDS_MS = _bounds()
"""Upper ends of the buckets; the last bucket has none."""


@dataclass(slots=True)
class Spread:
    """Durations by bucket. `most_ms` is the longest of them."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_MS) + 1))
    total: int = 0
    most_ms: float = 0.0

    def add(self, elapsed_ms: float) -> None:
        self.counts[bisect_left(BOUNDS_MS, elapsed_ms)] += 1
        self.total += 1
        if elapsed_ms > self.most_ms:
            self.most_ms = elapsed_ms

    def merge(self, other: Spread) -> None:
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total += other.total
        self.most_ms = max(self.most_ms, other.most_ms)

    def share(self) -> dict[str, Any]:
        """Return it as plain values; buckets that are empty are left out."""
        counts = [[bucket, count] for bucket, count in enumerate(self.counts) if count]
        return {"counts": counts, "most_ms": self.most_ms}

    def take(self, share: Mapping[str, Any]) -> None:
        """Add what `share` returned."""
        for bucket, count in share["counts"]:
            self.counts[bucket] += count
            self.total += count
        self.most_ms = max(self.most_ms, share["most_ms"])

    def quantile_ms(self, percent: int) -> float | None:
        """Interpolate within the bucket that holds it; never beyond the longest. None without any."""
        if not self.total:
            return None
        rank, before = self.total * percent / 100, 0
        for bucket, count in enumerate(self.counts):
            if count and before + count >= rank:
                low = 0.0 if bucket == 0 else BOUNDS_MS[bucket - 1]
                high = self.most_ms if bucket == len(BOUNDS_MS) else BOUNDS_MS[bucket]
                return min(low + (high - low) * (rank - before) / count, self.most_ms)
            before += count
        return self.most_ms

    def shown(self) -> dict[str, float | int | None]:
        found: dict[str, float | int | None] = {"count": self.total}
        for percent in QUANTILES:
            value = self.quantile_ms(percent)
            found[f"p{percent}"] = None if value is None else round(value, 2)
        return found


@dataclass(slots=True)
class _Slot:
    """What happened in SLOT_S seconds."""

    number: int
    first: Spread = field(default_factory=Spread)
    gaps: Spread = field(default_factory=Spread)
    tokens: dict[str, int] = field(default_factory=dict)
    moves: int = 0

    def share(self) -> dict[str, Any]:
        """Return it as plain values, to be added to another head's."""
        return {
            "slot": self.number,
            "first": self.first.share(),
            "gaps": self.gaps.share(),
            "tokens": self.tokens,
            "moves": self.moves,
        }

    def take(self, share: Mapping[str, Any]) -> None:
        """Add what `share` returned."""
        self.first.take(share["first"])
        self.gaps.take(share["gaps"])
        self.moves += share["moves"]
        for name, count in share["tokens"].items():
            self.tokens[name] = self.tokens.get(name, 0) + count

    def shown(self, at_s: int, seconds: float) -> dict[str, Any]:
        """Show it as a point; `seconds` of it have passed."""
        return {
            "slot": self.number,
            "at": at_s,
            "tokens_per_s": round(sum(self.tokens.values()) / seconds, 2),
            "moves": self.moves,
            "ttft_ms": self.first.shown(),
            "itl_ms": self.gaps.shown(),
        }


class Vitals:
    """The last SLOTS_MAX slots. Event-loop only; times are of the head's monotonic clock."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque(maxlen=SLOTS_MAX)
        self._names: set[str] = set()
        self._ends_ns = 0

    @classmethod
    def joined(cls, shares: Iterable[Mapping[str, Any]]) -> Vitals:
        """Add up the slots of several heads."""
        slots: dict[int, _Slot] = {}
        for share in shares:
            number = share["slot"]
            slots.setdefault(number, _Slot(number)).take(share)
        found = cls()
        found._slots.extend(slots[number] for number in sorted(slots))
        return found

    def shares(self, now_ns: int, count: int = SLOTS_MAX) -> list[dict[str, Any]]:
        """Return the slots of the last `count` times SLOT_S seconds, for `joined`."""
        return [slot.share() for slot in self._recent(now_ns, count)]

    def first_token(self, now_ns: int, elapsed_s: float) -> None:
        """Note how long a choice waited for its first token."""
        self._at(now_ns).first.add(elapsed_s * 1_000)

    def next_token(self, now_ns: int, elapsed_s: float) -> None:
        """Note the time between two deliveries of a choice."""
        self._at(now_ns).gaps.add(elapsed_s * 1_000)

    def tokens(self, now_ns: int, node: str | None, count: int) -> None:
        """Count tokens that came from a node."""
        name, found = node or OTHERS, self._at(now_ns).tokens
        if name not in found:
            name = self._bounded(name)
        found[name] = found.get(name, 0) + count

    def delivered(self, now_ns: int, elapsed_s: float, node: str | None, count: int) -> None:
        """Note both of a delivery that is not the first."""
        slot = self._slots[-1] if now_ns < self._ends_ns else self._at(now_ns)
        slot.gaps.add(elapsed_s * 1_000)
        tokens = slot.tokens
        if node is not None and node in tokens:
            tokens[node] += count
        else:
            name = self._bounded(node or OTHERS)
            tokens[name] = tokens.get(name, 0) + count

    def moved(self, now_ns: int) -> None:
        self._at(now_ns).moves += 1

    def points(self, now_ns: int, wall_s: int, count: int = SLOTS_MAX) -> list[dict[str, Any]]:
        """Return the slots of the last `count` times SLOT_S seconds, oldest first; the last one may still grow.

        Slots in which nothing happened are left out. `at` is the wall time at which a slot began.
        """
        now = now_ns // (SLOT_S * SECOND)
        began_s = wall_s - (now_ns % (SLOT_S * SECOND)) // SECOND
        grown_s = max(LEAST_S, now_ns % (SLOT_S * SECOND) / SECOND)
        return [
            slot.shown(
                began_s - (now - slot.number) * SLOT_S, grown_s if slot.number == now else SLOT_S
            )
            for slot in self._recent(now_ns, count)
        ]

    def summary(self, now_ns: int) -> dict[str, Any]:
        """Say how it is: tokens a second lately, and the quantiles of a minute."""
        minute = self._recent(now_ns, QUANTILE_SLOTS)
        return {
            "tokens_per_s": round(sum(self.rates(now_ns).values()), 2),
            "ttft_ms": _merged([slot.first for slot in minute]).shown(),
            "itl_ms": _merged([slot.gaps for slot in minute]).shown(),
        }

    def rates(self, now_ns: int) -> dict[str, float]:
        """Return tokens a second by node, over the last whole slot and the one that grows."""
        length = SLOT_S * SECOND
        seconds = (RATE_SLOTS - 1) * SLOT_S + (now_ns % length) / SECOND
        total: dict[str, int] = {}
        for slot in self._recent(now_ns, RATE_SLOTS):
            for name, count in slot.tokens.items():
                total[name] = total.get(name, 0) + count
        return {name: round(count / seconds, 2) for name, count in total.items()}

    def _at(self, now_ns: int) -> _Slot:
        if now_ns >= self._ends_ns:
            number = now_ns // (SLOT_S * SECOND)
            self._ends_ns = (number + 1) * SLOT_S * SECOND
            self._slots.append(_Slot(number))
        return self._slots[-1]

    def _recent(self, now_ns: int, count: int) -> Sequence[_Slot]:
        oldest = now_ns // (SLOT_S * SECOND) - count
        return [slot for slot in self._slots if slot.number > oldest]

    def _bounded(self, name: str) -> str:
        if name not in self._names:
            if len(self._names) >= NODES_MAX:
                return OTHERS
            self._names.add(name)
        return name


def _merged(spreads: Iterable[Spread]) -> Spread:
    total = Spread()
    for each in spreads:
        total.merge(each)
    return total
