"""A node as a virtual process: the real server's serving part, on the virtual network, restartable.

The process is what crashes and comes back under another boot id; `SimNode` is the machine that it runs on. What is patched for
the time of a run, and why, is all in `installed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import superfluid_core.link.dial as dial_module
import superfluid_core.link.listen as listen_module
import superfluid_noded.joiner as joiner_module
import superfluid_noded.node as node_module
import superfluid_noded.prefix_reports as prefix_reports
import superfluid_noded.server as server_module
from superfluid_core.engine.sim import SimOptions
from superfluid_core.errors import EngineError
from superfluid_head.fleet.nodestate import JOINED
from superfluid_noded.build import Built, Model
from superfluid_noded.config import NodeConfig, Surroundings, build_config, read_settings
from superfluid_noded.node import Node
from superfluid_noded.server import NodeServer
from tests.sim.engine import Ills, VirtualEngine, VirtualEngineLoop
from tests.sim.loop import sleep
from tests.sim.network import Network, Port, SocketModule
from tests.sim.world import Process, World

MODEL = "m"
PORT = 8454
DRAIN_GRACE_MS = 4_000


class _Secrets:
    """Boot ids by count: the same on every run."""

    def __init__(self) -> None:
        self._count = 0

    def token_hex(self, size: int) -> str:
        self._count += 1
        return f"{self._count:0{2 * size}x}"


class _Drawn:
    """Pauses of nodes that dial, by count: the same on every run."""

    def __init__(self) -> None:
        self._count = 0

    def SystemRandom(self) -> random.Random:  # noqa: N802 - the name in the module that it stands for
        self._count += 1
        return random.Random(self._count)


class _Collector:
    """Nothing: this process has one garbage collector, which all virtual nodes share and the run owns."""

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        del is_idle

    def begin(self) -> None:
        """Leave it as the run set it."""

    async def run(self) -> None:
        """Be over at once."""


@contextlib.contextmanager
def patched(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes for a while."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            before = owner.__dict__[name]
            setattr(owner, name, value)
            stack.callback(setattr, owner, name, before)
        yield


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Put the virtual network, the threadless engine loop and counted boot ids in place."""
    sockets = SocketModule()
    with patched(
        (dial_module, "socket", sockets),
        (listen_module, "socket", sockets),
        (node_module, "EngineLoop", VirtualEngineLoop),
        (node_module, "secrets", _Secrets()),
        (joiner_module, "random", _Drawn()),
        (server_module, "Collector", _Collector),
        (asyncio, "sleep", sleep),
        (
            prefix_reports,
            "TURNS",
            1,
        ),  # it looks a hundred times a second: most of an idle hour's cost
    ):
        yield


def node_config(identity: str, host: str, flags: dict[str, Any]) -> NodeConfig:
    given = {
        "model": MODEL, "engine": "mock", "identity": identity, "listen": (f"{host}:{PORT}",),
        "metrics": "off", "insecure_no_auth": True,
    } | flags  # fmt: skip
    return build_config(read_settings(given, None), Surroundings(None, None, None, None))


class _Server(NodeServer):
    """A NodeServer that remembers its node, and whose engine is here already."""

    node: Node | None = None

    async def _listen(self, node: Node) -> list[tuple[str, int]]:
        self.node = node
        return await super()._listen(node)


class SimNode:
    """One machine of the fleet and the process on it, if any. `options` may change between starts."""

    def __init__(
        self, world: World, network: Network, number: int, options: SimOptions, config: NodeConfig
    ) -> None:
        self.world = world
        self.network = network
        self.identity = config.identity
        self.host = config.listen[0][0]
        self.number = number
        self.options = self.right_options = options
        self.config = config
        self.drift_ppm = 0
        self.boot_offset_ns = 0
        self.starts = 0
        self.deaths = 0
        self.process: Process | None = None
        self.ills = Ills()
        self.is_leaving = False
        self.on_death: Callable[[SimNode, tuple[int, ...]], None] = lambda _node, _prompt: None
        self.faulty = ""
        self.is_resting = False
        self.terminated_ns: int | None = None
        self.farewell_ns: int | None = None
        self._server: _Server | None = None

    @property
    def is_joining(self) -> bool:
        """Whether it dials the heads."""
        return bool(self.config.join)

    @property
    def key(self) -> str:
        """Its name in a head's books."""
        return JOINED + self.identity if self.is_joining else self.identity

    @property
    def is_up(self) -> bool:
        return self.process is not None and not self.process.is_dead and not self.process.is_over

    @property
    def node(self) -> Node | None:
        return None if self._server is None or not self.is_up else self._server.node

    def start(self) -> None:
        if self.process is not None and not self.process.is_dead:
            self.crash()
        self.network.dark.pop(self.host, None)
        self.starts += 1
        self.is_leaving = False
        self.terminated_ns = None
        self.ills = Ills(
            dies_of_poison=self.ills.dies_of_poison,
            on_death=lambda prompt: self.on_death(self, prompt),
        )
        process = Process(
            self.world, self.identity, drift_ppm=self.drift_ppm, net=Port(self.network, self.host)
        )
        process.boot_offset_ns = self.boot_offset_ns
        self.process = process
        engine = VirtualEngine(process, self.options, self.ills)
        built = Built(engine, engine.describe(), {})
        model = Model(None, (MODEL,), self.options.window, self.options.lanes)  # type: ignore[arg-type]
        server = _Server(self.config, (model,), None, process, lambda _line: None)
        self._server = server
        process.signals[signal.SIGTERM] = server._on_signal

        async def main() -> None:
            await server._serve((built,), None)

        process.start(main())

    def crash(self, *, power: bool = False) -> None:
        process = self.process
        if process is None or process.is_dead:
            return
        self.deaths += 1
        if power:
            self.network.dark[self.host] = None
        self.network.kill(process, power=power)

    def terminate(self) -> None:
        """SIGTERM: drain, then end."""
        if self.is_up and self.process is not None:
            self.is_leaving = True
            self.terminated_ns = self.farewell_ns = self.world.now_ns
            self.process.call(self.process.signals[signal.SIGTERM])

    def reap(self) -> bool:
        """Notice a process that ended by itself; True if it did. Raises what it should not have died of."""
        process = self.process
        if process is None or process.is_dead or not process.is_over:
            return False
        failure = process.failure
        self.deaths += not self.is_leaving
        self.network.kill(process)
        if failure is not None and not _is_expected(failure):
            self.world.complain(f"{self.identity} ended with {failure!r}")
        return True


def _is_expected(failure: BaseException) -> bool:
    if isinstance(failure, BaseExceptionGroup):
        return all(_is_expected(each) for each in failure.exceptions)
    return isinstance(failure, EngineError)
