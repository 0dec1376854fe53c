"""Pauses beside a long prompt, as `superfluid bench engine` measures them: on the simulated engine and its virtual clock."""

from __future__ import annotations

import pytest

from superfluid_core.engine.sim import NumberedTexts, SimEngine, SimOptions
from superfluid_noded.bench_gaps import DECODERS, ROWS_SPARE, gap_lines, measure_gaps
from tests.unit.engine_sim.conftest import VirtualTime

PROMPT = 3000


def test_in_chunks_streams_pause_for_a_step_and_monolithic_for_the_whole_prompt() -> None:
    time = VirtualTime()
    options = SimOptions(
        lanes=DECODERS + 1, step_tokens=PROMPT + ROWS_SPARE, prefill_rate=2000, decode_rate=50
    )
    engine = SimEngine(NumberedTexts(1024), options, time, pause=time)
    chunked, whole = rows = measure_gaps(engine, 2, time, PROMPT)
    step_ms, whole_ms = 512 / 2, PROMPT / 2
    assert chunked["mode"] == "chunked"
    assert chunked["step"] <= 512
    assert chunked["gap_ms"] == pytest.approx(step_ms, abs=25)
    assert whole["gap_ms"] == pytest.approx(whole_ms, abs=25)
    assert whole["step"] == whole["budget"] == PROMPT
    assert chunked["first_ms"] >= whole["first_ms"] * 0.99
    assert chunked["pause_ms"] == whole["pause_ms"] == pytest.approx(20, abs=1)
    drawn = gap_lines(rows)
    assert drawn[1].startswith("4 streams while a prompt of 3000 tokens comes in, monolithic:")
    assert "steps of 3000" in drawn[1]
