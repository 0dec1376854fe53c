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
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from superfluid_core.clock import MS, SECOND, Clock
from superfluid_core.collector import Collector
from superfluid_core.errors import EngineError, SuperfluidError
from superfluid_core.link.addresses import format_address
from superfluid_core.link.tls import Credentials
from superfluid_core.logs import LoopErrors, log
from superfluid_core.progress import Meter
from superfluid_noded.build import Built, Model, build_engines
from superfluid_noded.config import NodeConfig
from superfluid_noded.loading import Loading, watch_stdin
from superfluid_noded.node import Node
from superfluid_noded.recording import Recordings
from superfluid_noded.supervisor import Supervisor
from superfluid_noded.web import Web, bind, build_app

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
LOADING_LOG_MS = 5_000
LOADING_POLL_S = 0.1
DRAIN_POLL_S = 0.02


class LoadError(SuperfluidError):
    """Raised when the engine could not be made from what was asked and found (exit 3)."""


class NodeServer:
    """Runs a node in this process. `say` prints a line for the person who started it."""

    def __init__(
        self,
        config: NodeConfig,
        models: tuple[Model, ...],
        keys: Credentials | None,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._models = models
        self._keys = keys
        self._clock = clock
        self._say = say
        self._supervisor = Supervisor(config.around, clock)
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()

    async def run(self) -> None:
        """Serve until a signal. Raises LoadError, EngineError, or SuperfluidError for an address in use."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors())
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        if self._config.exit_with_parent:
            watch_stdin(self._on_orphaned)
        record = self._record()
        try:
            built = await self._load()
            if built is not None:
                await self._serve(built, record)
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            if self._config.ready_file is not None:
                self._config.ready_file.unlink(missing_ok=True)
            if record is not None:
                record.close()

    def _record(self) -> Recordings | None:
        path = self._config.record
        if path is None:
            return None
        return Recordings(path, len(self._models), has_content=self._config.record_content)

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._forced.set()
        self._stopping.set()

    def _on_orphaned(self) -> None:
        """Stop without grace: the head that started this node is gone, nobody reads the sessions."""
        log(logger, "warning", "stdin closed: the parent process is gone")
        self._stopping.set()
        self._forced.set()

    # --- start ------------------------------------------------------------------------------------

    async def _load(self) -> tuple[Built, ...] | None:
        """Make the engines in a thread; None when a signal came first."""
        began_ns = said_ns = self._clock.now_ns()
        self._supervisor.loading(self._config.model)
        loading = Loading(lambda: build_engines(self._config, self._models, self._clock))
        with Meter(f"loading {self._config.model}"):
            while not await loading.wait(LOADING_POLL_S):
                if self._stopping.is_set():
                    return None
                now_ns = self._clock.now_ns()
                if now_ns - said_ns >= LOADING_LOG_MS * MS:
                    said_ns = now_ns
                    seconds = (now_ns - began_ns) // SECOND
                    self._supervisor.loading(self._config.model)
                    shown = {"model": self._config.model, "seconds": seconds}
                    log(logger, "info", "loading the model", **shown)
        try:
            return loading.result()
        except EngineError as error:
            raise LoadError(error.message, code=error.code) from error

    async def _serve(self, built: tuple[Built, ...], record: Recordings | None) -> None:
        named = [(model.names, each) for model, each in zip(self._models, built, strict=True)]
        node = Node(self._config, named, self._keys, self._clock, record)
        try:
            listening = await self._listen(node)
            web, web_at = self._bind_web(node)
        except SuperfluidError:
            await node.listener.close()
            for each in built:
                each.engine.close()
            raise
        collector = Collector(lambda: not node.agent.roster.live)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(loop.run()) for loop in node.loops]
            tasks += [
                group.create_task(collector.run()),
                group.create_task(node.service.tell_status()),
                group.create_task(node.service.keep_time()),
                group.create_task(node.prefixes.tell()),
                group.create_task(
                    self._supervisor.feed(lambda: node.is_hung, lambda: len(node.agent.roster.live))
                ),
            ]
            if node.pressure is not None:
                tasks.append(group.create_task(node.pressure.run()))
            listener = group.create_task(node.listener.serve())
            joining = group.create_task(node.joiner.run())
            if web is not None:
                group.create_task(web.run())
            self._announce(node, listening, web_at)
            collector.begin()
            await self._stopping.wait()
            await self._drain(node)
            await node.joiner.close("the node stops")
            joining.cancel()
            await node.listener.close("the node stops")
            await asyncio.wait({listener, joining})
            if web is not None:
                web.stop()
            for task in tasks:
                task.cancel()
        await node.traces.close()

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
        for card in node.agent.card.models:
            info = card.info
            self._say(
                f"superfluid-noded: {', '.join(card.names)} on {info.engine_build} "
                f"({info.device}, {info.dtype}): "
                f"context window {info.window} tokens, {info.lanes} lanes, "
                f"{info.blocks} KV blocks of {info.block_tokens}"
            )
        names = [name for card in node.agent.card.models for name in card.names]
        where = ", ".join(format_address(host, port) for host, port in listening) or "no address"
        guard = "no key" if self._keys is None else f"key {self._keys.key_id}"
        metrics = "off" if web_at is None else f"http://{format_address(*web_at)}/metrics"
        self._say(
            f"superfluid-noded: listening on {where} as {self._config.identity} ({guard}); "
            f"metrics {metrics}"
        )
        for host, port in self._config.join:
            self._say(f"superfluid-noded: joining {format_address(host, port)}")
        if self._config.ready_file is not None:
            facts = {
                "pid": os.getpid(),
                "listen": [list(address) for address in listening],
                "metrics": None if web_at is None else list(web_at),
                "models": names,
            }
            _write_whole(self._config.ready_file, json.dumps(facts) + "\n")
        self._supervisor.ready(", ".join(names), where)

    # --- run and end ------------------------------------------------------------------------------

    async def _drain(self, node: Node) -> None:
        """Let what runs finish within the grace, then end it."""
        agent = node.agent
        running = len(agent.roster.live)
        self._supervisor.draining(running, self._config.drain_grace_ms)
        log(logger, "info", "draining", sessions=running, grace_ms=self._config.drain_grace_ms)
        agent.drain(self._config.drain_grace_ms, leaving=True)
        while agent.roster.live and not self._forced.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_POLL_S):
                    await self._forced.wait()
        agent.drain(0)
        agent.end_drained()


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
