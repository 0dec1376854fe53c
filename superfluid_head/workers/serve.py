"""From one head's settings to those of its workers: what `serve` does when `--workers` says more than one.

In the parent it returns when all has ended; in every worker at once, with the configuration and the place of that one. Key files and lists
of nodes are read when a worker starts, so one that is started anew has what is in force by then; where they have become wrong, it has
what the parent read last: when it began, or at a SIGHUP since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from superfluid_core.clock import Clock
from superfluid_core.errors import ConfigError
from superfluid_core.logs import log
from superfluid_head.config import HeadConfig, Surroundings
from superfluid_head.listeners import bound, reserve_sockets
from superfluid_head.ready import write_ready
from superfluid_head.workers.parent import Parent, Told
from superfluid_head.workers.place import Place

_logger = logging.getLogger(__name__)

Build = Callable[[Surroundings], HeadConfig]


def become_worker(
    config: HeadConfig, build: Build, clock: Clock
) -> tuple[HeadConfig, Place] | None:
    """Keep workers until told to stop, then return None; in a worker, return what it is. Raises SuperfluidError."""
    reserved = reserve_sockets(config.http)
    places, around = tuple(bound(reserved)), config.around
    watchdog = around.watchdog_usec or ""
    watchdog_ms = int(watchdog) // 1_000 if watchdog.isdecimal() else 0
    told = Told(config.workers, config.limits.drain_ms, around.notify_socket, watchdog_ms or None)
    parent = Parent(told, clock)

    kept = config

    def on_ready() -> None:
        if config.ready_file is not None:
            write_ready(config.ready_file, list(places), [])

    def on_reload() -> None:
        nonlocal kept
        with suppress(ConfigError):  # each worker says what is wrong
            kept = build(around)

    parent.on_ready, parent.on_reload = on_ready, on_reload
    place = parent.keep()
    for one in reserved:
        one.close()
    if place is None:
        return None
    place.watch_leash()
    own = replace(
        around,
        notify_socket=parent.notify_path(place),
        watchdog_usec=str(parent.beat_ms * 1_000),
        watchdog_pid=None,
    )
    return replace(_built(build, own, kept), http=places, ready_file=None), place


def _built(build: Build, own: Surroundings, kept: HeadConfig) -> HeadConfig:
    """Read the configuration, or go by what is kept."""
    try:
        return build(own)
    except ConfigError as error:
        log(_logger, "error", "the configuration stays as it was", reason=error.message)
        return replace(kept, around=own)
