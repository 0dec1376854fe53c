"""A quiet fleet: what comes one after another spreads over equal nodes, whoever came first and however rates were measured.

Seen with `superfluid bench scenario burst`: of 200 chats one after another all 200 went to the node that had the first one, because it held one
block of the chat template; and without that, to whichever node had measured its prefill rate a hundredth higher.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from superfluid_core.placement.estimate import HIT_TOKENS_MIN, RATE_NOISE
from superfluid_core.placement.policies import Choice, Policy, choose, choose_among_all
from superfluid_core.placement.view import FleetView, PlacementLimits

LIMITS = PlacementLimits()
ROUNDS = 1_000


def spread(kit: Any, view: FleetView, draws: Any, **cached: int) -> Counter[str]:
    """Choose over and over with nothing in progress, both ways of choosing alike."""
    found: Counter[str] = Counter()
    for _ in range(ROUNDS):
        request, draw = kit.request(200, cached=cached), draws()
        choice = choose(view, request, Policy.LOAD_AWARE, LIMITS, draw=draw, now_ns=0)
        other = choose_among_all(view, request, Policy.LOAD_AWARE, LIMITS, draw=draw, now_ns=0)
        assert isinstance(choice, Choice)
        assert isinstance(other, Choice)
        assert choice.node == other.node
        found[choice.node] += 1
    return found


def test_the_head_of_a_chat_template_does_not_draw_every_chat_to_one_node(
    kit: Any, draws: Any
) -> None:
    view = kit.view(*(kit.node(name) for name in "abcd"))
    found = spread(kit, view, draws, b=HIT_TOKENS_MIN - 16)
    assert all(225 <= found[name] <= 275 for name in "abcd"), found


def test_a_longer_hit_decides(kit: Any, draws: Any) -> None:
    view = kit.view(*(kit.node(name) for name in "abcd"))
    assert spread(kit, view, draws, b=HIT_TOKENS_MIN) == {"b": ROUNDS}


@pytest.mark.parametrize("off", [0.99, 1.01, 0.8, 1.3])
def test_rates_that_were_measured_a_little_apart_are_taken_as_equal(
    kit: Any, draws: Any, off: float
) -> None:
    view = kit.view(*(kit.node(name) for name in "abcd"))
    node = view.nodes["c"]
    spread(kit, view, draws)
    node.load = replace(node.load, prefill_rate=node.load.prefill_rate * off)
    found = spread(kit, view, draws)
    assert all(225 <= found[name] <= 275 for name in "abcd"), found


def test_a_node_that_has_measured_nothing_is_as_good_as_the_typical_one(
    kit: Any, draws: Any
) -> None:
    view = kit.view(*(kit.node(name) for name in "abcd"))
    for factor, name in zip((0.0, 1.1, 0.95), "abc", strict=True):
        node = view.nodes[name]
        node.load = replace(node.load, prefill_rate=node.load.prefill_rate * factor)
    found = spread(kit, view, draws)
    assert all(225 <= found[name] <= 275 for name in "abcd"), found


def test_a_node_of_twice_the_speed_is_still_preferred(kit: Any, draws: Any) -> None:
    assert RATE_NOISE < 2
    view = kit.view(kit.node("a", speed=2.0), *(kit.node(name) for name in "bcd"))
    assert spread(kit, view, draws) == {"a": ROUNDS}


def test_when_all_nodes_become_faster_all_cards_hear_of_it(kit: Any, draws: Any) -> None:
    view = kit.view(*(kit.node(name) for name in "abcd"))
    spread(kit, view, draws)
    for name in "abc":
        node = view.nodes[name]
        node.load = replace(node.load, prefill_rate=node.load.prefill_rate * 4)
    found = spread(kit, view, draws)
    assert set(found) == set("abc")
    view.nodes["d"].load = view.nodes["a"].load
    assert set(spread(kit, view, draws)) == set("abcd")


def chosen(kit: Any, backlog: int, cached: dict[str, int]) -> str:
    """Choose for a prompt of 400 tokens while "a" has `backlog` prompt tokens waiting."""
    view = kit.view(*(kit.node(name) for name in "abcd"))
    node = view.nodes["a"]
    node.load = replace(node.load, queued_tokens=backlog)
    request = kit.request(400, cached=cached)
    one = choose(view, request, Policy.LOAD_AWARE, LIMITS, draw=0.5, now_ns=0)
    other = choose_among_all(view, request, Policy.LOAD_AWARE, LIMITS, draw=0.5, now_ns=0)
    assert isinstance(one, Choice)
    assert isinstance(other, Choice)
    assert (one.node, one.scores) == (other.node, other.scores)
    return one.node


def test_a_prefix_is_not_copied_to_save_a_little_wait(kit: Any) -> None:
    # 500 waiting tokens are more than the 350 that the hit saves: the least wait alone would copy the prefix
    assert chosen(kit, 500, {"a": 350}) == "a"
    assert chosen(kit, 500, {}) != "a"


def test_a_prefix_is_copied_when_its_node_is_far_behind(kit: Any) -> None:
    assert chosen(kit, 4_000, {"a": 350}) != "a"


def test_of_two_that_hold_a_prefix_the_freer_one_takes_it(kit: Any) -> None:
    assert chosen(kit, 500, {"a": 350, "c": 350}) == "c"
    assert chosen(kit, 500, {"a": 350, "c": 340}) == "c"
