"""Draws runs: what steps were made of over time, how full the pool was, and how cases compare.

Steps are gathered into columns of a few pixels: a column shows the fullest step that began in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from superfluid_core.simulator.plot.shapes import (
    DECODE,
    INK,
    PALE,
    POOL,
    PROMPT,
    QUEUE,
    Line,
    Picture,
    Rectangle,
    Words,
)
from superfluid_core.simulator.records import RunResult

WIDTH = 960
LEFT, RIGHT = 80, 20
PANEL = 110
GAP = 44
COLUMN = 2
BAR = 14


class _Column(NamedTuple):
    decode: int
    prompt: int
    used: int
    queued: int


def _columns(result: RunResult, count: int) -> list[_Column]:
    columns = [_Column(0, 0, 0, 0)] * count
    end_ns = max(1, result.steps[-1].end_ns) if result.steps else 1
    for step in result.steps:
        prompt = sum(tokens for _, tokens in step.prompts)
        last = min(count - 1, step.end_ns * count // end_ns)
        for place in range(min(count - 1, step.start_ns * count // end_ns), last + 1):
            old = columns[place]
            fuller = max((old.decode, old.prompt), (len(step.decoding), prompt), key=sum)
            columns[place] = _Column(
                *fuller, max(old.used, step.used), max(old.queued, step.queued)
            )
    return columns


def _frame(picture: Picture, top: int, most: float, name: str) -> None:
    """Axis, scale and name of one panel."""
    bottom = top + PANEL
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * PANEL
        picture.add(Line(LEFT, y, WIDTH - RIGHT, y, PALE))
        picture.add(Words(LEFT - 6, y + 4, f"{most * share:g}", is_right=True))
    picture.add(Words(LEFT, top - 8, name))


def _draw_steps(picture: Picture, top: int, columns: Sequence[_Column]) -> None:
    most = max((each.decode + each.prompt for each in columns), default=0) or 1
    _frame(picture, top, most, "tokens per step")
    picture.add(Words(LEFT + 190, top - 8, "decode", DECODE, is_bold=True))
    picture.add(Words(LEFT + 260, top - 8, "prompt", PROMPT, is_bold=True))
    for place, count, each in _runs(columns):
        x = LEFT + place * COLUMN
        y: float = top + PANEL
        for value, color in ((each.decode, DECODE), (each.prompt, PROMPT)):
            height = value * PANEL / most
            if height:
                y -= height
                picture.add(Rectangle(x, y, COLUMN * count, height, color))


def _runs(columns: Sequence[_Column]) -> Iterator[tuple[int, int, _Column]]:
    """Gather equal neighbours: (place, how many, column)."""
    place = 0
    for column, group in groupby(columns):
        count = sum(1 for _ in group)
        yield place, count, column
        place += count


def _draw_pool(picture: Picture, top: int, columns: Sequence[_Column], blocks: int) -> None:
    queued = max((each.queued for each in columns), default=0) or 1
    _frame(picture, top, 100, "% of the KV pool")
    picture.add(Words(LEFT + 190, top - 8, "pool", POOL, is_bold=True))
    picture.add(Words(LEFT + 260, top - 8, f"queue (most: {queued})", QUEUE, is_bold=True))
    _draw_line(picture, top, [each.used / blocks for each in columns], POOL)
    _draw_line(picture, top, [each.queued / queued for each in columns], QUEUE)


def _draw_line(picture: Picture, top: int, shares: Sequence[float], color: str) -> None:
    """Join the columns; level stretches are one line."""
    bottom = top + PANEL
    place, before = 0, shares[0]
    for share, group in groupby(shares):
        x, y = LEFT + place * COLUMN, bottom - share * PANEL
        count = sum(1 for _ in group)
        if share != before:
            picture.add(Line(x, bottom - before * PANEL, x, y, color, is_bold=True))
        picture.add(Line(x, y, x + count * COLUMN, y, color, is_bold=True))
        place += count
        before = share


def draw_run(result: RunResult, unit: str) -> Picture:
    """Draw one case over its recorded steps."""
    picture = Picture(WIDTH, 3 * GAP + 2 * PANEL + 30)
    assert result.stats is not None, "a run ends with its statistics"
    columns = _columns(result, (WIDTH - LEFT - RIGHT) // COLUMN)
    picture.add(Words(LEFT, 22, result.label, is_bold=True))
    _draw_steps(picture, GAP + 16, columns)
    _draw_pool(picture, 2 * GAP + PANEL + 16, columns, result.stats.blocks)
    bottom = 2 * GAP + 2 * PANEL + 34
    end_ns = result.steps[-1].end_ns if result.steps else 0
    picture.add(Words(LEFT, bottom, "0"))
    picture.add(Words(WIDTH - RIGHT, bottom, f"{end_ns / result.unit_ns:g} {unit}", is_right=True))
    if result.step_count > len(result.steps):
        note = f"the first {len(result.steps)} of {result.step_count} steps"
        picture.add(Words(LEFT + 320, bottom, note))
    return picture


class Bar(NamedTuple):
    """One bar of a comparison."""

    label: str
    value: float
    text: str


def draw_bars(title: str, bars: Sequence[Bar]) -> Picture:
    """Draw horizontal bars under one title, on a scale of their own."""
    picture = Picture(WIDTH, GAP + len(bars) * (BAR + 6) + 12)
    most = max([each.value for each in bars] + [1e-12])
    left = 260
    picture.add(Words(LEFT, 22, title, is_bold=True))
    for place, each in enumerate(bars):
        y = GAP - 8 + place * (BAR + 6)
        width = each.value * (WIDTH - left - 190) / most
        picture.add(Words(left - 8, y + BAR - 3, each.label, is_right=True))
        picture.add(Rectangle(left, y, max(1.0, width), BAR, DECODE))
        picture.add(Words(left + width + 6, y + BAR - 3, each.text, INK))
    return picture


def draw_comparison(results: Sequence[RunResult], unit: str) -> list[Picture]:
    """Compare cases by first tokens, gaps, throughput and goodput."""
    pictures = []
    for title, name, percent in (
        ("time to the first token, p50", "ttft", 50),
        ("time to the first token, p99", "ttft", 99),
        ("time between tokens, p99", "itl", 99),
    ):
        bars = []
        for result in results:
            value = result.units(getattr(result.all, name).percentile(percent))
            bars.append(Bar(result.label, value, f"{value:.2f} {unit}"))
        pictures.append(draw_bars(title, bars))
    per = unit if unit == "ms" else unit.removesuffix("s")
    for title, field in (("throughput", "output_tokens"), ("goodput", "good_tokens")):
        bars = []
        for result in results:
            value = getattr(result.all, field) / max(1e-9, result.units(result.ended_ns))
            bars.append(Bar(result.label, value, f"{value:.3f} tokens/{per}"))
        pictures.append(draw_bars(title, bars))
    return pictures
