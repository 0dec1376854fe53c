"""How far a piece of work has come, for whoever waits: on a terminal a bar that redraws itself, elsewhere a line now and then.

Owns the two looks and their rarity: a step costs an addition, nothing is drawn more often than STEPS_SHOWN times. It goes to standard
error, so that what a program prints stays what it printed. Work of unknown length gets a spinner with the time that has passed.
It must not know what is done.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

STEPS_SHOWN = 200
LINES = 10


class Meter:
    """Progress of one piece of work; use it as a context manager and call `step`.

    `total` None is unknown. `has_lines` False leaves places that are no terminal without a word, where the work says enough itself.
    """

    def __init__(
        self,
        label: str,
        total: int | None = None,
        *,
        has_lines: bool = True,
        out: TextIO | None = None,
    ) -> None:
        self._label = label
        self._total = total
        self._out = sys.stderr if out is None else out
        self._is_terminal = self._out.isatty()
        self._has_lines = has_lines and total is not None
        shows = STEPS_SHOWN if self._is_terminal else LINES
        self._every = max(1, -(-(total or 0) // shows))
        self._done = 0
        self._next = self._every
        self._stack = ExitStack()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._is_terminal:
            self._bar = self._stack.enter_context(_bar(self._out, is_known=self._total is not None))
            self._bar.add_task(self._label, total=self._total)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None and self._total is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        self._stack.close()

    def step(self, count: int = 1) -> None:
        """Note that so much more is done."""
        self._done += count
        if self._done >= self._next:
            self._next = self._done + self._every
            self._show()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif self._has_lines and self._total:
            percent = 100 * self._done // self._total
            self._out.write(f"{self._label}: {percent} % ({self._done:,} of {self._total:,})\n")
            self._out.flush()


def _bar(out: TextIO, *, is_known: bool) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    name = TextColumn("{task.description}", markup=False)
    known: list[ProgressColumn] = [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    columns = known if is_known else [TimeElapsedColumn()]
    return Progress(SpinnerColumn(), name, *columns, console=Console(file=out), transient=True)
