"""What is being computed somewhere, before it is reported: found while its placement lasts and until a report covers it."""

from __future__ import annotations

import random

from superfluid_core.placement.policies import Policy
from superfluid_core.placement.reserve import Placed, place
from superfluid_core.placement.view import (
    FleetView,
    NodeView,
    Offer,
    PlacementLimits,
    PlacementRequest,
)
from superfluid_core.session import QosClass
from superfluid_head.fleet.promises import Promise, Promises


def chain(*blocks: int) -> list[bytes]:
    """Name blocks as a chain does: a name tells all blocks before it."""
    return [bytes(blocks[: end + 1]) for end in range(len(blocks))]


def test_the_longest_common_beginning_is_found_on_every_engine() -> None:
    book = Promises()
    book.add("a/0", chain(1, 2, 3, 4))
    book.add("a/0", chain(1, 2))
    book.add("b/0", chain(1, 9, 3, 4))
    book.add("c/0", chain(5, 2, 3))
    assert book.depths(chain(1, 2, 3, 7, 7)) == {"a/0": 3, "b/0": 1}
    assert book.depths(chain(1)) == {"a/0": 1, "b/0": 1}
    assert book.depths([]) == {}
    assert book.depths(chain(6)) == {}


def test_depths_are_those_of_comparing_block_by_block_whatever_came_and_went() -> None:
    drawn = random.Random(5)

    def draw() -> list[bytes]:
        return chain(*(drawn.randrange(2) for _ in range(drawn.randrange(1, 12))))

    for engines in (2, 10, 50):
        book = Promises()
        held: list[tuple[Promise, list[bytes]]] = []
        for _ in range(600):
            if held and drawn.random() < len(held) / 200:
                held.pop(drawn.randrange(len(held)))[0].released()
            else:
                added = draw()
                held.append((book.add(f"{drawn.randrange(engines)}/0", added), added))
            asked = draw()
            expected: dict[str, int] = {}
            for promise, there in held:
                same = sum(left == right for left, right in zip(there, asked, strict=False))
                if same:
                    expected[promise.engine] = max(same, expected.get(promise.engine, 0))
            assert book.depths(asked) == expected
            assert len(book) == len(held)
        for promise, _ in held:
            promise.released()
        assert book == Promises(), "nothing is left of them"


def test_a_context_that_grows_is_known_as_it_was_placed() -> None:
    book, grown = Promises(), chain(1, 2)
    promise = book.add("a/0", grown)
    grown += chain(1, 2, 3)[2:]
    assert book.depths(chain(1, 2, 3)) == {"a/0": 2}
    book.add("b/0", grown)
    assert book.depths(chain(1, 2, 3)) == {"a/0": 2, "b/0": 3}
    promise.released()
    assert book.depths(chain(1, 2, 3)) == {"b/0": 3}


def test_a_promise_ends_with_its_placement_or_with_the_report_after_its_first_token() -> None:
    book = Promises()
    early, late, other = (book.add(each, chain(1, 2)) for each in ("a/0", "a/0", "b/0"))
    book.reported("a/0")
    assert len(book) == 3, "nothing of them was computed yet"
    early.started()
    other.started()
    book.reported("a/0")
    assert len(book) == 2
    early.released()
    late.released()
    assert book.depths(chain(1, 2)) == {"b/0": 2}
    other.released()
    book.reported("b/0")
    assert (len(book), book) == (0, Promises()), "nothing is left of them"


def test_a_reservation_tells_its_follower_once_each() -> None:
    class Heard:
        def __init__(self) -> None:
            self.words: list[str] = []

        def started(self) -> None:
            self.words.append("started")

        def released(self) -> None:
            self.words.append("released")

    view = FleetView({"a": NodeView("a", {"m": Offer("w", 1_000, 4)}, is_up=True)})
    request = PlacementRequest("m", 10, 0, 10, QosClass.AGENT, 10)
    placed = place(view, request, Policy.LOAD_AWARE, PlacementLimits(), draw=0.0, now_ns=0)
    assert isinstance(placed, Placed)
    heard = Heard()
    placed.reservation.follow(heard)
    placed.reservation.started()
    placed.reservation.release()
    placed.reservation.release()
    placed.reservation.started()
    assert heard.words == ["started", "released"]
