"""Small fleets for placement tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from superfluid_core.placement.view import FleetView, Load, NodeView, Offer, PlacementRequest
from superfluid_core.session import QosClass

MODEL = "m"


def make_node(
    name: str, lanes: int = 8, *, speed: float = 1.0, window: int = 32_768, weights: str = "w"
) -> NodeView:
    """A linked, idle node whose measured rates scale with `speed`."""
    rates = tuple((b, speed * b / (0.02 + 0.001 * b)) for b in (1, 4, 16, 64))
    node = NodeView(name, {MODEL: Offer(weights, window, lanes, 16, 100_000)})
    node.is_up = True
    node.load = Load(blocks=100_000, prefill_rate=4_000.0 * speed, decode_rates=rates)
    return node


def make_view(*nodes: NodeView) -> FleetView:
    return FleetView({node.name: node for node in nodes})


def make_request(
    prompt: int = 300,
    *,
    delivered: int = 0,
    max_output: int = 256,
    qos: QosClass = QosClass.AGENT,
    avoid: frozenset[str] = frozenset(),
    is_move: bool = False,
    weights: str | None = None,
    cached: dict[str, int] | None = None,
) -> PlacementRequest:
    return PlacementRequest(
        MODEL, prompt, delivered, max_output, qos, 60, weights, avoid, is_move, cached or {}
    )


class Kit:
    """What the tests of this folder build fleets with."""

    node = staticmethod(make_node)
    view = staticmethod(make_view)
    request = staticmethod(make_request)


@pytest.fixture
def kit() -> type[Kit]:
    return Kit


Draws = Callable[[], float]


@pytest.fixture
def draws() -> Draws:
    """Tie-breaking values as the head draws them: a low-discrepancy sequence."""
    state = [0.123]

    def draw() -> float:
        state[0] = (state[0] + 0.6180339887498949) % 1.0
        return state[0]

    return draw
