"""The figures and bars of `superfluid bench engine --http`, and how its contenders are started."""

from __future__ import annotations

import json
import sys

import httpx
import pytest

from superfluid_core.modelfiles.resolve import resolve
from superfluid_head.bench.compare import CompareBench, ContenderError
from superfluid_head.bench.exchange import Heard
from superfluid_head.bench.served import Stream, decode_rate, judged, stream_of

SECOND_NS = 1_000_000_000


def test_decode_counts_what_came_after_all_streams_had_begun() -> None:
    quick = Stream([SECOND_NS * at for at in range(1, 11)], tokens=10)
    late = Stream([SECOND_NS * at for at in (2, 4, 6, 8)], tokens=8)  # two tokens a piece
    # from second 2 to second 10: eight of the one, six of the other
    assert decode_rate([quick, late]) == pytest.approx(14 / 8)


def event(**members: object) -> bytes:
    return b"data: " + json.dumps(members).encode() + b"\n\n"


def test_a_stream_has_the_times_at_which_its_pieces_came() -> None:
    first, last = event(choices=[{"text": "a"}]), event(choices=[{"text": "", "finish_reason": "length"}])  # fmt: skip
    usage = event(choices=[], usage={"completion_tokens": 2})
    pieces = [(5, first[:7]), (9, first[7:]), (12, last + usage + b"data: [DONE]\n\n")]
    stream = stream_of(Heard(200, pieces=pieces), 2)
    assert stream.at_ns == [9, 12]
    with pytest.raises(ContenderError, match="2 tokens, not 3"):
        stream_of(Heard(200, pieces=pieces), 3)


def test_a_stream_that_fails_gives_no_figure() -> None:
    with pytest.raises(ContenderError, match="full"):
        stream_of(Heard(503, pieces=[(1, b"full")]), 1)
    with pytest.raises(ContenderError, match="lost"):
        stream_of(Heard(200, pieces=[(1, event(error="lost"))]), 1)
    with pytest.raises(httpx.ReadError):
        stream_of(Heard(200, failure=httpx.ReadError("")), 1)


def test_bars_are_ratios_of_medians_and_what_is_missing_is_said() -> None:
    figures = {
        "decode 8": {"served": [150.0, 140.0, 160.0], "llama-server": [100.0, 90.0, 110.0]},
        "decode 1": {"served": [80.0], "llama-server": [100.0], "native": [81.0]},
        "prefill 512": {"served": [900.0], "llama-server": [100.0]},
    }
    drawn, is_met = judged(figures, 512)
    rows = {line.split("  ")[0]: line.split()[-1] for line in drawn.splitlines()[2:]}
    assert rows["decode 8: served / llama-server"] == "yes"
    assert rows["decode 1: served / llama-server"] == "no"
    assert rows["prefill 512: served / llama-server"] == "yes"
    assert rows["decode 8: served / vllm"] == "measured"
    assert not is_met
    figures["decode 1"]["llama-server"] = [85.0]
    assert judged(figures, 512)[1]


def test_vllm_runs_in_its_own_environment_and_the_others_in_ours() -> None:
    bench = CompareBench("demo", 1, 8, 16, 2, vllm_python="/somewhere/python")
    words = bench.command("vllm")
    assert words[0] == "env"
    assert "OMP_NUM_THREADS=2" in words
    assert words[words.index("/somewhere/python") + 1 :][:2] == ["-m", "superfluid_noded.bench_engine"]  # fmt: skip
    assert words[-1] == str(resolve("demo").path)
    ours = bench.command("native")
    assert ours[0] == sys.executable
    assert ours[-2:] == ["--model", "demo"]
