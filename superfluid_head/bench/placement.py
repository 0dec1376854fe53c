"""`superfluid bench placement`: what choosing a node costs, with the names of a long prompt's blocks, and how that grows.

No process is started: placement is a pure function, and its index is what the nodes' reports make it. The bar is for fifty nodes;
larger fleets are printed for the growth. The index may hold no more blocks than the nodes have. Last, every node also computes contexts
that begin like the prompt (`promises.py`), so that none is cold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

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
from superfluid_head.fleet.promises import Promises

Say = Callable[[str], None]
BAR_NODES, BAR_US = 50, 200.0
BLOCK_TOKENS, BLOCKS, LANES = 16, 4_096, 16
HOLDERS = 50
"""So many nodes hold a part of the prompt, however large the fleet is."""
PROMISED = 4
"""So many contexts every node computes."""


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


def promises_of(view: FleetView, chain: Sequence[bytes], draws: Draws) -> Promises:
    """Let every node compute contexts that have the first half of the prompt in common and then one of ten others."""
    book = Promises()
    for name in view.nodes:
        for _ in range(PROMISED):
            own = block_chain(
                chain[len(chain) // 2], (draws.below(10),) * BLOCK_TOKENS, BLOCK_TOKENS
            )
            book.add(name, [*chain[: len(chain) // 2 + 1], *own])
    return book


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

        book = promises_of(view, chain, draws)

        def look_ahead(
            look: Callable[[], dict[str, int]] = look,
            book: Promises = book,
            chain: Sequence[bytes] = chain,
        ) -> dict[str, int]:
            found = look()
            for name, depth in book.depths(chain).items():
                found[name] = max(depth * BLOCK_TOKENS, found.get(name, 0))
            return found

        def whole(
            look: Callable[[], dict[str, int]],
            view: FleetView = view,
            asked: PlacementRequest = asked,
        ) -> None:
            warm = replace(asked, cached=look())
            choose(view, warm, Policy.LOAD_AWARE, PlacementLimits(), draw=0.5, now_ns=0)

        whole(look)
        took = {
            "look_us": microseconds(clock, look, calls),
            "choose_us": microseconds(clock, partial(whole, look), calls),
            "promises_us": microseconds(clock, partial(book.depths, chain), calls),
            "with_promises_us": microseconds(clock, partial(whole, look_ahead), calls),
        }
        is_met &= count != BAR_NODES or took["choose_us"] < BAR_US
        is_met &= len(index) <= count * BLOCKS
        fields = {"nodes": count, "names": len(chain), **took, "index_blocks": len(index)}
        say(json_line({"bench": "placement", **fields}))
        rows.append(list(fields.values()))
    columns = ["nodes", "names", "look-up us", "with choice us", "promises us", "with promises us"]
    say("\n" + table([*columns, "index blocks"], rows))
    say(f"{'met   ' if is_met else 'MISSED'}  under {BAR_US:.0f} us with {BAR_NODES} nodes")
    return is_met
