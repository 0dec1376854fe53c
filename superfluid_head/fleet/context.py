"""How a head runs its fleet, what its nodes share, and what a node remembers of its troubles. Values and state, no rules."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from superfluid_core.clock import Clock
from superfluid_core.limits import FleetLimits, LinkLimits
from superfluid_core.link.tls import FleetKeys
from superfluid_core.placement.policies import Policy
from superfluid_head.fleet.directory import NodeAddress


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """How this head runs its fleet. `texts` maps models to the text fingerprint that nodes must offer."""

    nodes: tuple[NodeAddress, ...]
    head: str
    keys: FleetKeys | None
    policy: Policy = Policy.LOAD_AWARE
    allow_mixed: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)
    link_limits: LinkLimits = field(default_factory=LinkLimits)
    fleet_limits: FleetLimits = field(default_factory=FleetLimits)


@dataclass(frozen=True, slots=True)
class NodeContext:
    """What every node of a fleet shares."""

    keys: FleetKeys | None
    head: str
    clock: Clock
    link_limits: LinkLimits
    fleet_limits: FleetLimits
    random: random.Random
    links: Iterator[int] = field(default_factory=lambda: itertools.count(1))


@dataclass(slots=True)
class Trouble:
    """The last complaint about this node, and when it was last told."""

    text: str = ""
    told_ns: int = 0
    failures: int = 0
    boot_in_doubt: str | None = None
    silent_dials: int = 0
    located: asyncio.Event = field(default_factory=asyncio.Event)
