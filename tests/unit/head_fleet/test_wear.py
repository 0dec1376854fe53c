"""Which of a node's links carries what, by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from superfluid_head.fleet.links import Links


def standing(number: int, **flags: Any) -> Any:
    state = {
        "number": number, "retired_ns": None, "is_worn": False, "is_warm": False, "is_suspect": False,
    } | flags  # fmt: skip
    return SimpleNamespace(**state)


def slots(*links: int) -> list[Any]:
    return [SimpleNamespace(link=link) for link in links]


def test_a_session_goes_to_the_current_link_with_the_fewest() -> None:
    links = Links()
    assert links.choose([]) is None
    for number in (1, 2, 3):
        links.add(standing(number), has_reports=number == 1)
    assert links.choose(slots(1, 1, 2, 3)).number == 2  # type: ignore[union-attr]
    assert links.choose(slots(1, 2, 2, 3, 3, 9)).number == 1  # type: ignore[union-attr]
    for each in links:
        each.is_suspect = each.number == 1
    assert links.choose(slots(2, 2, 3)).number == 3  # type: ignore[union-attr]
    links.find(3).retired_ns = 5  # type: ignore[union-attr]
    assert links.choose(slots(2, 2)).number == 2  # type: ignore[union-attr]
    links.find(2).is_worn = True  # type: ignore[union-attr]
    links.find(1).is_suspect = False  # type: ignore[union-attr]
    assert links.choose(slots(1, 1, 1)).number == 1  # type: ignore[union-attr]


def test_reports_are_believed_from_a_link_that_was_asked_for_them_at_its_beginning() -> None:
    links = Links()
    first, second, third = (standing(number) for number in (1, 2, 3))
    links.add(first, has_reports=True)
    links.add(second, has_reports=True)
    assert (links.primary, first.is_warm, second.is_warm) == (first, True, False)
    links.remove(first)
    assert links.primary is second
    assert not links.is_warm
    links.add(third, has_reports=False)
    assert links.primary is second
    fourth = standing(4)
    links.add(fourth, has_reports=True)
    assert (links.primary, links.is_warm) == (fourth, True)


def test_a_worn_primary_hands_over_to_the_fresh_link() -> None:
    links = Links()
    old, fresh = standing(1), standing(2)
    links.add(old, has_reports=True)
    old.is_worn = True
    assert (links.is_warm, links.fresh, links.current) == (False, [], [old])
    links.add(fresh, has_reports=True)
    old.retired_ns = 7
    assert (links.primary, links.current, len(links)) == (fresh, [fresh], 2)
    links.remove(old)
    links.remove(old)
    assert list(links) == [fresh]
