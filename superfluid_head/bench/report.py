"""Figures as people and programs want them: percentiles, medians, a table, a JSON line per round.

Pure. Percentiles are of the nearest rank, so every figure shown was measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value of nearest rank; nan without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = max(1, math.ceil(percent / 100 * len(ordered)))
    return ordered[rank - 1]


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def shown(value: object) -> str:
    """Write a cell: three significant digits for fractions, a dash for what was not measured."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Right-aligned columns, the first one left-aligned."""
    cells = [[shown(value) for value in row] for row in rows]
    widths = [
        max(len(header), *(len(row[n]) for row in cells), 0) if cells else len(header)
        for n, header in enumerate(headers)
    ]

    def line(row: Sequence[str]) -> str:
        first = row[0].ljust(widths[0])
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        return "  ".join([first, *rest]).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(headers), rule, *(line(row) for row in cells)])


def json_line(fields: Mapping[str, Any]) -> str:
    """One round as one line; nan becomes null, because JSON knows no nan."""
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in fields.items()
    }
    return json.dumps(clean, separators=(", ", ": "))
