"""The arithmetic of `superfluid bench engine`, without an engine; and where things are cached."""

from __future__ import annotations

from pathlib import Path

import pytest

from superfluid_noded.bench_steps import Figures, lines, summary
from superfluid_noded.config import cache_dir


def test_the_summary_holds_medians_and_the_ratios_of_the_bars() -> None:
    found = Figures()
    for served, bare, theirs in ((100.0, 70.0, 50.0), (90.0, 80.0, 45.0), (80.0, 90.0, 40.0)):
        found.add(found.tok_s, "decode 8", "native", served)
        found.add(found.bare_ms, "decode 8", "native", bare)
        found.add(found.tok_s, "decode 8", "llama-server", theirs)
    ours, peer = summary(found, {"decode 8": 40.0})
    assert ours["tok_s"] == 90
    assert ours["served_over_bare"] == pytest.approx(8000 / 90 / 80)
    assert ours["over_floor"] == 2
    assert peer == {"measure": "decode 8", "name": "llama-server", "tok_s": 45, "native_ratio": 2}
    drawn = lines([ours, peer])
    assert drawn[1].split() == ["decode", "8:", "native", "90.00", "1.00", "80.00", "1.11", "40.00", "2.00", "-"]  # fmt: skip
    assert drawn[2].split() == [
        "decode",
        "8:",
        "llama-server",
        "45.00",
        "2.00",
        "-",
        "-",
        "-",
        "-",
        "-",
    ]


def test_plain_torch_is_held_against_the_compiled_parts() -> None:
    found = Figures()
    for name, rates in {
        "native": (90.0,),
        "parts": (40.0, 60.0),
        "torch-ops": (20.0, 30.0),
    }.items():
        for rate in rates:
            found.add(found.tok_s, "prefill 512", name, rate)
    rows = summary(found, {})
    assert [row.get("over_parts") for row in rows] == [None, None, 0.5]
    assert lines(rows)[3].split()[-1] == "0.50"


def test_the_cache_lies_where_it_is_told_or_with_the_users_other_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert cache_dir("off") is None
    assert cache_dir(str(tmp_path)) == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_dir(None) == tmp_path / "caches" / "superfluid"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir(None) == tmp_path / ".cache" / "superfluid"
