"""Scripted answers: pieces, delays, repeats, faults, and what a bad file is told."""

from __future__ import annotations

import json

import pytest

from superfluid_core.engine.script import PROMPT_CHARS_MAX, load_script
from superfluid_core.errors import ConfigError, EngineError, ErrorCode
from superfluid_core.session import SamplingParams
from tests.unit.engine_sim.conftest import EOS, TEXTS, Bench, spec_of


def lines(*entries: object) -> str:
    return "\n".join(json.dumps(entry) for entry in entries)


def text_of(ids: list[int]) -> bytes:
    return b"".join(TEXTS.token_bytes(token) for token in ids)


def test_pieces_of_text_bytes_ids_and_end_leave_in_order() -> None:
    script = lines(
        {"pieces": ["Hel", "lo ", {"hex": "f09f"}, {"hex": "9880"}, {"id": 65}, {"eos": True}]}
    )
    ids = Bench(script).prefill([spec_of()], 30)[0]
    assert ids[-1] == EOS
    assert text_of(ids[:-1]).decode() == "Hello 😀A"


def test_the_first_match_wins_and_no_match_falls_back_to_hashes() -> None:
    script = lines(
        {"match": "^weather", "pieces": ["rain"]},
        {"match": "(?i)WEATHER", "pieces": ["sun"]},
    )
    ids = Bench(script, eos_probability=0.0).prefill(
        [spec_of("weather now"), spec_of("the weather"), spec_of("else")], 6
    )
    assert text_of(ids[0]) == b"rain"
    assert text_of(ids[1]) == b"sun"
    assert ids[2] == Bench(eos_probability=0.0).prefill([spec_of("else")], 6)[0]


def test_the_end_of_the_pieces_ends_the_text() -> None:
    assert Bench(lines({"pieces": ["ab"]})).prefill([spec_of()], 10)[0] == [97, 98, EOS]


def test_repeat_repeats_the_pieces() -> None:
    ids = Bench(lines({"pieces": ["a", "b"], "repeat": 3})).prefill([spec_of()], 10)[0]
    assert text_of(ids[:-1]) == b"ababab"


def test_a_moved_session_goes_on_at_its_index() -> None:
    script = lines({"pieces": ["one ", "two ", "three"]})
    whole = Bench(script).prefill([spec_of()], 30)[0]
    for cut in range(len(whole)):
        rest = Bench(script).prefill([spec_of(delivered=tuple(whole[:cut]))], 30)[0]
        assert whole[:cut] + rest == whole


def test_min_output_masks_the_scripted_end_and_ignoring_it_goes_on_after_it() -> None:
    script = lines({"pieces": ["a", {"eos": True}]})
    waits = Bench(script).prefill([spec_of(min_output=4)], 10)[0]
    assert waits[0] == 97
    assert waits.index(EOS) == 4
    ignores = Bench(script, eos_probability=0.0).prefill([spec_of(stop_ids=frozenset())], 5)[0]
    assert ignores[:2] == [97, EOS]
    assert len(ignores) == 5


def test_a_banned_piece_is_replaced_by_a_permitted_token() -> None:
    sampling = SamplingParams(logit_bias=((97, -100.0),))
    ids = Bench(lines({"pieces": ["a", "b"]})).prefill([spec_of(sampling=sampling)], 2)[0]
    assert ids[0] != 97
    assert ids[1] == 98


def test_delays_stand_before_a_piece_and_its_further_ids_follow_at_once() -> None:
    bench = Bench(
        lines({"pieces": ["x", "yz", "w"], "delay_ms": 20, "prefill_ms": 500}), decode_rate=1.0
    )
    bench.prefill([spec_of()], 4)
    assert bench.time.slept == pytest.approx([0.5, 0.02, 0.02])
    assert [step.elapsed_ns for step in bench.steps] == [500_000_000, 20_000_000, 0, 20_000_000]


def test_prefill_ms_is_spread_over_the_chunks() -> None:
    bench = Bench(lines({"prefill_ms": 400, "pieces": ["x"]}))
    bench.prefill([spec_of((1,) * 100)], 1, step_tokens=25)
    assert bench.time.slept == pytest.approx([0.1] * 4)


def test_scripted_logprobs_are_reported() -> None:
    bench = Bench(lines({"pieces": ["a"], "logprobs": -0.5}))
    bench.prefill([spec_of(sampling=SamplingParams(logprobs=2))], 1)
    assert bench.steps[0].logprobs is not None
    row = bench.steps[0].logprobs[0]
    assert row is not None
    assert row.logprob == -0.5
    assert row.top[0] == (97, -0.5)


@pytest.mark.parametrize(
    ("fault", "code"), [("error", ErrorCode.LANE_FAULT), ("nan", ErrorCode.NAN_LOGITS)]
)
def test_a_lane_fault_ends_that_lane_only(fault: str, code: ErrorCode) -> None:
    bench = Bench(
        lines({"match": "bad", "pieces": ["abcdef"], "fault": fault, "fault_at": 2}),
        eos_probability=0.0,
    )
    ids = bench.prefill([spec_of("bad"), spec_of("good")], 6)
    assert text_of(ids[0]) == b"ab"
    assert len(ids[1]) == 6
    faults = [found for step in bench.steps for found in step.faults]
    assert [(found.lane, found.code) for found in faults] == [(0, code)]


def test_a_crash_calls_the_process_exit_after_the_steps_before_it() -> None:
    bench = Bench(lines({"pieces": ["abcdef"], "fault": "crash", "fault_at": 3}))
    with pytest.raises(EngineError, match="crash"):
        bench.prefill([spec_of()], 6)
    assert bench.crashed == 1
    assert len(bench.steps) == 3


def test_a_session_moved_beyond_the_fault_passes_it() -> None:
    script = lines({"pieces": ["abcdef"], "fault": "crash", "fault_at": 3})
    ids = Bench(script).prefill([spec_of(delivered=tuple(b"abcd"))], 6)[0]
    assert text_of(ids[:-1]) == b"ef"


def test_a_hang_lasts_until_the_engine_is_closed() -> None:
    bench = Bench(lines({"pieces": ["ab"], "fault": "hang", "fault_at": 1}))
    bench.time.close()
    with pytest.raises(EngineError, match="hung"):
        bench.prefill([spec_of()], 4)
    assert len(bench.steps) == 1


def test_only_the_end_of_a_long_prompt_is_searched() -> None:
    script = load_script(lines({"match": "needle", "pieces": ["x"]}), TEXTS)
    assert script.find("needle" + " " * 100) is not None
    assert script.find("needle" + " " * PROMPT_CHARS_MAX) is None
    assert script.find(" " * PROMPT_CHARS_MAX + "needle") is not None


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("nonsense", "line 1: not JSON"),
        ("[1]", "expected an object"),
        ('{"piece": []}', "unknown member"),
        ('{"match": 5}', "match is a pattern"),
        ('{"match": "("}', "not a pattern"),
        ('{"match": "(a+)+"}', "repeats a group"),
        ('{"pieces": "text"}', "pieces is a list"),
        ('{"pieces": [""]}', "a piece is"),
        ('{"pieces": [{"hex": "xyz"}]}', "not hexadecimal"),
        ('{"pieces": [{"id": 99999}]}', "outside the vocabulary"),
        ('{"pieces": [{"id": true}]}', "whole number"),
        ('{"pieces": [{"eos": false}]}', "a piece is"),
        ('{"pieces": ["\\ud83d"]}', "surrogate"),
        ('{"delay_ms": -1}', "delay_ms is outside"),
        ('{"delay_ms": "5"}', "delay_ms is a number"),
        ('{"prefill_ms": 1e9}', "prefill_ms is outside"),
        ('{"repeat": 0}', "repeat is a whole number"),
        ('{"logprobs": 0.5}', "logprobs is outside"),
        ('{"fault": "explode"}', "fault is one of crash, hang, error, nan"),
        ('{"fault_at": 3}', "fault_at without fault"),
    ],
)
def test_a_bad_line_is_refused_with_its_number_and_cause(line: str, word: str) -> None:
    with pytest.raises(ConfigError, match="mock script, line 1") as caught:
        load_script(line, TEXTS)
    assert word in caught.value.message


def test_empty_lines_are_skipped() -> None:
    assert len(load_script('\n{"pieces": ["a"]}\n\n', TEXTS)) == 1
