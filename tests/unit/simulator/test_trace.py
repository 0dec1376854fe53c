"""Traces: what is read, and what is refused with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from superfluid_core.errors import ConfigError
from superfluid_core.session import QosClass
from superfluid_core.simulator.flags import Flags
from superfluid_core.simulator.run import run_case
from superfluid_core.simulator.scenario import Case
from superfluid_core.simulator.trace import read_trace

FIRST = {"timestamp": 12.5, "prompt_tokens": 300, "output_tokens": 6}


def _write(path: Path, *rows: object) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_a_trace_starts_at_zero_and_keeps_its_gaps(tmp_path: Path) -> None:
    second = FIRST | {"timestamp": 12.75, "class": "0", "tenant": "t"}
    shared = FIRST | {"timestamp": 13, "prefix": "p", "prefix_tokens": 128}
    arrivals = list(read_trace(_write(tmp_path / "trace.jsonl", FIRST, second, shared)))
    assert [each.at_ns for each in arrivals] == [0, 250_000_000, 500_000_000]
    assert (arrivals[1].qos, arrivals[1].tenant) == (QosClass.INTERACTIVE, "t")
    assert (arrivals[2].prefix, arrivals[2].prefix_tokens) == (1, 128)
    assert arrivals[0].prefix_tokens == 0


def test_a_trace_runs_and_shared_prefixes_are_found(tmp_path: Path) -> None:
    rows = [FIRST | {"timestamp": n, "prefix": "p", "prefix_tokens": 256} for n in range(3)]
    path = _write(tmp_path / "trace.jsonl", *rows)
    result = run_case(Case("trace", Flags(), read_trace(path)))
    assert result.all.finished == 3
    assert result.stats is not None
    assert result.stats.prefix_hit_tokens == 512


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([], "object"),
        ({"timestamp": 13}, "missing"),
        (FIRST | {"prompt_tokens": 0}, "prompt_tokens"),
        (FIRST | {"output_tokens": "6"}, "output_tokens"),
        (FIRST | {"timestamp": "1"}, "number"),
        (FIRST | {"timestamp": 1e300}, "range"),
        (FIRST | {"timestamp": 1.0}, "go back"),
        (FIRST | {"class": "vip"}, "unknown class"),
        (FIRST | {"priority": 1}, "priority"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, words: str) -> None:
    path = _write(tmp_path / "trace.jsonl", FIRST, row)
    with pytest.raises(ConfigError, match=rf"trace\.jsonl:2: .*{words}"):
        list(read_trace(path))


def test_what_is_not_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match=":1:"):
        list(read_trace(str(path)))


def test_a_line_has_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b" " * 100_000)
    with pytest.raises(ConfigError, match="bytes"):
        list(read_trace(str(path)))


def test_a_missing_file_is_a_plain_error() -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_trace("/does/not/exist"))
