"""Nodes with several engines: each model is placed by the load, the pool and the rates of the engine that serves it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from superfluid_core.placement.policies import Choice, Policy, Refusal, choose, choose_among_all
from superfluid_core.placement.reserve import Placed, fold_load, place
from superfluid_core.placement.view import (
    FleetView,
    Load,
    NodeView,
    Offer,
    PlacementLimits,
    PlacementRequest,
)
from superfluid_core.session import QosClass

LIMITS = PlacementLimits()
RATES = ((1, 50.0), (8, 250.0))


def node(name: str, *, rate: float = 4_000.0, fim_rate: float = 9_000.0) -> NodeView:
    """A main model under two names, and a smaller one on an engine of its own."""
    main, fim = Offer("w", 8_192, 8, 16, 1_000), Offer("f", 2_048, 2, 16, 200, engine=1)
    found = NodeView(name, {"m": main, "alias": main, "fim": fim}, sessions_max=20, is_up=True)
    fold_load(found, Load(0, 0, 0, 0, 1_000, rate, RATES), (), {1: Load(0, 0, 0, 0, 200, fim_rate)})
    return found


def ask(model: str, prompt: int = 100, qos: QosClass = QosClass.COMPLETION) -> PlacementRequest:
    return PlacementRequest(model, prompt, 0, 64, qos, 32)


def put(view: FleetView, request: PlacementRequest, policy: Policy = Policy.LOAD_AWARE) -> str:
    """Place and return where; both ways of choosing must agree."""
    everyone = choose_among_all(view, request, policy, LIMITS, draw=0.0, now_ns=0)
    placed = place(view, request, policy, LIMITS, draw=0.0, now_ns=0)
    assert isinstance(everyone, Choice)
    assert isinstance(placed, Placed)
    assert placed.choice.node == everyone.node
    return placed.choice.node


def full_main(node: NodeView) -> None:
    fold_load(node, replace(node.load, lanes_busy=8, queued=12, queued_tokens=50_000), ())


@pytest.mark.parametrize("policy", [Policy.LOAD_AWARE, Policy.LEAST_LOADED])
def test_a_busy_main_model_does_not_make_the_other_look_full(policy: Policy) -> None:
    """a's main engine is drowned and its second one idle; b's main engine is idle and its second one has work."""
    a, b = node("a"), node("b")
    view = FleetView({"a": a, "b": b})
    full_main(a)
    fold_load(b, b.load, (), {1: replace(b.others[1].load, lanes_busy=1)})
    assert put(view, ask("fim"), policy) == "a"
    assert put(view, ask("m"), policy) == "b"


def test_a_pool_that_is_nearly_full_is_the_engine_s_own() -> None:
    a, b = node("a"), node("b")
    view = FleetView({"a": a, "b": b})
    fold_load(a, replace(a.load, blocks_used=950), (), {1: a.others[1].load})
    fold_load(b, b.load, (), {1: replace(b.others[1].load, blocks_used=190)})
    assert put(view, ask("fim")) == "a"
    assert put(view, ask("m")) == "b"


def test_lanes_are_counted_by_engine_and_names_of_one_model_share_them() -> None:
    only = node("a")
    view = FleetView({"a": only})
    held = [
        place(view, ask("fim"), Policy.LOAD_AWARE, LIMITS, draw=0.0, now_ns=0) for _ in range(4)
    ]
    assert all(isinstance(each, Placed) for each in held)
    assert isinstance(
        choose(view, ask("fim"), Policy.LOAD_AWARE, LIMITS, draw=0.0, now_ns=0), Refusal
    )
    for number in range(10):
        assert put(view, ask(("m", "alias")[number % 2])) == "a"
    assert (only.held.sessions, only.others[1].held.sessions, only.sessions) == (10, 4, 14)
    refused = choose(view, ask("alias"), Policy.LOAD_AWARE, LIMITS, draw=0.0, now_ns=0)
    assert isinstance(refused, Refusal)
    first = held[0]
    assert isinstance(first, Placed)
    first.reservation.release()
    assert put(view, ask("fim")) == "a"
    assert only.others[1].held.sessions == 4


def test_a_report_covers_and_forgets_by_engine() -> None:
    only = node("a")
    placed = place(
        FleetView({"a": only}), ask("fim"), Policy.LOAD_AWARE, LIMITS, draw=0.0, now_ns=0
    )
    assert isinstance(placed, Placed)
    work = only.others[1]
    assert (only.in_progress, work.in_progress, work.queued_tokens) == (0, 1, 100)
    placed.reservation.acknowledge()
    busy = replace(work.load, lanes_busy=1)
    fold_load(only, only.load, [placed.reservation], {1: busy})
    assert (work.in_progress, work.queued_tokens) == (1, 0)
    placed.reservation.release()
    assert (work.in_progress, work.held.departed, only.held.departed) == (0, 1, 0)
    fold_load(only, only.load, (), {1: replace(busy, lanes_busy=0)})
    assert work.held.departed == 0


def test_the_most_sessions_of_one_head_count_over_all_engines() -> None:
    only = node("a")
    only.sessions_max = 3
    view = FleetView({"a": only})
    assert [put(view, ask(model)) for model in ("fim", "m", "fim")] == ["a"] * 3
    for qos in (QosClass.AGENT, QosClass.INTERACTIVE):
        refused = choose(view, ask("m", qos=qos), Policy.LOAD_AWARE, LIMITS, draw=0.0, now_ns=0)
        assert isinstance(refused, Refusal)


def test_who_has_measured_nothing_is_judged_by_the_mean_of_its_own_model() -> None:
    """A small model's rates say nothing of a large one: a is new to the large one and as good as its like."""
    a, b, c = node("a", rate=0.0), node("b", rate=1_000.0), node("c", rate=1_000.0)
    for each in (a, b, c):
        fold_load(each, each.load, (), {1: replace(each.others[1].load, prefill_rate=90_000.0)})
    view = FleetView({"a": a, "b": b, "c": c})
    choose(view, ask("m", 4_000), Policy.LOAD_AWARE, LIMITS, draw=0.0, now_ns=0)
    assert view.ranking is not None
    rates = {name: cards.rates for name, cards in view.ranking.models.items()}
    assert rates["m"] is not None
    assert rates["fim"] is not None
    assert (rates["m"].prefill, rates["fim"].prefill) == (1_000.0, 90_000.0)
    placed = {put(view, ask("m", 4_000, QosClass.AGENT)) for _ in range(3)}
    assert placed == {"a", "b", "c"}
