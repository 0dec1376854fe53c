"""Leases, pings and verdicts of one link, on a clock of the test's own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from superfluid_core.clock import MS, SECOND
from superfluid_core.limits import LinkLimits
from superfluid_core.link.heartbeat import Verdict
from superfluid_core.wire.messages import Ping, Pong, Renew, Status
from superfluid_head.fleet.echo import OWED_MAX, Echo
from superfluid_head.fleet.pulse import PERIOD_MS, Beat, Heard, Pulse

SILENT = Heard(0, 0, 0)


@dataclass
class FakeSlot:
    progressed_ns: int = 0
    is_acknowledged: bool = True


def status(steps: Any = 1, busy: Any = 1, queued: Any = 0, stamp_ns: int = 5) -> Status:
    return Status(stamp_ns, steps, busy, 8, (0, 0, queued, 0), 0, 0, 0, 64, 0.0, (), 20, False)


def test_leases_are_renewed_every_two_seconds_while_sessions_live() -> None:
    pulse = Pulse(LinkLimits(), 0, 0)
    sent = [
        message
        for now in range(0, 10_001, 100)
        for message in pulse.beat(Heard(now * MS, now, 0), 1, now * MS).messages
    ]
    renews = [message for message in sent if isinstance(message, Renew)]
    assert [renew.stamp_ns for renew in renews] == [2_000, 4_000, 6_000, 8_000, 10_000]


def test_an_idle_link_is_pinged_so_that_a_stamp_is_never_older_than_a_lease() -> None:
    pulse = Pulse(LinkLimits(), 0, 0)
    pings = [
        now
        for now in range(0, 10_001, 100)
        for message in pulse.beat(Heard(now * MS, 0, 0), 0, now * MS).messages
        if isinstance(message, Ping)
    ]
    assert pings == [1_500, 3_000, 4_500, 6_000, 7_500, 9_000]


def test_a_quiet_link_with_sessions_is_pinged_before_it_is_judged() -> None:
    pulse = Pulse(LinkLimits(), 0, 0)
    verdicts, pings = {}, []
    for now in range(0, 3_101, 100):
        beat = pulse.beat(SILENT, 1, now * MS)
        verdicts[now] = beat.verdict
        pings += [now for message in beat.messages if isinstance(message, Ping)]
    assert pings[0] <= 1_000
    assert verdicts[900] is Verdict.ALIVE
    assert verdicts[1_000] is Verdict.SUSPECT
    assert verdicts[3_000] is Verdict.DEAD


def test_a_frozen_idle_node_is_suspect_and_then_dead_within_five_seconds() -> None:
    pulse = Pulse(LinkLimits(), 0, 0)
    verdicts = {now: pulse.beat(SILENT, 0, now * MS).verdict for now in range(0, 5_001, 100)}
    assert verdicts[2_400] is Verdict.ALIVE
    assert verdicts[2_500] is Verdict.SUSPECT
    assert verdicts[4_500] is Verdict.DEAD


def test_a_hung_engine_stays_hung_until_it_steps_even_without_sessions() -> None:
    pulse = Pulse(LinkLimits(), 0, 0)
    verdict = Verdict.ALIVE
    for now in range(0, 5_200, 100):
        pulse.on_status(status(steps=7), now * MS)
        verdict = pulse.beat(Heard(now * MS, 0, 0), 1, now * MS).verdict
    assert verdict is Verdict.HUNG
    now = 5_300 * MS
    pulse.on_status(status(steps=7), now)
    assert pulse.beat(Heard(now, 0, 0), 0, now).verdict is Verdict.HUNG
    pulse.on_status(status(steps=8), now)
    assert pulse.beat(Heard(now, 0, 0), 0, now).verdict is Verdict.ALIVE


def test_one_session_without_progress_while_the_engine_steps_is_stalled() -> None:
    pulse, slot = Pulse(LinkLimits(), 0, 0), FakeSlot()
    pulse.on_status(status(steps=1), 9 * SECOND)
    assert not pulse.is_stalled(slot, 9_900 * MS)
    assert pulse.is_stalled(slot, 10 * SECOND)
    assert not pulse.is_stalled(slot, 12 * SECOND), "the engine does not step"


def test_a_session_queued_at_the_node_is_given_longer() -> None:
    pulse, slot = Pulse(LinkLimits(), 0, 0), FakeSlot()
    pulse.on_status(status(steps=1, queued=1), 11 * SECOND)
    assert not pulse.is_stalled(slot, 11 * SECOND)
    assert pulse.is_stalled(FakeSlot(is_acknowledged=False), 11 * SECOND)
    pulse.on_status(status(steps=2, queued=1), 60 * SECOND)
    assert pulse.is_stalled(slot, 60 * SECOND)


def test_a_head_that_slept_forgives_everyone() -> None:
    pulse, slot = Pulse(LinkLimits(), 0, 0), FakeSlot()
    pulse.expect(0)
    assert not pulse.has_overslept(900 * MS)
    assert pulse.has_overslept(20 * SECOND)
    pulse.forgive([slot], 20 * SECOND)
    assert pulse.beat(SILENT, 1, 20 * SECOND).verdict is Verdict.ALIVE
    assert slot.progressed_ns == 20 * SECOND - PERIOD_MS * MS


# --- a node that speaks and does not hear -------------------------------------------------------------


class Talk:
    """A head and a node that tells its STATUS every 200 ms; what is between them is up to the test."""

    def __init__(self, limits: LinkLimits | None = None) -> None:
        self.pulse = Pulse(limits or LinkLimits(), 0, 0)
        self.is_deaf = False
        self.there_ms = self.back_ms = 5
        self.handed = 0
        self.sessions = 1
        self.is_talking = True
        self.pings: list[int] = []
        self._asked: list[tuple[int, int]] = []
        self._said: list[tuple[int, Status | Pong]] = []
        self._last = (0, 0)

    def _word(self, now: int) -> Status:
        return status(steps=now, stamp_ns=now * MS)

    def _arrive(self, now: int) -> None:
        while self._said and self._said[0][0] <= now:
            _, word = self._said.pop(0)
            told = word.status if isinstance(word, Pong) else word
            assert told is not None
            if isinstance(word, Pong):
                self.pulse.on_pong(word, now * MS)
            else:
                self.pulse.on_status(word, now * MS)
            self._last = (now * MS, max(self._last[1], told.stamp_ns))

    def hear(self, now: int) -> None:
        while not self.is_deaf and self._asked and self._asked[0][0] <= now:
            at, nonce = self._asked.pop(0)
            self._said.append((now + self.back_ms, Pong(nonce, self._word(at))))
        if self.is_talking and now % 200 == 0:
            self._said.append((now + self.back_ms, self._word(now)))
        self._arrive(now)

    def step(self, now: int) -> Beat:
        self.hear(now)
        beat = self.pulse.beat(Heard(*self._last, self.handed), self.sessions, now * MS)
        pings = [message for message in beat.messages if isinstance(message, Ping)]
        self._asked += [(now + self.there_ms, ping.nonce) for ping in pings]
        self.pings += [now] * len(pings)
        return beat

    def run(self, since: int, until: int) -> dict[int, Verdict]:
        return {now: self.step(now).verdict for now in range(since, until, 100)}


def test_a_node_that_speaks_and_does_not_hear_is_dead_within_five_seconds() -> None:
    # its sessions, if it has any, end at some time after the hole has opened: then it speaks no more either
    for hole, ends_after in itertools.product(range(4_000, 5_500, 100), (0, 1_000, 2_400, 9_000)):
        talk = Talk()
        assert set(talk.run(0, hole).values()) == {Verdict.ALIVE}
        talk.is_deaf = True
        verdicts = talk.run(hole, hole + ends_after)
        talk.sessions, talk.is_talking = 0, False
        verdicts |= talk.run(hole + ends_after, hole + 5_000)
        suspect = next(now for now, verdict in verdicts.items() if verdict is Verdict.SUSPECT)
        dead = next(now for now, verdict in verdicts.items() if verdict is Verdict.DEAD)
        assert suspect <= hole + 2_800
        assert dead <= hole + 4_800


def test_a_live_link_is_pinged_once_a_second_which_is_what_a_node_answers() -> None:
    talk = Talk()
    talk.run(0, 60_000)
    assert len(talk.pings) == 59
    assert min(b - a for a, b in itertools.pairwise(talk.pings)) >= 1_000


def test_an_answer_that_is_lost_now_and_then_is_no_fault() -> None:
    talk = Talk()
    for now in range(0, 30_000, 100):
        talk.is_deaf = now % 5_000 < 900  # what was asked meanwhile is answered late, not never
        assert talk.step(now).verdict is Verdict.ALIVE


def test_a_full_pipe_on_the_way_back_makes_nobody_deaf() -> None:
    talk = Talk()
    talk.run(0, 5_000)
    talk.back_ms = 6_000
    early = talk.run(5_000, 7_900)
    assert Verdict.DEAD not in early.values(), "only silent"
    talk = Talk()
    for now in range(0, 40_000, 100):
        talk.back_ms = min(9_000, 5 + now // 4)  # ever later, but always something
        assert talk.step(now).verdict is Verdict.ALIVE


def test_a_large_request_on_a_slow_pipe_is_given_the_time_that_it_takes() -> None:
    talk = Talk()
    talk.run(0, 5_000)
    talk.handed += 8 << 20
    talk.there_ms = 40_000
    assert set(talk.run(5_000, 44_000).values()) == {Verdict.ALIVE}
    talk.there_ms = 5
    talk.is_deaf = True
    assert Verdict.DEAD in talk.run(44_000, 44_000 + 66_000).values(), "not for ever"


def test_a_head_that_slept_does_not_hold_its_own_silence_against_a_node() -> None:
    talk = Talk()
    talk.run(0, 5_000)
    talk.is_deaf = True
    talk.run(5_000, 7_000)
    talk.pulse.expect(7 * SECOND)
    assert talk.pulse.has_overslept(30 * SECOND)
    talk.pulse.forgive([], 30 * SECOND)
    talk.is_deaf = False
    assert talk.step(30_000).verdict is not Verdict.DEAD
    assert set(talk.run(30_100, 40_000).values()) == {Verdict.ALIVE}


def test_a_suspend_of_the_node_alone_makes_it_no_older_than_the_head_has_waited() -> None:
    pulse = Pulse(LinkLimits(), 0, 0)
    ping = next(
        message
        for now in range(0, 1_100, 100)
        for message in pulse.beat(Heard(now * MS, now * MS, 0), 1, now * MS).messages
        if isinstance(message, Ping)
    )
    assert ping.nonce
    jumped = Heard(1_500 * MS, 60 * SECOND, 0)
    assert pulse.beat(jumped, 1, 1_500 * MS).verdict is Verdict.ALIVE


def test_an_answer_to_a_ping_of_the_link_itself_or_to_none_settles_nothing() -> None:
    echo = Echo(0, 0)
    nonce = echo.ask(0, 0)
    assert nonce is not None
    for other in (0, 1, nonce - 1, nonce + 1, (1 << 64) - 1):
        echo.on_pong(other, 4 * SECOND)
        assert echo.deaf_ns(4 * SECOND, 4 * SECOND, 4 * SECOND) == 4 * SECOND
    echo.on_pong(nonce, 4 * SECOND)
    assert echo.deaf_ns(9 * SECOND, 9 * SECOND, 9 * SECOND) == 0


def test_pings_that_are_owed_an_answer_are_bounded() -> None:
    echo = Echo(0, 0)
    asked = [echo.ask(0, now) for now in range(2 * OWED_MAX)]
    assert asked.count(None) == OWED_MAX
    newest = max(nonce for nonce in asked if nonce is not None)
    echo.on_pong(newest, None)
    assert echo.deaf_ns(9 * SECOND, 9 * SECOND, 9 * SECOND) == 0
    assert echo.ask(0, 0) == newest + 1


# --- a link at ease --------------------------------------------------------------------------------------


def looks(*, frozen_ms: int, until_ms: int) -> dict[int, Verdict]:
    """Look at an idle link as seldom as it says, from its first answer on; its node is frozen at some time."""
    talk, found, now = Talk(), {}, 0
    talk.sessions, talk.is_talking = 0, False
    due_ms = 0
    for now in range(0, until_ms, 5):
        talk.is_deaf = now >= frozen_ms
        if now >= due_ms:
            found[now] = talk.step(now).verdict
            due_ms = now + talk.pulse.ease_ns(now * MS) // MS
        else:
            talk.hear(now)
    return found


def test_an_idle_link_is_looked_at_when_there_is_something_to_do_or_to_judge() -> None:
    found = looks(frozen_ms=60_000, until_ms=60_000)
    assert set(found.values()) == {Verdict.ALIVE}
    assert len(found) <= 60_000 // 750 + 2, "a ping every 1.5 s, and one look between two"


def test_a_node_that_freezes_while_its_link_is_at_ease_is_found_out_as_soon_as_ever() -> None:
    for frozen in range(10_000, 12_000, 50):
        found = looks(frozen_ms=frozen, until_ms=frozen + 7_000)
        suspect = next(now for now, verdict in found.items() if verdict is Verdict.SUSPECT)
        dead = next(now for now, verdict in found.items() if verdict is Verdict.DEAD)
        assert suspect <= frozen + 2_700
        assert dead <= frozen + 4_700


def test_a_link_that_is_not_well_is_looked_at_every_period() -> None:
    pulse = Pulse(LinkLimits(), 0, 0)
    assert pulse.ease_ns(0) == PERIOD_MS * MS, "nothing is known yet"
    assert pulse.beat(Heard(0, 0, 0), 0, 100 * MS).verdict is Verdict.ALIVE
    assert pulse.ease_ns(100 * MS) > PERIOD_MS * MS
    assert pulse.beat(SILENT, 0, 3 * SECOND).verdict is Verdict.SUSPECT
    assert pulse.ease_ns(3 * SECOND) == PERIOD_MS * MS
