"""One node from start to end: load, listen, serve, drain, stop.

Owner of every task of the process. The engine is loaded in a thread so that signals and the supervisor are heard meanwhile.
SIGTERM drains: nothing new, running sessions may finish within the grace, then links close. A second one ends the grace.
If the engine breaks, everything ends with EngineError: heads see the links go and move their sessions elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from superfluid_core.clock import MS, SECOND, Clock
from superfluid_core.engine.loop import EngineLoop
from superfluid_core.errors import EngineError, SuperfluidError
from superfluid_core.limits import LinkLimits
from superfluid_core.link.addresses import format_address
from superfluid_core.link.keys import FleetKeys
from superfluid_core.link.listen import Listener
from superfluid_core.logs import log
from superfluid_core.notify import READY, STOPPING, WATCHDOG, notify, status, watchdog_interval_ms
from superfluid_core.scheduler.plan import StepDone, TickDone, TickPlan
from superfluid_noded.agent import Agent
from superfluid_noded.answers import NodeCard
from superfluid_noded.build import Built, Model, build_engine, build_scheduler
from superfluid_noded.config import NodeConfig
from superfluid_noded.loading import Loading, watch_stdin
from superfluid_noded.metrics import NodeMetrics, figures
from superfluid_noded.service import Service
from superfluid_noded.teller import Teller
from superfluid_noded.web import Web, bind, build_app

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
LOADING_LOG_MS = 5_000
LOADING_POLL_S = 0.1
DRAIN_POLL_S = 0.02
HUNG_FACTOR = 4


class LoadError(SuperfluidError):
    """Raised when the engine could not be made from what was asked and found (exit 3)."""


class _Watches:
    """Shows the engine loop's doings to the teller (waits end) and to the metrics."""

    def __init__(self, teller: Teller, metrics: NodeMetrics) -> None:
        self._teller = teller
        self._metrics = metrics

    def planned(self, plan: TickPlan, elapsed_ns: int) -> None:
        self._teller.planned(plan)
        self._metrics.planned(plan, elapsed_ns)

    def stepped(self, done: StepDone) -> None:
        self._metrics.stepped(done)

    def ticked(self, done: TickDone) -> None:
        self._metrics.ticked(done)


class Node:
    """The parts of a running node, joined. Needs a running event loop; binds nothing yet."""

    def __init__(
        self, config: NodeConfig, names: tuple[str, ...], built: Built, keys: FleetKeys | None, clock: Clock
    ) -> None:  # fmt: skip
        info = built.info
        limits = replace(
            LinkLimits(), handshake_ms=config.handshake_ms, idle_timeout_ms=config.idle_timeout_ms
        )
        card = NodeCard(config.identity, secrets.token_hex(8), names, info, built.text_files)
        self.facts = {
            "identity": card.identity,
            "boot": card.boot,
            "model": names[0],
            "engine": info.engine_build,
            "device": info.device,
            "dtype": info.dtype,
            "weights": info.weights_fingerprint,
            "window": str(info.window),
        }
        salt = b"" if keys is None else keys.prefix_salt
        self.clock = clock
        self.limits = limits
        self.scheduler = build_scheduler(config, info, salt)
        self.metrics = NodeMetrics(self.scheduler.stats, self.facts, info.block_tokens)
        self.agent = Agent(card, clock, self.metrics, self._submit, limits)
        self.teller = Teller(self.agent, clock, self.metrics, limits)
        self.loop = EngineLoop(
            self.scheduler,
            built.engine,
            clock,
            self.teller.tell,
            _Watches(self.teller, self.metrics),
        )
        self.service = Service(
            self.agent, self.teller, self.scheduler, self.loop, clock, self.figures
        )
        self.listener = Listener(
            self.service.handle,
            self.agent.welcome,
            keys,
            config.identity,
            limits,
            clock,
            self.service.status,
        )

    def _submit(self, *inputs: Any) -> None:
        self.loop.submit(*inputs)

    def figures(self) -> dict[str, Any]:
        """Give the scheduler's stats and the node's facts as JSON knows them."""
        return figures(self.scheduler.stats(), {**self.facts, "steps": self.loop.steps})

    @property
    def is_hung(self) -> bool:
        """A step takes far longer than predicted (decisions 8)."""
        if not self.loop.is_busy:
            return False
        patience_ns = max(
            self.limits.engine_hung_ms * MS, HUNG_FACTOR * self.loop.predicted_step_ms() * MS
        )
        return self.clock.now_ns() - self.loop.step_started_ns > patience_ns

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Say whether the node would serve, and what it does."""
        is_well = not self.is_hung and not self.agent.is_draining
        details = {
            "status": "ok" if is_well else "draining" if self.agent.is_draining else "engine hung",
            "identity": self.facts["identity"],
            "sessions": len(self.agent.roster.live),
            "links": len(self.agent.roster.heads),
            "steps": self.loop.steps,
        }
        return is_well, details


class NodeServer:
    """Runs a node in this process. `say` prints a line for the person who started it."""

    def __init__(
        self, config: NodeConfig, model: Model, keys: FleetKeys | None, clock: Clock, say: Callable[[str], None]
    ) -> None:  # fmt: skip
        self._config = config
        self._model = model
        self._keys = keys
        self._clock = clock
        self._say = say
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()

    async def run(self) -> None:
        """Serve until a signal. Raises LoadError, EngineError, or SuperfluidError for an address in use."""
        loop = asyncio.get_running_loop()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        if self._config.exit_with_parent:
            watch_stdin(self._on_orphaned)
        try:
            self._notify(status(f"loading {self._config.model}"))
            built = await self._load()
            if built is not None:
                await self._serve(built)
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            if self._config.ready_file is not None:
                self._config.ready_file.unlink(missing_ok=True)

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._forced.set()
        self._stopping.set()

    def _on_orphaned(self) -> None:
        """Stop without grace: the head that started this node is gone, nobody reads the sessions."""
        log(logger, "warning", "stdin closed: the parent process is gone")
        self._stopping.set()
        self._forced.set()

    def _notify(self, *states: str) -> None:
        notify("\n".join(states), self._config.around.notify_socket)

    # --- start ------------------------------------------------------------------------------------

    async def _load(self) -> Built | None:
        """Make the engine in a thread; None when a signal came first."""
        began_ns = said_ns = self._clock.now_ns()
        loading = Loading(lambda: build_engine(self._config, self._model, self._clock))
        while not await loading.wait(LOADING_POLL_S):
            if self._stopping.is_set():
                return None
            now_ns = self._clock.now_ns()
            if now_ns - said_ns >= LOADING_LOG_MS * MS:
                said_ns = now_ns
                seconds = (now_ns - began_ns) // SECOND
                log(logger, "info", "loading the model", model=self._config.model, seconds=seconds)
        try:
            return loading.result()
        except EngineError as error:
            raise LoadError(error.message, code=error.code) from error

    async def _serve(self, built: Built) -> None:
        node = Node(self._config, self._model.names, built, self._keys, self._clock)
        try:
            listening = await self._listen(node)
            web, web_at = self._bind_web(node)
        except SuperfluidError:
            await node.listener.close()
            built.engine.close()
            raise
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(node.loop.run()),
                group.create_task(node.service.tell_status()),
                group.create_task(node.service.keep_time()),
                group.create_task(self._feed_watchdog(node)),
            ]
            listener = group.create_task(node.listener.serve())
            if web is not None:
                group.create_task(web.run())
            self._announce(node, listening, web_at)
            await self._stopping.wait()
            self._notify(STOPPING, status("draining"))
            await self._drain(node)
            await node.listener.close("the node stops")
            await asyncio.wait({listener})
            if web is not None:
                web.stop()
            for task in tasks:
                task.cancel()

    async def _listen(self, node: Node) -> list[tuple[str, int]]:
        bound: list[tuple[str, int]] = []
        for host, port in self._config.listen:
            try:
                bound += await node.listener.start(host, port)
            except OSError as error:
                where = format_address(host, port)
                raise SuperfluidError(f"cannot listen on {where}: {error.strerror}") from None
        return bound

    def _bind_web(self, node: Node) -> tuple[Web | None, tuple[str, int] | None]:
        if self._config.metrics is None:
            return None, None
        host, port = self._config.metrics
        try:
            bound = bind(host, port)
        except OSError as error:
            where = format_address(host, port)
            text = f"cannot serve metrics on {where}: {error.strerror} (--metrics moves them)"
            raise SuperfluidError(text) from None
        app = build_app(node.metrics.expose, node.figures, node.health, self._config.metrics_token)
        return Web(app, bound), (host, int(bound.getsockname()[1]))

    def _announce(
        self, node: Node, listening: list[tuple[str, int]], web_at: tuple[str, int] | None
    ) -> None:
        info = node.agent.card.info
        names = ", ".join(self._model.names)
        self._say(
            f"superfluid-noded: {names} on {info.engine_build} ({info.device}, {info.dtype}): "
            f"context window {info.window} tokens, {info.lanes} lanes, "
            f"{info.blocks} KV blocks of {info.block_tokens}"
        )
        where = ", ".join(format_address(host, port) for host, port in listening)
        guard = "no key" if self._keys is None else f"key {self._keys.key_id}"
        metrics = "off" if web_at is None else f"http://{format_address(*web_at)}/metrics"
        self._say(
            f"superfluid-noded: listening on {where} as {self._config.identity} ({guard}); "
            f"metrics {metrics}"
        )
        if self._config.ready_file is not None:
            facts = {
                "pid": os.getpid(),
                "listen": [list(address) for address in listening],
                "metrics": None if web_at is None else list(web_at),
                "models": list(self._model.names),
            }
            _write_whole(self._config.ready_file, json.dumps(facts) + "\n")
        self._notify(READY, status(f"serving {names} on {where}"))

    # --- run and end ------------------------------------------------------------------------------

    async def _drain(self, node: Node) -> None:
        """Let what runs finish within the grace, then end it."""
        agent = node.agent
        running = len(agent.roster.live)
        log(logger, "info", "draining", sessions=running, grace_ms=self._config.drain_grace_ms)
        agent.drain(self._config.drain_grace_ms, leaving=True)
        while agent.roster.live and not self._forced.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_POLL_S):
                    await self._forced.wait()
        agent.drain(0)
        agent.end_drained()

    async def _feed_watchdog(self, node: Node) -> None:
        """Tell the supervisor that we live: idle, or with a step counter that moves."""
        around = self._config.around
        interval_ms = watchdog_interval_ms(around.watchdog_usec, around.watchdog_pid, os.getpid())
        if interval_ms is None:
            return
        steps_fed = -1
        while True:
            if not node.loop.is_busy or node.loop.steps != steps_fed:
                steps_fed = node.loop.steps
                self._notify(WATCHDOG)
            await asyncio.sleep(interval_ms / 1e3)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Pick what a person should read: an expected error before any other."""
    expected = group.subgroup(SuperfluidError)
    found: BaseException = expected if expected is not None else group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def _write_whole(path: Path, text: str) -> None:
    """Write a file so that nobody reads half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)
