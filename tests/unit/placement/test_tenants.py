"""Nodes that cap the lanes of a tenant: what the cap leaves free is left free of the places at the node too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from superfluid_core.placement.policies import Choice, Policy, Refusal, RefusalKind
from superfluid_core.placement.policies import choose as chosen
from superfluid_core.placement.policies import choose_among_all as chosen_among_all
from superfluid_core.placement.reserve import Placed, place
from superfluid_core.placement.view import Fit, FleetView, PlacementLimits
from superfluid_core.session import QosClass
from superfluid_core.wire.announced import tenant_lanes_feature, tenant_lanes_of

LIMITS = PlacementLimits()


def fleet(kit: Any, *caps: int) -> FleetView:
    nodes = [kit.node(f"n{number}", lanes=4) for number in range(len(caps))]
    for node, cap in zip(nodes, caps, strict=True):
        node.offers = {name: replace(o, tenant_lanes=cap) for name, o in node.offers.items()}
    view: FleetView = kit.view(*nodes)
    return view


def put(kit: Any, view: FleetView, tenant: str, **wanted: Any) -> Placed | Refusal:
    request = replace(kit.request(**wanted), tenant=tenant)
    return place(view, request, Policy.LOAD_AWARE, LIMITS, draw=0.5, now_ns=0)


def crowd_in(kit: Any, view: FleetView) -> list[Placed]:
    held: list[Placed] = []
    while isinstance(placed := put(kit, view, "crowd"), Placed):
        held.append(placed)
    return held


def test_a_crowd_gets_the_lanes_of_its_cap_and_as_many_places_more_as_all_have(kit: Any) -> None:
    view = fleet(kit, 3, 3)
    assert len(crowd_in(kit, view)) == 2 * (3 + LIMITS.sessions_over_lanes)
    refused = put(kit, view, "crowd")
    assert isinstance(refused, Refusal)
    assert refused.kind is RefusalKind.FULL
    assert refused.fits == {Fit.TENANT}
    others = [put(kit, view, "other") for _ in range(2)]
    assert {each.choice.node for each in others if isinstance(each, Placed)} == {"n0", "n1"}
    assert isinstance(put(kit, view, "other"), Refusal)


def test_a_place_that_a_session_leaves_is_its_tenants_again(kit: Any) -> None:
    view = fleet(kit, 2)
    held = crowd_in(kit, view)
    held[0].reservation.release()
    assert isinstance(put(kit, view, "crowd"), Placed)
    assert isinstance(put(kit, view, "crowd"), Refusal)
    for each in held:
        each.reservation.release()
    assert set(view.nodes["n0"].held.by_tenant) == {"crowd"}


def test_interactive_sessions_are_held_back_by_their_own_kind_only(kit: Any) -> None:
    view = fleet(kit, 1)
    crowd_in(kit, view)
    urgent = [put(kit, view, "crowd", qos=QosClass.INTERACTIVE) for _ in range(4)]
    assert [isinstance(each, Placed) for each in urgent] == [True, True, True, False]
    assert isinstance(urgent[0], Placed)
    urgent[0].reservation.set_qos(QosClass.AGENT)
    assert isinstance(put(kit, view, "crowd", qos=QosClass.INTERACTIVE), Placed)


@pytest.mark.parametrize("cap", [0, 4])
def test_a_cap_that_is_none_holds_nobody_back(kit: Any, cap: int) -> None:
    view = fleet(kit, cap)
    assert len(crowd_in(kit, view)) == 4 + LIMITS.sessions_over_lanes


def test_the_node_that_is_left_is_chosen_as_by_judging_every_node(kit: Any) -> None:
    view = fleet(kit, 1, 3, 0)
    for _ in range(3 + 5 + 6):
        request = replace(kit.request(), tenant="crowd")
        asked = (view, request, Policy.LOAD_AWARE, LIMITS)
        fast = chosen(*asked, draw=0.3, now_ns=0)
        slow = chosen_among_all(*asked, draw=0.3, now_ns=0)
        assert isinstance(fast, Choice)
        assert isinstance(slow, Choice)
        assert fast.node == slow.node
        place(*asked, draw=0.3, now_ns=0)
    assert isinstance(put(kit, view, "crowd"), Refusal)


def test_a_node_announces_its_cap_among_its_features() -> None:
    assert tenant_lanes_of(("files", tenant_lanes_feature(3), "stats")) == 3
    for features in (
        (),
        ("files",),
        ("tenant-lanes-",),
        ("tenant-lanes-x",),
        ("tenant-lanes-99999",),
    ):
        assert tenant_lanes_of(features) == 0
