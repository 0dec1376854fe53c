"""The shelves choose what judging every node would choose, whatever happened to the nodes in between."""

from __future__ import annotations

import copy
import random
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_core.placement.policies import Choice, Policy, Refusal, choose, choose_among_all
from superfluid_core.placement.reserve import Placed, Reservation, fold_load, place
from superfluid_core.placement.view import (
    FleetView,
    Held,
    Load,
    NodeView,
    Offer,
    OtherWork,
    PlacementLimits,
)
from superfluid_core.session import QosClass

LIMITS = PlacementLimits()
KINDS = (
    "place", "place", "place", "release", "acknowledge", "report", "report", "flag", "busy", "offers", "join",
    "leave", "allowance",
)  # fmt: skip
FLAGS = ("is_up", "is_suspect", "is_draining", "is_ready")


def apart(value: Any) -> Any:
    """A copy that shares only what is frozen: loads and offers, of which a fleet has most."""
    if isinstance(value, str | int | float | Load | Offer):
        return value
    if isinstance(value, dict):
        return {key: apart(each) for key, each in value.items()}
    if isinstance(value, Held | OtherWork):
        parts = {each.name: apart(getattr(value, each.name)) for each in fields(value)}
        return type(value)(**parts)
    return copy.deepcopy(value)


def fresh(view: FleetView) -> FleetView:
    """The same fleet, of which nothing has been computed yet."""
    twin = FleetView()
    for node in view.nodes.values():
        other = NodeView(node.name)
        for name in NodeView.__dataclass_fields__:
            if name != "watchers":
                setattr(other, name, apart(getattr(node, name)))
        twin.add(other)
    twin.turn, twin.choices, twin.chosen = view.turn, view.choices, list(view.chosen)
    return twin


class World:
    """A fleet and everything that may befall it, drawn from one seed."""

    def __init__(self, seed: int, policy: Policy) -> None:
        self.drawn = random.Random(seed)
        self.policy = policy
        self.view = FleetView()
        self.held: list[tuple[NodeView, Reservation]] = []
        self.now_ns = 0
        self.joined = 0
        for _ in range(self.drawn.randint(1, 9)):
            self.join()

    def join(self) -> None:
        node = NodeView(f"n{self.joined}", is_up=True)
        self.joined += 1
        node.offers = self.offers()
        if self.drawn.random() < 0.7:
            node.load = self.load()
        self.view.add(node)

    def offers(self) -> dict[str, Offer]:
        window = self.drawn.choice((2_048, 8_192))
        models = self.drawn.choice((("m",), ("m",), ("m", "k"), ("k",), ()))
        return {
            model: Offer(self.drawn.choice("wv"), window, self.drawn.choice((2, 8)), 16, 64)
            for model in models
        }

    def load(self) -> Load:
        drawn = self.drawn
        rates = tuple((lanes, lanes * drawn.choice((20.0, 21.0, 40.0))) for lanes in (1, 4))
        return Load(
            drawn.randint(0, 4),
            drawn.choice((0, 0, 3)),
            drawn.choice((0, 0, 700)),
            drawn.choice((0, 60)),
            64,
            drawn.choice((0.0, 2_000.0, 2_001.0)),
            drawn.choice(((), rates)),
        )

    def request(self) -> Any:
        from superfluid_core.placement.view import PlacementRequest

        drawn = self.drawn
        names = list(self.view.nodes)
        cached = {n: drawn.choice((16, 500)) for n in drawn.sample(names, min(2, len(names)))}
        return PlacementRequest(
            "m",
            drawn.choice((10, 500, 3_000)),
            0,
            100,
            drawn.choice(list(QosClass)),
            drawn.choice((5, 60)),
            cached=drawn.choice(({}, cached)),
        )

    def step(self, kind: str) -> None:  # noqa: C901 - one line a kind
        drawn, view = self.drawn, self.view
        self.now_ns += drawn.randint(0, 5)
        nodes = list(view.nodes.values())
        if kind == "join":
            self.join()
        elif not nodes:
            return
        node = drawn.choice(nodes) if nodes else None
        assert node is not None
        if kind == "place":
            placed = place(
                view, self.request(), self.policy, LIMITS, draw=drawn.random(), now_ns=self.now_ns
            )
            if isinstance(placed, Placed):
                self.held.append((placed.reservation.node, placed.reservation))
        elif kind == "release" and self.held:
            self.held.pop(drawn.randrange(len(self.held)))[1].release()
        elif kind == "acknowledge" and self.held:
            drawn.choice(self.held)[1].acknowledge()
        elif kind == "report":
            fold_load(node, self.load(), [r for n, r in self.held if n is node])
        elif kind == "flag":
            name = drawn.choice(FLAGS)
            setattr(node, name, not getattr(node, name))
        elif kind == "busy":
            node.busy_until_ns = self.now_ns + drawn.randint(-3, 20)
        elif kind == "offers":
            node.offers = self.offers()
        elif kind == "leave" and len(nodes) > 2:
            view.remove(node.name)
        elif kind == "allowance":
            node.allowance = drawn.choice((0.1, 0.5, 1.0, 1.0))

    def compare(self) -> None:
        request, draw = self.request(), self.drawn.random()
        twin = fresh(self.view)
        mine = choose(self.view, request, self.policy, LIMITS, draw=draw, now_ns=self.now_ns)
        all_ = choose_among_all(twin, request, self.policy, LIMITS, draw=draw, now_ns=self.now_ns)
        assert type(mine) is type(all_)
        if isinstance(mine, Choice):
            assert isinstance(all_, Choice)
            assert (mine.node, mine.max_output) == (all_.node, all_.max_output)
        else:
            assert isinstance(mine, Refusal)
            assert isinstance(all_, Refusal)
            assert (mine.kind, mine.window) == (all_.kind, all_.window)


@pytest.mark.slow
@pytest.mark.parametrize("policy", list(Policy))
@given(seed=st.integers(0, 1 << 32), kinds=st.lists(st.sampled_from(KINDS), max_size=60))
@settings(max_examples=60, deadline=None)
def test_whatever_changed_the_shelves_choose_what_judging_every_node_chooses(
    policy: Policy, seed: int, kinds: list[str]
) -> None:
    world = World(seed, policy)
    world.compare()
    for kind in kinds:
        world.step(kind)
        world.compare()


@pytest.mark.parametrize("seed", range(4))
def test_three_hundred_different_nodes_are_ranked_as_by_judging_each(kit: Any, seed: int) -> None:
    drawn = random.Random(seed)
    view = kit.view(*(kit.node(f"n{i}", speed=drawn.uniform(0.5, 4.0)) for i in range(300)))
    for node in view.nodes.values():
        node.load = replace(
            node.load, lanes_busy=drawn.randint(0, 8), queued_tokens=drawn.randint(0, 900)
        )
    for _ in range(60):
        request = kit.request(
            drawn.choice((30, 900, 20_000)), cached={f"n{drawn.randrange(300)}": 16}
        )
        request = replace(request, expected_output=drawn.choice((1, 60, 4_000)))
        draw = drawn.random()
        everyone = choose_among_all(
            fresh(view), request, Policy.LOAD_AWARE, LIMITS, draw=draw, now_ns=0
        )
        placed = place(view, request, Policy.LOAD_AWARE, LIMITS, draw=draw, now_ns=0)
        assert isinstance(everyone, Choice)
        assert isinstance(placed, Placed)
        assert placed.choice.node == everyone.node


def test_one_node_that_measured_nothing_does_not_make_others_be_looked_at_for_each_report(
    kit: Any,
) -> None:
    view = kit.view(*(kit.node(f"n{i}") for i in range(32)))
    view.nodes["n0"].load = Load(blocks=100_000)
    choose(view, kit.request(), Policy.LOAD_AWARE, LIMITS, draw=0.0, now_ns=0)
    assert view.ranking is not None
    before = view.ranking.models["m"].rates
    view.nodes["n5"].load = replace(view.nodes["n5"].load, prefill_rate=1.0)
    choose(view, kit.request(), Policy.LOAD_AWARE, LIMITS, draw=0.0, now_ns=0)
    assert view.ranking.models["m"].rates is before
    for i in range(6, 10):
        view.nodes[f"n{i}"].load = replace(view.nodes[f"n{i}"].load, prefill_rate=1.0)
    choose(view, kit.request(), Policy.LOAD_AWARE, LIMITS, draw=0.0, now_ns=0)
    assert view.ranking.models["m"].rates is not before


def test_a_large_fleet_keeps_the_best_it_looked_at_and_a_small_one_everybody(kit: Any) -> None:
    large = kit.view(*(kit.node(f"n{i}") for i in range(100)))
    large.nodes["n7"].load = replace(large.nodes["n7"].load, lanes_busy=3)
    choice = choose(large, kit.request(), Policy.LOAD_AWARE, LIMITS, draw=0.5, now_ns=0)
    assert isinstance(choice, Choice)
    assert 1 <= len(choice.scores) <= 16
    small = kit.view(*(kit.node(f"n{i}") for i in range(50)))
    choice = choose(small, kit.request(), Policy.LOAD_AWARE, LIMITS, draw=0.5, now_ns=0)
    assert isinstance(choice, Choice)
    assert len(choice.scores) == 50
