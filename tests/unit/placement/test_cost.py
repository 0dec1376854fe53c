"""What a choice costs, printed (`-s`): 50 nodes with the names of a 32k prompt, growth to 1,000 nodes, memory of the index."""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from superfluid_core.blockhash import block_chain, root_hash
from superfluid_core.placement.policies import Policy, choose
from superfluid_core.placement.prefix import PrefixIndex
from superfluid_core.placement.reserve import Placed, Reservation, place
from superfluid_core.placement.view import PlacementLimits
from superfluid_core.wire.messages import Prefix

LIMITS = PlacementLimits()
BLOCK = 16


def microseconds(work: Any, rounds: int) -> float:
    """The median over `rounds` calls."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter_ns()
        work()
        took.append(time.perf_counter_ns() - began)
    return statistics.median(took) / 1_000


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [50, 200, 1_000])
def test_the_cost_of_a_choice_with_the_names_of_a_long_prompt(kit: Any, nodes: int) -> None:
    drawn = random.Random(7)
    view = kit.view(*(kit.node(f"n{i}", 16, speed=drawn.uniform(0.5, 3.0)) for i in range(nodes)))
    chain = block_chain(root_hash(b"salt", tenant="t"), range(32_000), BLOCK)
    index = PrefixIndex()
    for n, node in enumerate(view.nodes.values()):
        index.attach(node.name, 4_096)
        part = chain[: drawn.randint(1, len(chain))] if n < 50 else []
        index.fold(node.name, Prefix(1, 0, 1, True, tuple(part), ()))
    request = replace(kit.request(32_000), cached={})

    def look() -> dict[str, int]:
        return {name: depth * BLOCK for name, depth in index.depths(chain).items()}

    def choose_one() -> None:
        warm = replace(request, cached=look())
        choose(view, warm, Policy.LOAD_AWARE, LIMITS, draw=0.5, now_ns=0)

    held: list[Reservation] = []

    def place_one() -> None:
        placed = place(view, kit.request(300), Policy.LOAD_AWARE, LIMITS, draw=0.5, now_ns=0)
        assert isinstance(placed, Placed)
        held.append(placed.reservation)
        if len(held) > 4 * nodes:
            held.pop(0).release()

    choose_one()
    print(
        f"\n{nodes} nodes, {len(chain)} names, 50 nodes hold parts of them: look-up "
        f"{microseconds(look, 200):.0f} us, with choice {microseconds(choose_one, 200):.0f} us; "
        f"placements without hits {microseconds(place_one, 2_000):.0f} us each"
    )
    assert len(look()) == 50


@pytest.mark.slow
def test_the_memory_of_the_index_is_that_of_the_blocks_that_nodes_have() -> None:
    blocks = 4_096
    gc.collect()
    tracemalloc.start()
    index, drawn = PrefixIndex(), random.Random(1)
    for n in range(10):
        index.attach(f"n{n}", blocks)
        names = tuple(drawn.randbytes(16) for _ in range(blocks))
        assert index.fold(f"n{n}", Prefix(1, 0, 1, True, names, ()))
        names = tuple(drawn.randbytes(16) for _ in range(blocks))
        assert not index.fold(f"n{n}", Prefix(2, 0, 1, False, names, ())), "beyond its count"
        assert index.fold(f"n{n}", Prefix(3, 0, 1, True, names, ()))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"\n{len(index)} blocks of 10 nodes: {used / len(index):.0f} bytes each")
    assert len(index) == 10 * blocks
    assert used / len(index) < 400
