"""What a step costs: one number from how many tokens it carries and how much KV it reads.

    unit                     1 unit
    stream(10, 50)           max(10, tokens / 50) units
    roofline(gpu, model)     max(bytes / bandwidth, operations / peak): the weights once, every sequence's KV
    roofline(gpu, model, 50) the same at 50 % of the peak operations
    measured(FILE)           a table recorded from a real engine

A unit is a duration of the scenario's choice; it is cut into integer nanoseconds, so that sums are exact.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from superfluid_core.errors import ConfigError
from superfluid_core.simulator.hardware import (
    Gpu,
    Model,
    compute_ns,
    find_gpu,
    find_model,
    transfer_ns,
)

COSTS_FORMAT = "superfluid-costs/1"
FILE_BYTES_MAX = 16 * 1024 * 1024


class StepLoad(NamedTuple):
    """One forward pass: lanes that decode, prompt tokens beside them, KV positions read over all lanes."""

    decoding: int
    prompt: int
    context: int

    @property
    def tokens(self) -> int:
        return self.decoding + self.prompt


class CostModel(Protocol):
    """Pure: the same load costs the same, whenever it is asked."""

    def step_ns(self, load: StepLoad) -> int: ...


@dataclass(frozen=True, slots=True)
class Unit:
    """Every step takes one unit."""

    unit_ns: int

    def step_ns(self, load: StepLoad) -> int:
        del load
        return self.unit_ns


@dataclass(frozen=True, slots=True)
class Stream:
    """A floor, and above it a number of tokens a unit."""

    floor_ns: int
    token_ns: Fraction

    def step_ns(self, load: StepLoad) -> int:
        return max(self.floor_ns, math.ceil(load.tokens * self.token_ns))


@dataclass(frozen=True, slots=True)
class Roofline:
    """Memory or arithmetic, whichever takes longer; `peak_pct` is the share of the peak that is reached."""

    gpu: Gpu
    model: Model
    peak_pct: int = 100
    _weight_bytes: int = field(init=False, repr=False)
    _token_flops: int = field(init=False, repr=False)
    _peak: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Work out once what every step asks for."""
        object.__setattr__(self, "_weight_bytes", self.model.weight_bytes)
        object.__setattr__(self, "_token_flops", self.model.flops * 100)
        object.__setattr__(self, "_peak", self.gpu.flops * self.peak_pct)

    def step_ns(self, load: StepLoad) -> int:
        size = self._weight_bytes + load.context * self.model.kv_bytes
        memory_ns = transfer_ns(size, self.gpu.bandwidth)
        return max(memory_ns, compute_ns(load.tokens * self._token_flops, self._peak))


class _Line:
    """Straight lines between measured points; beyond the last one, on along the last slope."""

    def __init__(self, points: Sequence[tuple[int, int]]) -> None:
        self._points = sorted(points)
        self._counts = [count for count, _ in self._points]

    def at(self, count: int) -> int:
        points = self._points
        place = bisect_left(self._counts, count)
        if place < len(points) and points[place][0] == count:
            return points[place][1]
        if place == 0:
            return points[0][1]
        high = min(place, len(points) - 1)
        if high == 0:
            return points[0][1] * count // points[0][0]
        (low_count, low_ns), (high_count, high_ns) = points[high - 1], points[high]
        slope = Fraction(high_ns - low_ns, high_count - low_count)
        return max(low_ns, round(low_ns + slope * (count - low_count)))


class Measured:
    """Recorded step times: decode by batch, prompt by tokens in the step, and what a KV position adds.

    A mixed step costs what its prompt costs plus what its decoding lanes cost over a batch of one.
    """

    def __init__(
        self,
        decode: Sequence[tuple[int, int]],
        prefill: Sequence[tuple[int, int]],
        context_ps: int = 0,
    ) -> None:
        if not decode or not prefill:
            raise ConfigError("recorded costs need at least one decode and one prefill point")
        self._decode = _Line(decode)
        self._prefill = _Line(prefill)
        self._context_ps = context_ps

    def step_ns(self, load: StepLoad) -> int:
        base = load.context * self._context_ps // 1000
        if not load.prompt:
            return base + self._decode.at(load.decoding)
        cost = base + self._prefill.at(load.prompt)
        if load.decoding:
            cost += max(0, self._decode.at(load.decoding) - self._decode.at(1))
        return cost

    @staticmethod
    def read(path: str) -> Measured:
        """Read a recorded table. Raises ConfigError when the file is not one."""
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        if len(data) > FILE_BYTES_MAX:
            raise ConfigError(f"{path} is larger than {FILE_BYTES_MAX} bytes")
        try:
            table = json.loads(data)
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        return Measured.parse(table, path)

    @staticmethod
    def parse(table: Any, origin: str) -> Measured:
        if not isinstance(table, dict) or table.get("format") != COSTS_FORMAT:
            raise ConfigError(f"{origin} does not say format {COSTS_FORMAT!r}")
        context_ps = table.get("context_ps", 0)
        if type(context_ps) is not int or context_ps < 0:
            raise ConfigError(f"{origin}: context_ps must be a whole number from 0")
        return Measured(
            _points(table.get("decode"), f"{origin}: decode"),
            _points(table.get("prefill"), f"{origin}: prefill"),
            context_ps,
        )


def _points(rows: Any, origin: str) -> list[tuple[int, int]]:
    """Read [[count, ns], ...], each count once."""
    points: dict[int, int] = {}
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, list) or len(row) != 2 or any(type(each) is not int for each in row):
            raise ConfigError(f"{origin} must be rows of [count, nanoseconds]")
        if row[0] < 1 or row[1] < 0:
            raise ConfigError(f"{origin} holds a count below 1 or a negative time")
        points[row[0]] = row[1]
    return list(points.items())


def parse_cost(text: str, unit_ns: int) -> CostModel:
    """Read a cost model as it is written on the command line. Raises ConfigError."""
    name, _, rest = text.strip().partition("(")
    if rest and not rest.endswith(")"):
        raise ConfigError(f"cost model {text[:60]!r} has no closing parenthesis")
    arguments = [part.strip() for part in rest[:-1].split(",")] if rest else []
    match [name.strip(), *arguments]:
        case ["unit"]:
            return Unit(unit_ns)
        case ["stream", floor, tokens]:
            per_unit = _number(tokens, text)
            return Stream(math.ceil(_number(floor, text) * unit_ns), unit_ns / per_unit)
        case ["roofline", gpu, model]:
            return Roofline(find_gpu(gpu), find_model(model))
        case ["roofline", gpu, model, peak]:
            return Roofline(find_gpu(gpu), find_model(model), int(_number(peak, text)))
        case ["measured", path]:
            return Measured.read(path)
        case _:
            pass
    known = "unit, stream(FLOOR, TOKENS), roofline(GPU, MODEL[, PEAK%]), measured(FILE)"
    raise ConfigError(f"unknown cost model {text[:60]!r}; known: {known}")


def _number(text: str, origin: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{text[:20]!r} in {origin[:60]!r} is not a number") from error
    if value <= 0:
        raise ConfigError(f"{text[:20]!r} in {origin[:60]!r} must be above 0")
    return value
