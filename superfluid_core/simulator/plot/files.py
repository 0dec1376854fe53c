"""Writes a plot to a file; its ending says as what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from superfluid_core.errors import ConfigError
from superfluid_core.simulator.plot.chart import draw_comparison, draw_run
from superfluid_core.simulator.plot.html import page
from superfluid_core.simulator.plot.png import png
from superfluid_core.simulator.plot.shapes import Picture
from superfluid_core.simulator.records import RunResult

RUNS_MAX = 24
ENDINGS = (".html", ".htm", ".png")


def check_plot_path(path: str) -> None:
    """Raise ConfigError for a file that cannot be a plot, before anything is simulated."""
    if not path.lower().endswith(ENDINGS):
        raise ConfigError(f"--plot {path[:200]}: the name must end in .html or .png")
    if not Path(path).resolve().parent.is_dir():
        raise ConfigError(f"--plot {path[:200]}: there is no such directory")


def pictures_of(results: Sequence[RunResult], unit: str) -> list[Picture]:
    pictures = draw_comparison(results, unit) if len(results) > 1 else []
    return pictures + [draw_run(each, unit) for each in results[:RUNS_MAX]]


def write_plot(path: str, title: str, pictures: Sequence[Picture], text: str) -> None:
    data = (
        page(title, pictures, text).encode() if not path.lower().endswith(".png") else png(pictures)
    )
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write {path[:200]}: {error.strerror}") from error
