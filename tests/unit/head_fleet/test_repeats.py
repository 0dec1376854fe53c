"""What several workers tell of one thing is told once, and nothing else is lost."""

from __future__ import annotations

from typing import Any

from superfluid_head.fleet.chronicle import FleetEvent
from superfluid_head.fleet.repeats import APART_S_MAX, REPEATS_KEPT_MAX, Repeats


def event(kind: str, at_s: int = 0, **fields: Any) -> FleetEvent:
    return FleetEvent(1, at_s, kind, fields)


def test_a_node_that_goes_down_for_three_workers_goes_down_once() -> None:
    repeats, down = Repeats(), event("node-down", node="a", reason="silent")
    assert [repeats.is_one(down, worker) for worker in (1, 0, 2)] == [False, True, True]


def test_one_worker_that_says_it_again_means_another_time_and_the_others_follow_it_in_order() -> (
    None
):
    repeats = Repeats()
    flapping = [event("node-down", 0, node="a"), event("node-up", 1, node="a")] * 3
    assert [repeats.is_one(each, 0) for each in flapping] == [False] * 6
    assert [repeats.is_one(each, 1) for each in flapping] == [True] * 6
    assert not repeats.is_one(flapping[0], 1), "a fourth time"
    assert repeats.is_one(flapping[0], 0)


def test_other_words_another_node_and_a_later_time_are_told() -> None:
    repeats = Repeats()
    assert not repeats.is_one(event("fault", node="a", reason="silent"), 0)
    assert not repeats.is_one(event("fault", node="a", reason="lost"), 1)
    assert not repeats.is_one(event("fault", node="b", reason="silent"), 1)
    assert not repeats.is_one(event("node-rests", node="a", reason="silent"), 1)
    assert not repeats.is_one(event("fault", APART_S_MAX + 1, node="a", reason="silent"), 1)
    assert repeats.is_one(event("fault", APART_S_MAX, node="a", reason="silent"), 2)


def test_what_is_of_a_request_or_of_a_reader_is_told_by_each() -> None:
    repeats = Repeats()
    for kind, fields in (("moved", {"request": "r", "node": "a"}), ("missed", {"events": 3})):
        assert not any(repeats.is_one(event(kind, **fields), worker) for worker in (0, 1))


def test_no_more_is_remembered_than_the_bound() -> None:
    repeats = Repeats()
    for number in range(REPEATS_KEPT_MAX + 10):
        assert not repeats.is_one(event("link", node=f"n{number}", links=1), 0)
    assert len(repeats._things) == len(repeats._order) == REPEATS_KEPT_MAX
    assert not repeats.is_one(event("link", node="n9", links=1), 1)
    assert repeats.is_one(event("link", node="n20", links=1), 1)
