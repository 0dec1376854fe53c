"""Leases, pings and verdicts of one link, on a clock of the test's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from superfluid_core.clock import MS, SECOND
from superfluid_core.limits import LinkLimits
from superfluid_core.link.heartbeat import Verdict
from superfluid_core.wire.messages import Ping, Renew, Status
from superfluid_head.fleet.pulse import Pulse


@dataclass
class FakeSlot:
    progressed_ns: int = 0
    is_acknowledged: bool = True


def status(steps: Any = 1, busy: Any = 1, queued: Any = 0) -> Status:
    return Status(5, steps, busy, 8, (0, 0, queued, 0), 0, 0, 0, 64, 0.0, (), 20, False)


def test_leases_are_renewed_every_two_seconds_while_sessions_live() -> None:
    pulse = Pulse(LinkLimits(), 0)
    sent = [
        message
        for now in range(0, 10_001, 100)
        for message in pulse.beat(now * MS, now, 1, now * MS).messages
    ]
    renews = [message for message in sent if isinstance(message, Renew)]
    assert [renew.stamp_ns for renew in renews] == [2_000, 4_000, 6_000, 8_000, 10_000]


def test_an_idle_link_is_pinged_so_that_a_stamp_is_never_older_than_a_lease() -> None:
    pulse = Pulse(LinkLimits(), 0)
    pings = [
        now
        for now in range(0, 10_001, 100)
        for message in pulse.beat(now * MS, 0, 0, now * MS).messages
        if isinstance(message, Ping)
    ]
    assert pings == [2_000, 4_000, 6_000, 8_000, 10_000]


def test_a_quiet_link_with_sessions_is_pinged_before_it_is_judged() -> None:
    pulse = Pulse(LinkLimits(), 0)
    verdicts, pings = {}, []
    for now in range(0, 3_101, 100):
        beat = pulse.beat(0, 0, 1, now * MS)
        verdicts[now] = beat.verdict
        pings += [now for message in beat.messages if isinstance(message, Ping)]
    assert pings[0] <= 1_000
    assert verdicts[900] is Verdict.ALIVE
    assert verdicts[1_000] is Verdict.SUSPECT
    assert verdicts[3_000] is Verdict.DEAD


def test_a_frozen_idle_node_is_suspect_after_three_seconds_and_dead_after_five() -> None:
    pulse = Pulse(LinkLimits(), 0)
    verdicts = {now: pulse.beat(0, 0, 0, now * MS).verdict for now in range(0, 5_001, 100)}
    assert verdicts[2_900] is Verdict.ALIVE
    assert verdicts[3_000] is Verdict.SUSPECT
    assert verdicts[5_000] is Verdict.DEAD


def test_a_hung_engine_stays_hung_until_it_steps_even_without_sessions() -> None:
    pulse = Pulse(LinkLimits(), 0)
    verdict = Verdict.ALIVE
    for now in range(0, 5_200, 100):
        pulse.on_status(status(steps=7), now * MS)
        verdict = pulse.beat(now * MS, 0, 1, now * MS).verdict
    assert verdict is Verdict.HUNG
    now = 5_300 * MS
    pulse.on_status(status(steps=7), now)
    assert pulse.beat(now, 0, 0, now).verdict is Verdict.HUNG
    pulse.on_status(status(steps=8), now)
    assert pulse.beat(now, 0, 0, now).verdict is Verdict.ALIVE


def test_one_session_without_progress_while_the_engine_steps_is_stalled() -> None:
    pulse, slot = Pulse(LinkLimits(), 0), FakeSlot()
    pulse.on_status(status(steps=1), 9 * SECOND)
    assert not pulse.is_stalled(slot, 9_900 * MS)
    assert pulse.is_stalled(slot, 10 * SECOND)
    assert not pulse.is_stalled(slot, 12 * SECOND), "the engine does not step"


def test_a_session_queued_at_the_node_is_given_longer() -> None:
    pulse, slot = Pulse(LinkLimits(), 0), FakeSlot()
    pulse.on_status(status(steps=1, queued=1), 11 * SECOND)
    assert not pulse.is_stalled(slot, 11 * SECOND)
    assert pulse.is_stalled(FakeSlot(is_acknowledged=False), 11 * SECOND)
    pulse.on_status(status(steps=2, queued=1), 60 * SECOND)
    assert pulse.is_stalled(slot, 60 * SECOND)


def test_a_head_that_slept_forgives_everyone() -> None:
    pulse, slot = Pulse(LinkLimits(), 0), FakeSlot()
    pulse.expect(0)
    assert not pulse.has_overslept(900 * MS)
    assert pulse.has_overslept(20 * SECOND)
    pulse.forgive([slot], 20 * SECOND)
    assert pulse.beat(0, 0, 1, 20 * SECOND).verdict is Verdict.ALIVE
    assert slot.progressed_ns == 20 * SECOND
