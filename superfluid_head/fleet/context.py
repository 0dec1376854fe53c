"""How a head runs its fleet, what its nodes share, and what a node remembers of its troubles."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from superfluid_core.clock import MS, Clock
from superfluid_core.limits import FleetLimits, LinkLimits
from superfluid_core.link.tls import Credentials
from superfluid_core.placement.policies import Policy
from superfluid_head.fleet.directory import NodeAddress
from superfluid_head.fleet.observer import FleetObserver, Unobserved

# One failed dial may have any cause; a process that is gone fails twice.
SILENT_DIALS_MAX = 2
COMPLAINT_MS = 60_000


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """How this head runs its fleet. `texts` maps models to the text fingerprint that nodes must offer.

    `listen` says where nodes may dial in, `conns` how many links each node gets.
    """

    nodes: tuple[NodeAddress, ...]
    head: str
    keys: Credentials | None
    policy: Policy = Policy.LOAD_AWARE
    allow_mixed: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)
    link_limits: LinkLimits = field(default_factory=LinkLimits)
    fleet_limits: FleetLimits = field(default_factory=FleetLimits)
    listen: tuple[tuple[str, int], ...] = ()
    conns: int = 1
    observer: FleetObserver = field(default_factory=Unobserved)


@dataclass(frozen=True, slots=True)
class NodeContext:
    """What every node of a fleet shares."""

    keys: Credentials | None
    head: str
    clock: Clock
    link_limits: LinkLimits
    fleet_limits: FleetLimits
    random: random.Random
    conns: int = 1
    links: Iterator[int] = field(default_factory=lambda: itertools.count(1))


@dataclass(slots=True)
class Trouble:
    """The last complaint about a node, when it was last told, and whose process is in doubt after a cut."""

    text: str = ""
    told_ns: int = 0
    failures: int = 0
    boot_in_doubt: str | None = None
    silent_dials: int = 0
    located: asyncio.Event = field(default_factory=asyncio.Event)
    wanted: asyncio.Event = field(default_factory=asyncio.Event)

    def is_news(self, text: str, now_ns: int) -> bool:
        """Take a complaint; says whether to log it: once, then again only when it changes or after a minute."""
        if text == self.text and now_ns - self.told_ns < COMPLAINT_MS * MS:
            return False
        self.text, self.told_ns = text, now_ns
        return True

    def doubt(self, boot: str) -> None:
        """Note that a link to this process was cut: it may be gone."""
        self.boot_in_doubt = boot
        self.silent_dials = 0

    def settle(self, boot: str | None) -> tuple[str, bool] | None:
        """Judge the doubt by who answers now, if anybody: the process in question and whether it is gone."""
        doubted = self.boot_in_doubt
        if doubted is None:
            return None
        self.silent_dials += 1
        if boot is None and self.silent_dials < SILENT_DIALS_MAX:
            return None
        self.boot_in_doubt = None
        return doubted, boot != doubted
