"""What is drawn from a seed before anything starts: topology, faults that may come, engines, load.

A tenth of the seeds is calm: what happens there must not move a session. A fifth knows one kind of fault only, the rest
about half of the kinds each, so that kinds meet in many combinations and none hides behind another. One seed in sixteen is dense: more
sessions, faults closer together, finer looks at the time, fewer single nodes. The others have half as many sessions, each as long but of
fewer tokens, and nodes and heads look at the time, and speak of their load, less often: what makes an hour cheap. Planted bugs are hunted
in dense seeds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from superfluid_core.engine.sim import SimOptions
from superfluid_core.limits import LinkLimits
from tests.sim.faults import CALM
from tests.sim.head import Load
from tests.sim.oracle import EOS_PROBABILITY

DENSE_EVERY = 16


@dataclass(frozen=True)
class Pace:
    """How close things follow one another."""

    nodes: tuple[int, ...]
    sessions_live: float
    durations_s: tuple[int, ...]
    gaps_s: tuple[float, ...]
    coarse: float
    coarse_ms: int
    decode_rates: tuple[float, ...]
    outputs_max: tuple[int, ...]


DENSE = Pace(
    (1, 2, 2, 3, 3, 3, 5), 0.8, (100, 160, 240), (10.0, 16.0, 24.0), 0.6, 250, (3.0, 5.0, 9.0), (20, 60, 120)
)  # fmt: skip
EVEN = Pace(
    (1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 5), 0.22, (80, 130, 190), (10.0, 16.0, 24.0), 0.97, 900, (1.5, 2.5, 4.0), (12, 32, 64)
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What is drawn before anything starts."""

    nodes: int
    heads: int
    kinds: tuple[str, ...]
    is_calm: bool
    is_tight: bool
    is_coarse: bool
    duration_s: int
    gap_s: float
    pace: Pace


def draw_shape(drawn: random.Random, only: tuple[str, ...] = (), *, is_dense: bool = True) -> Shape:
    pace = DENSE if is_dense else EVEN
    every = ALL_KINDS
    is_calm = drawn.random() < 0.1 and not only
    if only:
        kinds = only
    elif is_calm:
        kinds = CALM
    elif drawn.random() < 0.2:
        kinds = (drawn.choice(every),)
    else:
        kinds = tuple(kind for kind in every if drawn.random() < 0.45) or ("crash",)
    return Shape(
        nodes=drawn.choice(pace.nodes),
        heads=2 if drawn.random() < 0.15 else 1,
        kinds=kinds,
        is_calm=is_calm,
        is_tight=drawn.random() < 0.25,
        is_coarse=drawn.random() < pace.coarse,
        duration_s=drawn.choice(pace.durations_s),
        gap_s=drawn.choice(pace.gaps_s),
        pace=pace,
    )


ALL_KINDS = (
    "crash", "power loss", "crash loop", "freeze node", "freeze head", "partition", "half to node",
    "half to head", "reset", "duplicate link", "deaf node", "flip", "raw flip", "truncate", "delay",
    "late OPEN", "stale OPEN", "hang", "slow engine", "lane fault", "drain", "terminate",
    "goaway race", "boot jump", "starve leases", "busy", "wrong weights", "head crash",
    "head power loss", "faulty node", "burst", "half frame", "half close",
)  # fmt: skip


def draw_joining(drawn: random.Random) -> bool:
    """Decide whether nodes dial the heads, instead of the heads the nodes."""
    return drawn.random() < 0.15


def draw_links(drawn: random.Random) -> dict[str, object]:
    """Make up how many links each node gets of a head, and how soon they are worn."""
    given: dict[str, object] = {}
    if drawn.random() < 0.2:
        given["conns"] = drawn.choice((2, 2, 3))
    if drawn.random() < 0.25:
        rekey_s, grace_ms = drawn.choice((8, 20, 45)), drawn.choice((500, 3_000, 10_000))
        given["link_limits"] = LinkLimits(rekey_s=rekey_s, rekey_grace_ms=grace_ms)
    return given


def draw_options(drawn: random.Random, pace: Pace) -> SimOptions:
    """Make up the engine of all nodes."""
    return SimOptions(
        window=1_024,
        lanes=drawn.choice((1, 2, 4)),
        blocks=drawn.choice((70, 120, 300)),
        prefill_rate=drawn.choice((200.0, 1_000.0, 4_000.0)),
        decode_rate=drawn.choice(pace.decode_rates),
        eos_probability=EOS_PROBABILITY,
    )


def draw_load(drawn: random.Random, shape: Shape, options: SimOptions) -> Load:
    """Make up what clients ask for: never more in the long run than a third of what the nodes can do."""
    calm = shape.is_calm
    prompt_max = drawn.choice((30, 150, 600))
    output_max = drawn.choice(shape.pace.outputs_max)
    service_s = prompt_max / 2 / options.prefill_rate + output_max / 3 / options.decode_rate
    live = min(shape.pace.sessions_live, shape.nodes * options.lanes / 3)
    return Load(
        gap_s=1.7 * service_s * shape.heads / live,
        prompt_max=prompt_max,
        output_max=output_max,
        poison_pct=0 if calm else drawn.choice((0, 0, 0, 8)),
        slow_pct=drawn.choice((0, 20)),
        leave_pct=drawn.choice((0, 15)),
    )
