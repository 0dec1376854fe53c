"""What a chaos scenario is: a name, the bars it is held to, and the row of figures that it comes back with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from superfluid_head.bench.report import percentile
from tests.chaos.history import History, Judgement, judge, shown
from tests.chaos.oracle import oracle

GAP_FROZEN_MS_MAX = 4_000.0
GAP_KILLED_MS_MAX = 300.0
HEADERS = (
    "id", "what", "faults", "streams", "moved", "lost", "dup", "failed", "equal %",
    "gap p50", "gap p99", "verdict",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scale:
    """How much to do: `runs` replaces the number of faults of a scenario, `clients` that of its clients."""

    seed: int = 1
    runs: int = 0
    clients: int = 0

    def faults(self, usual: int) -> int:
        return self.runs or usual

    def crowd(self, usual: int = 32) -> int:
        return self.clients or usual


@dataclass(slots=True)
class Row:
    """The outcome of a scenario. `missed` names every bar that was not met, `notes` the figures beside them."""

    name: str
    what: str
    faults: int = 0
    found: Judgement = field(default_factory=Judgement)
    missed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_run: bool = True

    @property
    def verdict(self) -> str:
        if not self.is_run:
            return "not run"
        return "missed" if self.missed else "met"

    def check(self, is_met: bool, words: str) -> None:
        """Hold the run to a bar; `words` say what was measured."""
        (self.notes if is_met else self.missed).append(words)

    def add(self, history: History) -> Judgement:
        """Judge a history and add it; texts, usage and ends are bars of every scenario."""
        part = judge(history, oracle().of)
        whole = self.found
        self.faults += len(history.faults)
        for name in ("streams", "complete", "equal", "moved", "failed", "lost", "duplicated"):
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        whole.gaps_ms += part.gaps_ms
        whole.raw_gaps_ms += part.raw_gaps_ms
        whole.longest = max(whole.longest, part.longest)
        whole.errors += part.errors
        whole.problems += part.problems
        self.missed += shown(part.problems)
        return part

    def hold_gap(self, bar_ms: float) -> None:
        """The 99th percentile of the gaps is at most `bar_ms`."""
        gap_ms, raw_ms = self.found.gap_ms(99), percentile(self.found.raw_gaps_ms, 99)
        gaps = len(self.found.gaps_ms)
        words = (
            f"gap p99 {gap_ms:.0f} ms of {gaps} (bar {bar_ms:.0f}; as clients saw it {raw_ms:.0f})"
        )
        self.check(gaps > 0 and gap_ms <= bar_ms, words)
        if gap_ms > bar_ms:
            self.notes.append(
                f"the longest, {self.found.longest[0]:.0f} ms: {self.found.longest[1]}"
            )

    def cells(self) -> list[object]:
        found = self.found
        return [
            self.name, self.what, self.faults, found.streams, found.moved, found.lost,
            found.duplicated, found.failed, round(found.equal_percent, 2),
            percentile(found.gaps_ms, 50), percentile(found.gaps_ms, 99), self.verdict,
        ]  # fmt: skip

    def fields(self) -> dict[str, Any]:
        """The row for a program."""
        found = self.found
        return {
            **dict(zip(HEADERS, self.cells(), strict=True)),
            "complete": found.complete,
            "errors": dict(found.errors),
            "missed": self.missed,
            "notes": self.notes,
        }


Scenario = Callable[[Scale], Awaitable[Row]]
