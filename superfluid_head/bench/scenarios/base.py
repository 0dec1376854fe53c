"""What a scenario is: set up once, measured round by round, judged against the bars that its text states.

Owns the protocol (`Scenario`), what a caller may choose (`Plan`), and how figures become a verdict (`Bar`). It starts nothing and
asks nobody. A figure that was not measured misses its bar; a bar is held against the median of the counted rounds or against
every single one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from superfluid_head.bench.report import median

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the caller chose. None means the scenario's own default; `is_quick` shrinks sizes, never bars."""

    rounds: int | None = None
    streams: int | None = None
    seed: int = 1
    engine: str | None = None
    model: str = "demo"
    dtype: str = "auto"
    batch_invariant: bool = False
    is_quick: bool = False
    base_url: str | None = None
    api_key: str | None = None
    peer_venv: str | None = None
    is_beside: bool = False
    vllm_python: str | None = None


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of what must hold. `least` or `most` may be absent; `of_every` judges rounds singly, not their median."""

    figure: str
    least: float = -math.inf
    most: float = math.inf
    of_every: bool = False

    def judge(self, rounds: Sequence[Figures]) -> Verdict:
        values = [figures.get(self.figure, math.nan) for figures in rounds]
        if self.of_every:
            held = [each for each in values if not self._holds(each)] or values
            measured = held[0] if held else math.nan
        else:
            measured = median(values) if not any(map(math.isnan, values)) else math.nan
        return Verdict(self, measured, self._holds(measured))

    def _holds(self, value: float) -> bool:
        return self.least <= value <= self.most

    @property
    def words(self) -> str:
        sides = [f">= {self.least:g}"] if self.least > -math.inf else []
        sides += [f"<= {self.most:g}"] if self.most < math.inf else []
        return f"{self.figure} {' and '.join(sides)}{' in every round' if self.of_every else ''}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bar and what was measured."""

    bar: Bar
    measured: float
    is_met: bool

    @property
    def words(self) -> str:
        return f"{'met   ' if self.is_met else 'MISSED'}  {self.bar.words}: {self.measured:.4g}"


class Scenario:
    """The base of all. A subclass names itself, says its bars, and measures; `setup` leaves what it opened to the stack."""

    name: ClassVar[str]
    about: ClassVar[str]
    needs_rig: ClassVar[str] = ""
    """Why it cannot run against a server that somebody else started; empty when it can."""
    engine: ClassVar[str] = "native"
    rounds: ClassVar[int] = 3
    bars: tuple[Bar, ...] = ()

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.notes: list[str] = []

    @property
    def engine_in_use(self) -> str:
        return self.plan.engine or self.engine

    @property
    def is_mock(self) -> bool:
        return self.engine_in_use == "mock"

    def size(self, whole: int, quick: int) -> int:
        """Choose between the size of the document and the small one."""
        return quick if self.plan.is_quick else whole

    def setup(self, stack: ExitStack) -> None:
        """Start or find the server. Raises RigError."""

    def round(self, number: int) -> Figures:
        """Measure once; round 0 warms up and is not counted."""
        raise AssertionError(f"{self.name} measures nothing in round {number}")

    def judge(self, rounds: Sequence[Figures]) -> list[Verdict]:
        return [bar.judge(rounds) for bar in self.bars]
