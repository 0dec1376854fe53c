"""The session table against a plain model: epochs only rise, leases only end, nothing fenced comes back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from superfluid_core.session import SessionKey
from superfluid_noded.sessions import LeaseLimits, Placement, SessionTable, Verdict

MS = 1_000_000
LIMITS = LeaseLimits(per_link_max=4, ttl_ms_max=30_000, tombstones_max=64)


def key(number: int = 1) -> SessionKey:
    return SessionKey("head", number)


def opened(
    table: SessionTable, epoch: int = 1, link: int = 1, now: int = 0, ttl_ms: int = 10_000
) -> Placement:
    opening = table.open(key(), epoch, link, (now, ttl_ms), now)
    assert opening.placement is not None
    return opening.placement


def test_an_epoch_that_is_known_is_refused_even_after_the_end() -> None:
    table = SessionTable(LIMITS)
    placement = opened(table, epoch=3)
    assert table.open(key(), 3, 1, (0, 1000), 0).verdict is Verdict.STALE_EPOCH
    assert table.close(placement)
    for epoch in (1, 2, 3):
        assert table.open(key(), epoch, 2, (0, 1000), 0).verdict is Verdict.STALE_EPOCH
    assert table.open(key(), 4, 2, (0, 1000), 0).verdict is Verdict.ACCEPTED


def test_a_higher_epoch_supersedes_on_the_same_and_on_another_link() -> None:
    table = SessionTable(LIMITS)
    first = opened(table, epoch=1, link=1)
    second = table.open(key(), 2, 2, (0, 1000), 0)
    assert second.superseded is first
    assert not table.may_emit(first, 0)
    assert table.find(key(), 1, 1) is None
    assert table.find(key(), 2, 1) is None
    assert table.find(key(), 2, 2) is second.placement
    assert table.on_link(1) == 0
    assert len(table) == 1


def test_a_stamp_older_than_the_lease_is_refused_as_fenced_and_one_from_the_future_too() -> None:
    table = SessionTable(LIMITS)
    now = 60_000 * MS
    assert table.open(key(), 1, 1, (now - 10_000 * MS, 10_000), now).verdict is Verdict.FENCED
    assert table.open(key(), 2, 1, (now + 1, 10_000), now).verdict is Verdict.FUTURE_STAMP
    assert table.open(key(), 3, 1, (now - 9_999 * MS, 10_000), now).verdict is Verdict.ACCEPTED


@pytest.mark.parametrize(
    ("lease", "refusal"),
    [((0, 1_000), Verdict.FENCED), ((60_001 * MS, 1_000), Verdict.FUTURE_STAMP)],
)
def test_an_open_that_was_refused_once_is_not_opened_when_it_comes_again(
    lease: tuple[int, int], refusal: Verdict
) -> None:
    # its head has gone on to a higher epoch, so nobody would ever cancel it (seed 548 of the simulation)
    table = SessionTable(LIMITS)
    now = 60_000 * MS
    assert table.open(key(), 1, 1, lease, now).verdict is refusal
    assert table.open(key(), 1, 1, (now, 10_000), now).verdict is Verdict.STALE_EPOCH
    assert table.open(key(), 2, 1, (now, 10_000), now).verdict is Verdict.ACCEPTED


def test_a_lease_is_no_longer_than_the_node_allows() -> None:
    placement = opened(SessionTable(LIMITS), ttl_ms=1_000_000)
    assert placement.lease_until_ns == 30_000 * MS


def test_renewing_counts_from_the_stamp_and_cannot_revive() -> None:
    table = SessionTable(LIMITS)
    placement = opened(table, ttl_ms=1_000)
    assert table.renew(1, 500 * MS, 900 * MS)
    assert placement.lease_until_ns == 1_500 * MS
    assert table.renew(1, 100 * MS, 950 * MS)  # an older echo shortens nothing
    assert placement.lease_until_ns == 1_500 * MS
    assert table.may_emit(placement, 1_499 * MS)
    assert table.renew(1, 1_490 * MS, 1_500 * MS)  # too late
    assert not table.may_emit(placement, 1_500 * MS)
    assert table.renew(1, 1_500 * MS, 1_500 * MS)
    assert not table.may_emit(placement, 1_501 * MS)
    assert not table.renew(1, 9_000 * MS, 1_501 * MS)


def test_a_renewal_covers_its_own_link_only() -> None:
    table = SessionTable(LIMITS)
    mine = opened(table, link=1, ttl_ms=1_000)
    other = table.open(key(2), 1, 2, (0, 1_000), 0).placement
    table.renew(1, 800 * MS, 800 * MS)
    assert other is not None
    assert table.expire(1_000 * MS) == [other]
    assert table.may_emit(mine, 1_000 * MS)


def test_a_link_has_a_most_number_of_sessions_and_a_superseded_one_does_not_count() -> None:
    table = SessionTable(LIMITS)
    for number in range(1, 5):
        assert table.open(key(number), 1, 1, (0, 1_000), 0).verdict is Verdict.ACCEPTED
    assert table.open(key(9), 1, 1, (0, 1_000), 0).verdict is Verdict.FULL
    assert table.open(key(4), 2, 1, (0, 1_000), 0).verdict is Verdict.ACCEPTED
    assert table.open(key(9), 2, 2, (0, 1_000), 0).verdict is Verdict.ACCEPTED
    assert len(table.close_link(1)) == 4
    assert len(table) == 1


def test_tombstones_are_bounded_and_live_sessions_are_never_among_the_evicted() -> None:
    table = SessionTable(LIMITS)
    live = opened(table, epoch=5)
    for number in range(2, 500):
        placement = table.open(key(number), 1, 1, (0, 1_000), 0).placement
        assert placement is not None
        table.close(placement)
    assert len(table._epochs) <= LIMITS.tombstones_max + 2
    assert table.open(key(), 5, 1, (0, 1_000), 0).verdict is Verdict.STALE_EPOCH
    assert table.may_emit(live, 1)


class Sessions(RuleBasedStateMachine):
    """Random heads, links, epochs and delays; the table may never let a stale or lapsed placement speak."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SessionTable(LIMITS)
        self.now = 0
        self.highest: dict[SessionKey, int] = {}
        self.until: dict[int, int] = {}
        self.silenced: list[Placement] = []
        self.speaking: dict[SessionKey, Placement] = {}

    @rule(ms=st.integers(0, 3_000))
    def pass_time(self, ms: int) -> None:
        self.now += ms * MS

    @rule(
        number=st.integers(1, 5),
        epoch=st.integers(1, 6),
        link=st.integers(1, 3),
        age=st.integers(-1, 4_000),
        ttl=st.integers(1, 3_000),
    )
    def open(self, number: int, epoch: int, link: int, age: int, ttl: int) -> None:
        stamp = self.now - age * MS
        known = self.highest.get(key(number), 0)
        opening = self.table.open(key(number), epoch, link, (stamp, ttl), self.now)
        assert (opening.verdict is Verdict.STALE_EPOCH) is (epoch <= known)
        self.highest[key(number)] = max(known, epoch)
        if opening.placement is None:
            return
        assert 0 <= age < ttl
        old = self.speaking.get(key(number))
        assert opening.superseded is old
        if old is not None:
            self.silenced.append(old)
        self.speaking[key(number)] = opening.placement
        self.until[opening.placement.serial] = stamp + ttl * MS

    @rule(link=st.integers(1, 3), age=st.integers(0, 4_000))
    def renew(self, link: int, age: int) -> None:
        stamp = self.now - age * MS
        assert self.table.renew(link, stamp, self.now)
        for placement in self.speaking.values():
            if placement.link == link and self.now < self.until[placement.serial]:
                later = stamp + placement.ttl_ns
                self.until[placement.serial] = max(self.until[placement.serial], later)

    @rule()
    def sweep(self) -> None:
        for placement in self.table.expire(self.now):
            assert self.now >= self.until[placement.serial]
            self._silence(placement)
            self.table.close(placement)

    @rule(link=st.integers(1, 3))
    def lose_link(self, link: int) -> None:
        for placement in self.table.close_link(link):
            self._silence(placement)

    def _silence(self, placement: Placement) -> None:
        del self.speaking[placement.key]
        self.silenced.append(placement)

    @invariant()
    def the_silenced_stay_silent(self) -> None:
        assert not any(self.table.may_emit(placement, self.now) for placement in self.silenced)

    @invariant()
    def a_live_one_speaks_exactly_while_its_lease_runs(self) -> None:
        assert len(self.table) == len(self.speaking)
        for placement in self.speaking.values():
            is_running = self.now < self.until[placement.serial]
            assert self.table.may_emit(placement, self.now) is is_running


Sessions.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_no_stale_or_lapsed_placement_ever_speaks = Sessions.TestCase


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), max_size=30))
@settings(max_examples=50, deadline=None)
def test_at_most_one_placement_of_a_session_is_live(opens: list[tuple[int, int]]) -> None:
    table = SessionTable(LIMITS)
    for link, epoch in opens:
        table.open(key(), epoch, link, (0, 1_000), 0)
        assert len(table) == 1
        assert sum(table.on_link(number) for number in (1, 2, 3)) == 1
