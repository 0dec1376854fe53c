"""Circuits rest nodes that keep failing; the quarantine remembers requests that kill them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from superfluid_core.clock import SECOND
from superfluid_core.limits import FleetLimits
from superfluid_core.session import SamplingParams
from superfluid_head.fleet.circuit import Circuit, CircuitState
from superfluid_head.fleet.events import GenerationRequest
from superfluid_head.fleet.quarantine import QuarantineTable

LIMITS = FleetLimits()


def opened(at: Any = 0) -> Any:
    circuit = Circuit(LIMITS)
    for n in range(3):
        circuit.fault(at + n, is_last_healthy=False)
    return circuit


def test_three_faults_in_a_minute_open_it_for_ten_seconds() -> None:
    circuit = Circuit(LIMITS)
    assert not circuit.fault(0, is_last_healthy=False)
    assert not circuit.fault(SECOND, is_last_healthy=False)
    assert circuit.lets_through(SECOND)
    assert circuit.fault(2 * SECOND, is_last_healthy=False)
    assert circuit.state(2 * SECOND) is CircuitState.OPEN
    assert not circuit.lets_through(12 * SECOND - 1)
    assert circuit.state(12 * SECOND) is CircuitState.HALF


def test_faults_that_are_far_apart_do_not_open_it() -> None:
    circuit = Circuit(LIMITS)
    for n in range(6):
        assert not circuit.fault(n * 31 * SECOND, is_last_healthy=False)


def test_half_open_lets_one_probe_through_and_success_closes_it_slowly() -> None:
    circuit = opened()
    now = 11 * SECOND
    assert circuit.lets_through(now)
    circuit.probe()
    assert not circuit.lets_through(now)
    circuit.success(now)
    assert circuit.state(now) is CircuitState.CLOSED
    assert circuit.allowance(now) == 0.0
    assert circuit.allowance(now + 5 * SECOND) == 0.5
    assert circuit.allowance(now + 10 * SECOND) == 1.0


def test_a_probe_that_ends_without_a_verdict_makes_way_for_another() -> None:
    circuit = opened()
    circuit.probe()
    circuit.probe_over()
    assert circuit.lets_through(11 * SECOND)


def test_a_failed_probe_opens_it_for_twice_as_long_up_to_two_minutes() -> None:
    circuit = opened()
    now, rests = 11 * SECOND, []
    for _ in range(6):
        circuit.probe()
        assert circuit.fault(now, is_last_healthy=False)
        rest = next(s for s in range(1, 200) if circuit.lets_through(now + s * SECOND))
        rests.append(rest)
        now += rest * SECOND
    assert rests == [20, 40, 80, 120, 120, 120]


def test_the_last_healthy_node_is_never_opened() -> None:
    circuit = Circuit(LIMITS)
    for n in range(10):
        assert not circuit.fault(n, is_last_healthy=True)
    assert circuit.lets_through(10)


def test_faults_while_open_do_not_prolong_it() -> None:
    circuit = opened()
    assert not circuit.fault(5 * SECOND, is_last_healthy=False)
    assert circuit.lets_through(11 * SECOND)


REQUEST = GenerationRequest("r", "m", (1, 2, 3), SamplingParams(), 5)


def test_a_quarantined_prompt_is_refused_for_its_time_whoever_asks() -> None:
    table = QuarantineTable(b"key", LIMITS)
    table.add(REQUEST, 0)
    again = replace(REQUEST, request_id="other", tenant="someone", max_output=9)
    assert table.holds(again, 599 * SECOND)
    assert not table.holds(replace(REQUEST, prompt=(1, 2, 4)), 0)
    assert not table.holds(replace(REQUEST, model="m2"), 0)
    assert not table.holds(again, 600 * SECOND)
    assert len(table) == 0


def test_the_quarantine_is_bounded() -> None:
    table = QuarantineTable(b"key", FleetLimits(quarantine_entries_max=3))
    for n in range(5):
        table.add(replace(REQUEST, prompt=(n,)), n)
    assert len(table) == 3
    assert not table.holds(replace(REQUEST, prompt=(0,)), 5)
    assert table.holds(replace(REQUEST, prompt=(4,)), 5)
