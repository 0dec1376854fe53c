"""Scenarios are judged as they say, run as they promise, and the parts that they measure with measure right."""

from __future__ import annotations

import json
import math
import socket
from contextlib import ExitStack
from typing import Any

import pytest
from click.testing import CliRunner

from superfluid_core.clock import SystemClock
from superfluid_head.bench.cli import ENGINES, bench
from superfluid_head.bench.load import Answer, Said
from superfluid_head.bench.placement import run_placement
from superfluid_head.bench.proxy import HoleProxy
from superfluid_head.bench.rig import RigError
from superfluid_head.bench.scenarios import NAMES, scenario_named
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario
from superfluid_head.bench.scenarios.burst import furthest, shares
from superfluid_head.bench.scenarios.kill import (
    Moves,
    longest_added_ms,
    longest_gap_ms,
    reprefills_ms,
)
from superfluid_head.bench.scenarios.modes import MODES, bodies_of, comparable
from superfluid_head.bench.scenarios.prefix import hit_rate
from superfluid_head.bench.scenarios.run import run_scenario
from superfluid_head.bench.scenarios.shared_prefix import prefills
from superfluid_head.bench.scenarios.stage import is_typed
from superfluid_head.bench.small_fleet import real_flags


class Played(Scenario):
    """A scenario of three figures."""

    name = "played"
    about = "nothing happens"
    engine = "mock"
    values = (9.0, 1.0, 2.0, 3.0)
    bars = (Bar("figure", most=2.0), Bar("figure", most=3.0, of_every=True))
    closed = 0

    def setup(self, stack: ExitStack) -> None:
        stack.callback(self._close)

    @classmethod
    def _close(cls) -> None:
        cls.closed += 1

    def round(self, number: int) -> Figures:
        return {"figure": self.values[number]}


class Alone(Played):
    """One that needs its own processes."""

    needs_rig = "it kills processes"


class Slow(Played):
    """One that misses its bar."""

    values = (1.0, 1.0, 4.0, 4.0)


def test_the_first_round_is_not_counted_and_medians_are_judged() -> None:
    lines: list[str] = []
    before = Played.closed
    assert run_scenario(Played, Plan(rounds=3), lines.append)
    rounds = [json.loads(line) for line in lines[:4]]
    assert [each["warm_up"] for each in rounds] == [True, False, False, False]
    assert all(each["cores"] >= 1 for each in rounds)
    assert "MISSED" not in "".join(lines[4:])
    assert Played.closed == before + 1


def test_a_missed_bar_is_said_and_fails() -> None:
    lines: list[str] = []
    assert not run_scenario(Slow, Plan(rounds=3), lines.append, is_json=True)
    verdict = json.loads(lines[-1])
    assert verdict["passed"] is False
    assert [words.startswith("MISSED") for words in verdict["verdicts"]] == [True, True]


def test_a_figure_that_was_not_measured_misses_its_bar() -> None:
    assert not Bar("absent", most=1.0).judge([{"other": 0.0}]).is_met
    assert not Bar("figure", least=0.0).judge([{"figure": math.nan}]).is_met
    assert not Bar("figure", least=0.0, of_every=True).judge([]).is_met


def test_what_kills_processes_does_not_run_against_a_server_of_others() -> None:
    with pytest.raises(RigError, match="it kills processes"):
        run_scenario(Alone, Plan(base_url="http://127.0.0.1:9"), lambda _line: None)


@pytest.mark.parametrize("name", NAMES)
def test_every_scenario_has_bars_and_says_what_it_does(name: str) -> None:
    kind = scenario_named(name)
    scenario = kind(Plan(is_quick=True))
    assert kind.name == name
    assert kind.about
    assert scenario.bars
    assert kind.rounds >= (1 if name == "fifty" else 3)
    whole = kind(Plan())
    assert [bar.figure for bar in whole.bars] == [bar.figure for bar in scenario.bars]
    thresholds = [
        (bar.least, bar.most)
        for bar in whole.bars
        if bar.figure not in ("calls", "agents_at_the_chat")
    ]
    quick = [
        (bar.least, bar.most)
        for bar in scenario.bars
        if bar.figure not in ("calls", "agents_at_the_chat")
    ]
    assert thresholds == quick, "quick shrinks sizes, never bars"


def test_the_command_lists_scenarios_and_refuses_unknown_ones() -> None:
    runner = CliRunner()
    listed = runner.invoke(bench, ["scenario", "list"])
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.output.splitlines()] == list(NAMES)
    unknown = runner.invoke(bench, ["scenario", "kil"])
    assert unknown.exit_code == 2
    assert "'kil'" in unknown.output
    refused = runner.invoke(bench, ["scenario", "kill", "--base-url", "http://127.0.0.1:9"])
    assert refused.exit_code == 3
    assert "it kills processes" in refused.output
    alone = runner.invoke(bench, ["scenario", "kill", "--engine", "mlx", "--batch-invariant"])
    assert alone.exit_code == 2
    assert "mlx has no such lanes" in alone.output


def test_an_answer_keeps_choices_apart_with_everything_that_was_said() -> None:
    said = Said()
    assert said.take({"delta": {"content": "a"}, "logprobs": {"content": [{"token": "a"}]}})
    call = {"index": 0, "function": {"name": "look", "arguments": '{"x'}}
    assert said.take({"delta": {"tool_calls": [call]}})
    assert said.take({"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '":1}'}}]}})
    assert not said.take({"delta": {}, "finish_reason": "tool_calls"})
    assert (said.text, said.calls, said.finish_reason) == (
        "a",
        {0: ["look", '{"x":1}']},
        "tool_calls",
    )
    assert len(said.logprobs) == 1


def answer(text: str, **fields: object) -> Answer:
    made = Answer(
        0.0, choices={0: Said(text, finish_reason="stop")}, is_done=True, finish_reason="stop"
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_answers_are_compared_by_choices_and_usage() -> None:
    assert comparable(answer("a")) == comparable(answer("a", cached_tokens=9, at_ms=[1.0]))
    assert comparable(answer("a")) != comparable(answer("b"))
    assert comparable(answer("a")) != comparable(answer("a", completion_tokens=1))


def test_an_error_in_the_servers_words_is_typed_and_a_torn_connection_is_not() -> None:
    assert is_typed(answer("a"))
    assert is_typed(answer("a", error="503: busy", is_done=False))
    assert not is_typed(answer("a", error="the stream ended without [DONE]", is_done=False))
    assert not is_typed(answer("a", error="ReadError: ", is_done=False))


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "mock"])
def test_a_kill_on_any_real_engine_is_judged_by_what_ends_whole(engine: str) -> None:
    bars = [bar.figure for bar in scenario_named("kill")(Plan(engine=engine)).bars]
    assert bars == ["failed", "moved"]
    flags = real_flags(2, engine)
    assert flags[:2] == ("--engine", engine)
    assert ("--threads" in flags) == (engine != "mlx"), "MLX refuses the flag"


def test_a_gap_counts_from_the_kill_on() -> None:
    assert longest_gap_ms(answer("", at_ms=[0.0, 900.0, 1000.0, 1300.0]), 950.0) == 300.0
    assert longest_gap_ms(answer("", at_ms=[0.0, 900.0]), 950.0) == 0.0


def test_what_a_pause_has_in_excess_of_the_unbroken_answers_at_that_place_is_added() -> None:
    unbroken = answer("", at_ms=[0.0, 100.0, 1100.0, 1200.0], chars=[5, 10, 90, 95])

    def added(*at_ms: float, chars: list[int], since: float = 0.0) -> float:
        told = answer("", at_ms=list(at_ms), chars=chars)
        return longest_added_ms(told, unbroken, since, 100.0)

    same = [5, 10, 90, 95]
    assert added(0.0, 100.0, 1100.0, 1200.0, chars=same) == 0.0
    assert added(0.0, 100.0, 1600.0, 1700.0, chars=same) == 500.0  # the call was due after 1000
    assert added(0.0, 400.0, 1400.0, 1500.0, chars=same) == 300.0
    assert added(0.0, 400.0, 1400.0, 1500.0, chars=same, since=401.0) == 0.0
    assert added(0.0, 1100.0, 1500.0, chars=[10, 90, 95]) == 300.0  # two pieces that came as one
    assert added(0.0, 20.0, chars=[5, 10]) == -80.0
    assert added(0.0, chars=[5]) == -100.0


def test_moves_are_the_placements_behind_the_first() -> None:
    records: list[dict[str, Any]] = [
        {"epoch": 1, "waited_ms": 50, "first_ms": 90},
        {"epoch": 2, "waited_ms": 7, "first_ms": 40},
        {"epoch": 3, "waited_ms": 3, "first_ms": None},
    ]
    assert Moves.of(records) == Moves(2, 7, 40, (3, 7))
    assert Moves.of(records[:1]) == Moves(0, 0.0, 0.0)


def test_a_move_is_granted_its_own_prefill_and_a_median_one_for_each_turn_before_it() -> None:
    moves = [Moves(1, wait, took, (wait,)) for wait, took in ((0, 30), (0, 10), (9, 20), (9, 99))]
    assert reprefills_ms([Moves(0, 0.0, 0.0), *moves], 2) == [0.0, 30, 10, 20 + 20, 20 + 99]
    assert reprefills_ms([Moves(0, 0.0, 0.0)], 2) == [0.0]


def test_shares_are_held_against_what_they_should_be() -> None:
    spread = shares([[{"node": "a"}], [{"node": "a"}], [{"node": "b"}, {"node": "a"}], []])
    assert dict(spread) == {"a": 2, "b": 1}
    assert furthest(spread, {"a": 0.5, "b": 0.5}) == pytest.approx(1 / 3)
    assert furthest(spread, {"a": 0.5, "c": 0.5}) == 1.0


def test_hits_and_prefills_come_from_the_counts_of_cached_tokens() -> None:
    cold = answer("", prompt_tokens=1000, cached_tokens=0)
    warm = answer("", prompt_tokens=1000, cached_tokens=960)
    assert hit_rate([cold, warm]) == 0.48
    assert prefills([cold, warm, warm], 50) == 1.0
    assert prefills([cold, cold, warm], 50) == 2.0


def test_modes_are_mixed_and_prompts_differ() -> None:
    bodies = bodies_of("m", 2 * len(MODES), 8, list(MODES), 1)
    prompts = {body["messages"][0]["content"] for body in bodies}
    assert len(prompts) == len(bodies)
    assert sum("tools" in body for body in bodies) == 2


def test_a_hole_swallows_one_direction_and_gives_it_out_afterwards() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        with HoleProxy(target) as proxy:
            host, port = proxy.address.split(":")
            with socket.create_connection((host, int(port)), timeout=5) as near:
                far, _ = listener.accept()
                with far:
                    far.settimeout(5)
                    near.settimeout(5)
                    near.sendall(b"one")
                    assert far.recv(9) == b"one"
                    proxy.open_hole("from")
                    far.sendall(b"lost?")
                    near.sendall(b"two")
                    assert far.recv(9) == b"two", "the other direction goes on"
                    near.settimeout(0.3)
                    with pytest.raises(TimeoutError):
                        near.recv(9)
                    near.settimeout(5)
                    proxy.fill_hole()
                    assert near.recv(9) == b"lost?"


def test_placement_is_measured_by_the_size_of_the_fleet() -> None:
    lines: list[str] = []
    run_placement((2, 50), 2_000, 5, SystemClock(), lines.append)
    assert [json.loads(line)["nodes"] for line in lines[:2]] == [2, 50]
    assert all(json.loads(line)["with_promises_us"] > 0 for line in lines[:2])


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_a_scenario_with_real_processes_is_played_by_its_command() -> None:
    done = CliRunner().invoke(
        bench, ["scenario", "disconnect", "--engine", "mock", "--rounds", "1", "--streams", "2", "--json"]
    )  # fmt: skip
    *rounds, verdict = [json.loads(line) for line in done.output.splitlines()]
    assert [each["round"] for each in rounds] == [0, 1]
    assert rounds[1]["busy_before"] == 2
    assert rounds[1]["engine"] == "mock"
    assert len(verdict["verdicts"]) == 5
    assert done.exit_code == (0 if verdict["passed"] else 1)
