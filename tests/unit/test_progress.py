"""A meter's two looks: lines now and then in a file, a bar on a terminal, and never more of either than a person can read."""

from __future__ import annotations

import io
import re

import pytest

from superfluid_core.progress import LINES, Meter


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("total", [1, 7, 10, 1_000, 12_345])
def test_in_a_file_there_are_ten_lines_at_most_and_the_last_is_the_end(total: int) -> None:
    out = io.StringIO()
    with Meter("copying", total, out=out) as meter:
        for _ in range(total):
            meter.step()
    lines = out.getvalue().splitlines()
    assert 1 <= len(lines) <= LINES
    assert re.fullmatch(r"copying: \d+ % \([\d,]+ of [\d,]+\)", lines[0])
    if total % LINES == 0 or total < LINES:
        assert lines[-1] == f"copying: 100 % ({total:,} of {total:,})"


def test_work_that_says_enough_itself_and_work_of_unknown_length_write_nothing_in_a_file() -> None:
    out = io.StringIO()
    for meter in (Meter("a", 100, has_lines=False, out=out), Meter("b", out=out)):
        with meter:
            for _ in range(100):
                meter.step()
    assert out.getvalue() == ""


def test_on_a_terminal_there_is_a_bar_that_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    with Meter("[red]copying", 1_000, out=out) as meter:
        for _ in range(1_000):
            meter.step()
        assert meter._bar is not None
        meter._bar.refresh()
    text = out.getvalue()
    assert "[red]copying" in text, "a name is no markup"
    assert "1000/1000" in text
    assert text.rstrip("\n").endswith("\x1b[2K"), "the line is wiped"


def test_a_spinner_shows_the_time_of_work_whose_length_nobody_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    with Meter("loading", out=out) as meter:
        meter.step(5)
        assert meter._bar is not None
        meter._bar.refresh()
    assert "loading" in out.getvalue()
    assert "0:00:00" in out.getvalue()


def test_an_error_goes_through_and_the_bar_is_gone() -> None:
    meter = Meter("work", 10, out=Terminal())

    def break_off() -> None:
        with meter:
            meter.step()
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        break_off()
    meter.step(9)
