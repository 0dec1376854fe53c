"""The kernel's word on memory (Linux PSI): a pure parser, a pure judge, and a task that passes changes on.

    some avg10=0.00 avg60=0.00 avg300=0.00 total=0
    full avg10=0.00 avg60=0.00 avg300=0.00 total=0

`some` is the share of time in which at least one task waited for memory, `full` in which all did; avg10 is over ten
seconds, in percent. A file that cannot be read or makes no sense is no pressure, and is told once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from superfluid_core.logs import log
from superfluid_core.scheduler.plan import Pressure, PressureLevel

logger = logging.getLogger(__name__)

WARNING_SOME_PCT = 10.0
CRITICAL_FULL_PCT = 5.0
POLL_S = 2.0
FILE_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class PressureSample:
    """Averages over ten seconds, percent of time."""

    some_pct: float = 0.0
    full_pct: float = 0.0


def parse_pressure(text: str) -> PressureSample:
    """Read the text of a PSI file. Raises ValueError when it is none."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        kind, *pairs = line.split()
        if kind not in ("some", "full") or kind in found:
            continue
        values = dict(pair.partition("=")[::2] for pair in pairs)
        figure = float(values.get("avg10", "nan"))
        if not 0 <= figure <= 100 or math.isnan(figure):
            raise ValueError(f"{kind} has no avg10 within 0..100")
        found[kind] = figure
    if "some" not in found:
        raise ValueError("no line begins with 'some'")
    return PressureSample(found["some"], found.get("full", 0.0))


def judge_pressure(sample: PressureSample) -> PressureLevel:
    """Critical when all tasks stood still, a warning when some did (scheduler.md, pressure ladder 2)."""
    if sample.full_pct >= CRITICAL_FULL_PCT:
        return PressureLevel.CRITICAL
    if sample.some_pct >= WARNING_SOME_PCT:
        return PressureLevel.WARNING
    return PressureLevel.NONE


class PressureWatch:
    """Reads the file every `POLL_S` and submits a `Pressure` when the level changed."""

    def __init__(self, path: Path, submit: Callable[[Pressure], None]) -> None:
        self._path = path
        self._submit = submit
        self._complaint = ""
        self.level = PressureLevel.NONE

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(POLL_S)

    def look(self) -> None:
        """Take one sample; the kernel answers such a read at once."""
        level = judge_pressure(self._sample())
        if level is self.level:
            return
        log(logger, "warning", "memory pressure of the host", before=self.level, now=level)
        self.level = level
        self._submit(Pressure(level))

    def _sample(self) -> PressureSample:
        try:
            with self._path.open("rb") as file:
                sample = parse_pressure(file.read(FILE_BYTES_MAX).decode("ascii", "replace"))
        except (OSError, ValueError) as error:
            complaint = getattr(error, "strerror", None) or str(error)
            if complaint != self._complaint:
                self._complaint = complaint
                log(logger, "warning", "memory pressure cannot be read", cause=complaint)
            return PressureSample()
        self._complaint = ""
        return sample
