"""`superfluid bench placement`: what choosing a node costs, with the names of a long prompt's blocks, and how that grows.

No process is started: placement is a pure function, and its index is what the nodes' reports make it. The bar is for fifty nodes;
larger fleets are printed for the growth. The index may hold no more blocks than the nodes have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from superfluid_core.blockhash import block_chain, root_hash
from superfluid_core.clock import Clock
from superfluid_core.placement.policies import Policy, choose
from superfluid_core.placement.prefix import PrefixIndex
from superfluid_core.placement.view import (
    FleetView,
    Load,
    NodeView,
    Offer,
    PlacementLimits,
    PlacementRequest,
)
from superfluid_core.session import QosClass
from superfluid_core.wire.messages import Prefix
from superfluid_head.bench.prose import Draws
from superfluid_head.bench.report import json_line, median, table

Say = Callable[[str], None]
BAR_NODES, BAR_US = 50, 200.0
BLOCK_TOKENS, BLOCKS, LANES = 16, 4_096, 16
HOLDERS = 50
"""So many nodes hold a part of the prompt, however large the fleet is."""


def fleet_of(nodes: int, draws: Draws) -> FleetView:
    """Make a fleet of unlike speeds and loads."""
    view = FleetView()
    for number in range(nodes):
        speed = (50 + draws.below(250)) / 100
        offer = Offer("w", 65_536, LANES, BLOCK_TOKENS, BLOCKS)
        rates = tuple((lanes, lanes * 40.0 * speed) for lanes in (1, 4, 16))
        load = Load(lanes_busy=draws.below(LANES), prefill_rate=4_000 * speed, decode_rates=rates)
        view.add(NodeView(f"n{number}", {"m": offer}, is_up=True, load=load))
    return view


def index_of(view: FleetView, chain: Sequence[bytes], draws: Draws) -> PrefixIndex:
    """Let some nodes hold a beginning of the prompt."""
    index = PrefixIndex()
    for number, name in enumerate(view.nodes):
        index.attach(name, BLOCKS)
        part = tuple(chain[: 1 + draws.below(len(chain))]) if number < HOLDERS else ()
        index.fold(name, Prefix(1, 0, 1, True, part, ()))
    return index


def microseconds(clock: Clock, work: Callable[[], object], calls: int) -> float:
    """Take the median over so many calls."""
    took = []
    for _ in range(calls):
        began_ns = clock.now_ns()
        work()
        took.append((clock.now_ns() - began_ns) / 1_000)
    return median(took)


def run_placement(nodes: Sequence[int], prompt: int, calls: int, clock: Clock, say: Say) -> bool:
    """Measure every size; true when fifty nodes keep the bar and no index outgrew its nodes."""
    rows: list[list[object]] = []
    is_met = True
    for count in nodes:
        draws = Draws(7)
        view = fleet_of(count, draws)
        chain = block_chain(root_hash(b"salt", tenant="t"), range(prompt), BLOCK_TOKENS)
        index = index_of(view, chain, draws)
        asked = PlacementRequest("m", prompt, 0, prompt + 512, QosClass.AGENT, 200)

        def look(index: PrefixIndex = index, chain: Sequence[bytes] = chain) -> dict[str, int]:
            return {name: depth * BLOCK_TOKENS for name, depth in index.depths(chain).items()}

        def whole(
            view: FleetView = view,
            look: Callable[[], dict[str, int]] = look,
            asked: PlacementRequest = asked,
        ) -> None:
            warm = PlacementRequest(
                asked.model, asked.prompt, 0, asked.max_output, asked.qos, 200, cached=look()
            )
            choose(view, warm, Policy.LOAD_AWARE, PlacementLimits(), draw=0.5, now_ns=0)

        whole()
        look_us, whole_us = microseconds(clock, look, calls), microseconds(clock, whole, calls)
        is_met &= count != BAR_NODES or whole_us < BAR_US
        is_met &= len(index) <= count * BLOCKS
        fields = {"nodes": count, "names": len(chain), "look_us": look_us, "choose_us": whole_us}
        say(json_line({"bench": "placement", **fields, "index_blocks": len(index)}))
        rows.append([count, len(chain), look_us, whole_us, len(index)])
    say("\n" + table(["nodes", "names", "look-up us", "with choice us", "index blocks"], rows))
    say(f"{'met   ' if is_met else 'MISSED'}  under {BAR_US:.0f} us with {BAR_NODES} nodes")
    return is_met
