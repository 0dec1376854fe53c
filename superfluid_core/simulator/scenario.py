"""What is simulated, as data: who arrives when and how long they are, the scheduler's flags, and the figures to print.

A scenario is a list of cases: the same or other arrivals under other flags. It must not schedule: it only reads what a
run recorded. A figure with a golden is asserted by a test; a change that moves one must say why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from superfluid_core.session import QosClass
from superfluid_core.simulator.flags import Flags

if TYPE_CHECKING:
    from superfluid_core.simulator.records import RunResult


@dataclass(slots=True, unsafe_hash=True)
class Arrival:
    """One session to come. Lengths are tokens; `prefix` names a text that the first `prefix_tokens` are taken from. Nobody changes it."""

    at_ns: int
    prompt: int
    output: int
    name: str = ""
    qos: QosClass = QosClass.AGENT
    tenant: str = "anonymous"
    cohort: str = ""
    prefix: int = 0
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """One run: arrivals in order of time, under flags. It ends when all is done, or at `until_ns`."""

    label: str
    flags: Flags
    arrivals: Iterable[Arrival]
    until_ns: int | None = None
    steps_max: int | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """One printed line: its name, its value as text, and what it must be where that is known."""

    name: str
    value: str
    golden: str | None = None

    @property
    def is_met(self) -> bool:
        return self.golden is None or self.golden == self.value


Results = Mapping[str, "RunResult"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A named set of cases and what to read off their results, by label."""

    name: str
    title: str
    cases: Callable[[], tuple[Case, ...]]
    figures: Callable[[Results], tuple[Figure, ...]]
    unit: str = "ms"
    tags: tuple[str, ...] = field(default=())


def figure(name: str, value: str, golden: str | None = None) -> Figure:
    return Figure(name, value, golden)
