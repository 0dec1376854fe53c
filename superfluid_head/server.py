"""Runs one head: sockets, fleet, HTTP, signals; the owner of every task of the process.

Order matters: what can fail at once fails first (sockets, keys, model files), then the fleet is dialled, then HTTP
serves. SIGTERM: `/readyz` is 503 at once, new generations are refused, running ones finish up to the drain limit, the
rest end with an error, exit 0. A second signal cuts at once. SIGHUP is `reload.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from superfluid_core.clock import MS, SECOND, Clock
from superfluid_core.collector import Collector
from superfluid_core.errors import ConfigError, SuperfluidError
from superfluid_core.limits import LinkLimits
from superfluid_core.link.addresses import format_address, judge_bind
from superfluid_core.link.causes import why_unresolved
from superfluid_core.link.keys import load_keys
from superfluid_core.link.pki import identity_in
from superfluid_core.link.tls import Credentials, client_context
from superfluid_core.logs import LoopErrors, log
from superfluid_core.placement.policies import Policy
from superfluid_core.tracing.options import open_tracer
from superfluid_core.wire.schema import Role
from superfluid_head.access.addresses import Connections, Proxies
from superfluid_head.api.inflight import Inflight
from superfluid_head.api.qos import QosDesk
from superfluid_head.api.state import Head
from superfluid_head.app import build_app
from superfluid_head.config import HeadConfig, read_keys, version
from superfluid_head.fleet.fleet import Fleet, FleetOptions
from superfluid_head.fleet.local import LOCAL_KEY, LocalNode
from superfluid_head.fleet.observer import FleetObserver
from superfluid_head.http_server import HttpServer, http_server
from superfluid_head.listeners import bound, judge_exposure, loopback_ports, open_sockets
from superfluid_head.metrics import HeadMetrics
from superfluid_head.ready import write_ready
from superfluid_head.reload import Reloader, Reread
from superfluid_head.supervisor import Supervisor
from superfluid_head.text.catalog import TextCatalog
from superfluid_head.text.chat import TextWorkers
from superfluid_head.workers.board import Board
from superfluid_head.workers.place import Place

__all__ = ["http_server", "open_sockets", "run_head"]

CUT_GRACE_MS = 2_000
LAG_MS = 500
REACH_MS = 10_000
SWITCH_INTERVAL_S = 0.001
"""How long a thread that reads a large body keeps the event loop waiting for its turn."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a running head is made of."""

    fleet: Fleet
    texts: TextCatalog
    head: Head
    server: HttpServer
    supervisor: Supervisor


async def run_head(config: HeadConfig, clock: Clock, worker: Place | None = None) -> None:
    """Serve until told to stop, as one of several workers or alone. Raises SuperfluidError when it cannot."""
    asyncio.get_running_loop().set_exception_handler(LoopErrors())
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sockets = open_sockets(config.http, is_shared=worker is not None)
    try:
        sockets += [] if worker is None else [worker.open_door()]
        await _run(config, clock, sockets, worker)
    except BaseExceptionGroup as failures:
        found, _ = failures.split(SuperfluidError)
        if found is None:
            raise
        raise _leaf(found) from None
    finally:
        for one in sockets:
            one.close()


def _leaf(failures: BaseExceptionGroup[SuperfluidError]) -> BaseException:
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


async def _run(
    config: HeadConfig, clock: Clock, sockets: list[socket.socket], worker: Place | None
) -> None:
    places = bound(sockets)
    is_open = judge_exposure(
        places, has_key=not config.keys.is_empty, insecure=config.insecure_no_auth
    )
    certificate = config.access.certificate
    tls = None if certificate is None else certificate.context()
    workers = TextWorkers(config.limits)
    _judge_fleet_listen(config)
    local = None if config.has_fleet else _local_node(config, clock)
    place = None if local is None else _LocalPlace(local)
    supervisor = Supervisor(config.around)
    facts = {"service.name": "superfluid-head", "service.version": version()}
    tracer = open_tracer(config.traces, facts, clock)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(supervisor.load())]
            tasks += [] if local is None else [group.create_task(local.run())]
            texts = TextCatalog(workers, config.dialects)
            await asyncio.to_thread(_load_texts, config, texts)
            metrics = HeadMetrics()
            fleet = _fleet(config, clock, texts, local, metrics)
            joining = await fleet.listen()
            if place is not None:
                place.attach(fleet)
            warnings = _warnings(config, is_open=is_open)
            head = replace(
                _head(config, clock, fleet, texts, metrics),
                warnings=warnings,
                tracer=tracer,
                worker_ends=Board().ends if worker is None else worker.board.ends,
            )
            counted = Connections(config.access.conns_per_address, Proxies(config.access.proxies))
            reached = None if worker is None else partial(fleet.wait_ready, REACH_MS / 1000)
            server = http_server(
                build_app(head, loopback_ports(places), worker),
                config.limits,
                counted,
                tls,
                reached,
            )
            parts = _Parts(fleet, texts, head, server, supervisor)
            collector = Collector(lambda: head.inflight.count == 0)
            reloader = Reloader(config, fleet, _rereads(config, tls))
            tasks += [
                group.create_task(_become_ready(config, place, places, joining, parts)),
                group.create_task(fleet.run()),
                group.create_task(reloader.run()),
                group.create_task(texts.follow(fleet)),
                group.create_task(_watch_lag(head.metrics, clock)),
                group.create_task(collector.run()),
                group.create_task(_announce(fleet)),
                group.create_task(_repeat_warnings(warnings)),
                group.create_task(supervisor.feed(fleet, lambda: head.inflight.count)),
                group.create_task(_stop_on_signal(parts, config)),
            ]
            _say_places(places, joining, "http" if tls is None else "https")
            collector.begin()
            await server.serve(sockets=sockets)
            for task in tasks:
                task.cancel()
    finally:
        workers.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


def _load_texts(config: HeadConfig, texts: TextCatalog) -> None:
    name = config.model_name
    for spec in config.models:
        texts.load(spec, name, offline=config.offline, token=config.around.hub_token)


def _local_node(config: HeadConfig, clock: Clock) -> LocalNode:
    arguments = ["--model", config.models[0]]
    if config.model_name:
        arguments += ["--model-name", config.model_name]
    if config.offline:
        arguments.append("--offline")
    arguments += ["--log-format", config.log_format, "--log-level", config.log_level]
    if config.traces is not None:
        arguments += ["--otlp-endpoint", config.traces.endpoint]
    return LocalNode([*arguments, *config.node_arguments], clock)


def _fleet(
    config: HeadConfig,
    clock: Clock,
    texts: TextCatalog,
    local: LocalNode | None,
    observer: FleetObserver,
) -> Fleet:
    nodes = config.fleet if local is None else (local.address,)
    keys = _fleet_keys(config) if local is None else local.keys
    options = FleetOptions(
        nodes=nodes,
        head=_head_name(config),
        keys=keys,
        policy=Policy(config.placement),
        allow_mixed=config.allow_mixed,
        texts={text.name: text.fingerprint for text in texts},
        link_limits=replace(LinkLimits(), dead_ms=config.fleet_dead_ms),
        fleet_limits=config.fleet_limits,
        listen=config.fleet_listen,
        conns=config.fleet_conns,
        observer=observer,
    )
    if keys is not None:
        client_context(keys, options.head)  # what is wrong with files of an own authority, at once
    return Fleet(options, clock)


def _head_name(config: HeadConfig) -> str:
    """Name this head: as its certificate does, else host and chance."""
    if config.pki is not None:
        return identity_in(config.pki, Role.HEAD)
    return f"{socket.gethostname().split('.')[0][:40] or 'head'}-{os.urandom(4).hex()}"


def _judge_fleet_listen(config: HeadConfig) -> None:
    """Resolve where nodes may dial in, and refuse an open door (fleet.md 2). Raises ConfigError."""
    for host, port in config.fleet_listen:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            where = format_address(host, port)
            raise ConfigError(f"--fleet-listen {where}: {why_unresolved(error)}") from None
        addresses = [str(address[0]) for *_, address in found]
        judge_bind(addresses, has_key=config.has_fleet_keys, insecure=config.insecure_no_auth)


class _LocalPlace:
    """Where the local node listens; whichever comes first, node or fleet, waits here for the other."""

    def __init__(self, local: LocalNode) -> None:
        self._fleet: Fleet | None = None
        self._last: tuple[str, int] | None = None
        self.is_known = asyncio.Event()
        local.on_ready = self._moved

    def attach(self, fleet: Fleet) -> None:
        self._fleet = fleet
        if self._last is not None:
            fleet.relocate(LOCAL_KEY, *self._last)

    def _moved(self, host: str, port: int) -> None:
        self._last = (host, port)
        self.is_known.set()
        if self._fleet is not None:
            self._fleet.relocate(LOCAL_KEY, host, port)


def _fleet_keys(config: HeadConfig) -> Credentials | None:
    if config.pki is not None:
        return config.pki
    return None if config.fleet_auth is None else load_keys(config.fleet_auth)


def _warnings(config: HeadConfig, *, is_open: bool) -> tuple[str, ...]:
    found = []
    if is_open:
        found.append("clients off this machine need no API key (--insecure-no-auth)")
    if config.has_fleet and not config.has_fleet_keys:
        found.append("links to nodes are neither encrypted nor authenticated (--insecure-no-auth)")
    return tuple(found)


def _head(
    config: HeadConfig, clock: Clock, fleet: Fleet, texts: TextCatalog, metrics: HeadMetrics
) -> Head:
    return Head(
        fleet=fleet,
        texts=texts,
        keys=config.keys,
        metrics=metrics,
        inflight=Inflight(metrics),
        clock=clock,
        limits=config.limits,
        created_s=clock.wall_s(),
        version=version(),
        debug_headers=config.debug_headers,
        is_reasoning_doubled=config.reasoning_field == "both",
        embedding_pooling=config.embedding_pooling,
        qos=QosDesk(config.qos),
        prefix_shared=config.prefix_shared,
        access=config.access,
    )


def _rereads(config: HeadConfig, tls: ssl.SSLContext | None) -> list[Reread[Any]]:
    """List what SIGHUP reads again beside the nodes."""
    found: list[Reread[Any]] = []
    sources, certificate = config.access.sources, config.access.certificate
    if sources.can_change:
        found.append(Reread("API keys", partial(read_keys, sources), config.keys.adopt))
    if certificate is not None and tls is not None:
        # tried in a context of its own, which is thrown away
        load = partial(certificate.load_into, tls)
        found.append(Reread("certificate and key", certificate.context, lambda _: load()))
    return found


def _say_places(places: list[tuple[str, int]], joining: list[tuple[str, int]], scheme: str) -> None:
    for place in places:
        log(_logger, "info", f"listening on {scheme}://{format_address(*place)}/v1")
    for place in joining:
        log(_logger, "info", f"nodes may join at {format_address(*place)}")


async def _become_ready(
    config: HeadConfig,
    local: _LocalPlace | None,
    places: list[tuple[str, int]],
    joining: list[tuple[str, int]],
    parts: _Parts,
) -> None:
    """Tell supervisor and ready file; with a node of one's own only once that is up: it may still refuse its settings."""
    await parts.server.is_open.wait()
    if local is not None:
        await local.is_known.wait()
    if config.ready_file is not None:
        write_ready(config.ready_file, places, joining)
    parts.supervisor.ready()


async def _announce(fleet: Fleet) -> None:
    if not await fleet.wait_ready(REACH_MS / 1000):
        log(_logger, "warning", "no node serves a model yet; /readyz stays 503")


async def _watch_lag(metrics: HeadMetrics, clock: Clock) -> None:
    while True:
        due_ns = clock.now_ns() + LAG_MS * MS
        await asyncio.sleep(LAG_MS / 1000)
        metrics.loop_lag_s.observe(max(0, clock.now_ns() - due_ns) / SECOND)


async def _repeat_warnings(warnings: tuple[str, ...]) -> None:
    while warnings:
        for words in warnings:
            log(_logger, "warning", words)
        await asyncio.sleep(LinkLimits().insecure_warning_s)


class _Signals:
    """Two events: told to stop, and told again."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def hear(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _stop_on_signal(parts: _Parts, config: HeadConfig) -> None:
    """Wait for SIGTERM or SIGINT, drain, then let the server end."""
    loop = asyncio.get_running_loop()
    signals = _Signals()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.hear)
    inflight = parts.head.inflight
    try:
        await signals.first.wait()
        inflight.drain()
        parts.supervisor.draining(inflight.count, config.limits.drain_ms)
        log(_logger, "info", "draining", in_flight=inflight.count)
        await _drain(inflight, signals, config.limits.drain_ms)
        log(_logger, "info", "stopped")
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        parts.server.should_exit = True


async def _drain(inflight: Inflight, signals: _Signals, drain_ms: int) -> None:
    """Until nothing runs, the limit passes or a second signal comes; then cut."""
    async with asyncio.TaskGroup() as group:
        idle = group.create_task(inflight.wait_idle())
        again = group.create_task(signals.second.wait())
        await asyncio.wait(
            (idle, again), timeout=drain_ms / 1000, return_when=asyncio.FIRST_COMPLETED
        )
        idle.cancel()
        again.cancel()
    if inflight.count:
        log(_logger, "warning", "ending what still runs", in_flight=inflight.count)
        inflight.cut()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CUT_GRACE_MS / 1000):
                await inflight.wait_idle()
