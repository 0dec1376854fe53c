"""A head and a handful of nodes in a rig: what the demo, the scenarios and the end-to-end tests kill, freeze and bring back.

Owns how a fleet of real processes is put together on loopback and how it is asked how it stands, by its own metrics and routes.
Nodes come back where they were, so that their head finds them. It must not know what is measured.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from superfluid_head.bench.pages import page
from superfluid_head.bench.rig import Child, Rig, RigError, hostport

LINK_SECONDS = 60.0
START_AT_ONCE = 8
MOCK_FLAGS = ("--engine", "mock", "--mock-rates", "prefill=4000,decode=100", "--mock-eos", "0")


@dataclass(frozen=True, slots=True)
class Shape:
    """What differs from a plain fleet: flags of the head, of single nodes (by number), and how many heads there are."""

    head_flags: tuple[str, ...] = ()
    node_flags: tuple[tuple[str, ...], ...] = ()
    heads: int = 1

    def of_node(self, number: int) -> tuple[str, ...]:
        return self.node_flags[number] if number < len(self.node_flags) else ()


class SmallFleet:
    """Heads and their nodes in a rig, whose nodes can be killed and brought back at the same address."""

    def __init__(
        self,
        rig: Rig,
        flags: tuple[str, ...],
        model: str,
        nodes: int = 2,
        shape: Shape | None = None,
    ) -> None:
        self.rig, self.flags, self.model = rig, flags, model
        self.shape = shape or Shape()
        self.key: Path = rig.make_key()
        self.addresses: dict[str, str] = {}
        for first in range(0, nodes, START_AT_ONCE):
            numbers = range(first, min(nodes, first + START_AT_ONCE))
            started = [self._start(f"node-{n}") for n in numbers]
            rig.wait_ready(*started)
            self.addresses |= {child.name: child.listen for child in started}
        self.heads: list[Child] = [self.start_head() for _ in range(self.shape.heads)]
        for head in self.heads:
            rig.wait_ready(head)
        self.wait_linked()
        self.served = self.served_name()

    @property
    def head(self) -> Child:
        return self.heads[0]

    @property
    def url(self) -> str:
        return self.head.url

    def start_head(self, http: str = "127.0.0.1:0") -> Child:
        """Start one more head of the same nodes; does not wait."""
        nodes = self.link_addresses()
        return self.rig.start_head(
            self.model, *self.shape.head_flags, nodes=nodes, key=self.key, http=http
        )

    def link_addresses(self) -> list[str]:
        """Where heads find the nodes."""
        return list(self.addresses.values())

    def served_name(self) -> str:
        listed = page(f"{self.url}/v1/models").json()
        return str(listed["data"][0]["id"])

    def wait_linked(self) -> None:
        for head in self.heads:
            if head.is_running:
                wait_linked(self.rig, head, len(self.addresses))

    def serving(self) -> Child:
        """Find the node that has a session in a lane, by its own metrics. Raises RigError when none has."""
        for name in self.addresses:
            child = self.rig.named(name)
            if child.is_running and busy_lanes(child) > 0:
                return child
        raise RigError("no node is serving")

    def node(self, name: str) -> Child:
        return self.rig.named(name)

    def restart(self, name: str) -> None:
        """Bring a killed node back where it was."""
        self.rig.wait_ready(self.begin_restart(name))
        self.wait_linked()

    def begin_restart(self, name: str) -> Child:
        """As `restart`, without waiting."""
        return self._start(name, self.addresses[name])

    def _start(self, name: str, listen: str = "") -> Child:
        number = int(name.rpartition("-")[2])
        flags = (*self.flags, *self.shape.of_node(number))
        return self.rig.start_node(name, *flags, key=self.key, listen=listen)


def metric(url: str, name: str) -> list[float]:
    """Read the values of one metric from a Prometheus page, over all its labels; empty when nobody answers."""
    try:
        text = page(f"{url}/metrics").text
    except httpx.HTTPError:
        return []
    lines = (line for line in text.splitlines() if line.startswith((name + "{", name + " ")))
    return [float(line.rsplit(" ", 1)[1]) for line in lines]


def wait_linked(rig: Rig, head: Child, count: int) -> None:
    """Wait until the head has a usable link with `count` nodes, by its own metrics. Raises RigError."""
    deadline_ms = rig.now_ms() + LINK_SECONDS * 1000
    while sum(metric(head.url, "superfluid_head_node_up")) < count:
        if rig.now_ms() > deadline_ms:
            raise RigError(f"the head does not reach {count} node(s):\n{head.log_end()}")
        rig.sleep(0.05)


def busy_lanes(node: Child) -> float:
    """How many lanes of a node hold a session."""
    url = "http://" + hostport(node.ready["metrics"])
    states = ("prefilling", "decoding")
    return sum(sum(metric(url, f'superfluid_lanes{{state="{state}"}}')) for state in states)


def ask_json(url: str, api_key: str | None = None) -> Any:
    """Read one of the routes that tell how a server stands. Raises RigError when it has none."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        reply = page(url, 20, headers)
        reply.raise_for_status()
        return reply.json()
    except (httpx.HTTPError, ValueError) as error:
        raise RigError(f"{url}: {error}") from None


def real_flags(nodes: int, engine: str = "native", dtype: str = "auto") -> tuple[str, ...]:
    """Choose a real engine, the machine's cores shared fairly by the nodes on it; MLX takes what threads it likes."""
    threads = max(1, (os.cpu_count() or 1) // nodes)
    shared = () if engine == "mlx" else ("--threads", str(threads))
    return ("--engine", engine, *shared, "--dtype", dtype)
