"""How figures are written: the published answers fix the number of places."""

from __future__ import annotations

from collections.abc import Iterable

from superfluid_core.simulator.records import RunResult

MS_NS = 1_000_000


def ms(nanoseconds: int, places: int = 1) -> str:
    return f"{nanoseconds / MS_NS:.{places}f} ms"


def units(result: RunResult, nanoseconds: int, places: int = 2) -> str:
    return f"{result.units(nanoseconds):.{places}f}"


def listed(values: Iterable[object]) -> str:
    return " ".join(str(value) for value in values)


def finishes(result: RunResult) -> list[int]:
    """When each session ended, in order of arrival, in whole units."""
    return [
        round(result.units(each.finished_ns))
        for each in result.sessions
        if each.finished_ns is not None
    ]


def starts(result: RunResult) -> list[str]:
    """Names in the order in which they were first computed."""
    began = [(each.started_ns, each.arrival.name) for each in result.sessions]
    return [name for at_ns, name in sorted((at, n) for at, n in began if at is not None)]
