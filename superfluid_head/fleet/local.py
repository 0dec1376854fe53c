"""`superfluid serve MODEL` without a fleet: a node of one's own, as a supervised child process.

The child listens on a free port of 127.0.0.1 with a key made for the occasion, in a private directory that goes with it; nothing
secret reaches argv. It is restarted with backoff when it dies, unless it says that its configuration or model is at fault
(exit 2 and 3), and it ends with the head: on a stop by SIGTERM, then SIGKILL; when the head itself is killed, because
its stdin closes (`--exit-with-parent`). To the fleet it is a node like any other, whose port changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from superfluid_core.clock import SECOND, Clock
from superfluid_core.errors import ConfigError, ModelFilesError
from superfluid_core.link.keys import FleetKeys, write_key_file
from superfluid_core.logs import log
from superfluid_head.fleet.directory import NodeAddress

logger = logging.getLogger(__name__)

LOCAL_KEY = "local"
HOST = "127.0.0.1"
POLL_MS = 50
READY_BYTES_MAX = 64 * 1024
RESTART_MS_MIN = 250
RESTART_MS_MAX = 15_000
STEADY_S = 60
CLOSE_S = 1.0
EXIT_CONFIG = 2
EXIT_MODEL = 3

PROGRAM = (sys.executable, "-m", "superfluid_noded.cli")


class LocalNode:
    """The child and its key. `address` goes into the fleet's nodes; `on_ready` hears each new port."""

    def __init__(
        self,
        arguments: Sequence[str],
        clock: Clock,
        *,
        stop_ms: int = 35_000,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.address = NodeAddress(HOST, 0, LOCAL_KEY)
        self.on_ready: Callable[[str, int], None] = lambda _host, _port: None
        self.restarts = 0
        self.pid: int | None = None
        self._arguments = tuple(arguments)
        self._program = tuple(program)
        self._clock = clock
        self._stop_ms = stop_ms
        self._home = Path(tempfile.mkdtemp(prefix="superfluid-"))
        self._key_file = self._home / "fleet.key"
        self._ready_file = self._home / "ready.json"
        self.keys: FleetKeys = write_key_file(self._key_file)

    async def run(self) -> None:
        """Keep the child alive until cancelled. Raises ConfigError or ModelFilesError if it cannot work at all."""
        failures = 0
        try:
            while True:
                started_ns = self._clock.now_ns()
                code = await self._live_once()
                if code == EXIT_CONFIG:
                    raise ConfigError("the local node refused its configuration (see its log)")
                if code == EXIT_MODEL:
                    raise ModelFilesError("the local node cannot use the model (see its log)")
                lived_ns = self._clock.now_ns() - started_ns
                failures = 0 if lived_ns >= STEADY_S * SECOND else failures + 1
                pause_ms = min(RESTART_MS_MIN << min(max(failures - 1, 0), 16), RESTART_MS_MAX)
                log(logger, "warning", "local node ended", exit=code, restart_in_ms=pause_ms)
                await asyncio.sleep(pause_ms / 1_000)
                self.restarts += 1
        finally:
            await asyncio.to_thread(shutil.rmtree, self._home, ignore_errors=True)

    async def _live_once(self) -> int:
        """Run the child to its end; returns its exit code (negative: the signal)."""
        self._ready_file.unlink(missing_ok=True)
        # A session of its own: what a terminal sends to the head's group is for the head to pass on.
        child = await asyncio.create_subprocess_exec(
            *self._program,
            *self._arguments,
            *self._own_flags(),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # uvloop knows no process_group
        )
        self.pid = child.pid
        log(logger, "info", "local node started", pid=child.pid)
        try:
            async with asyncio.TaskGroup() as group:
                looking = group.create_task(self._look_for_port(child))
                code = await child.wait()
                looking.cancel()
            return code
        finally:
            self.pid = None
            await self._stop(child)

    def _own_flags(self) -> tuple[str, ...]:
        flags = [
            *("--listen", f"{HOST}:0"),
            *("--auth-file", str(self._key_file)),
            *("--ready-file", str(self._ready_file)),
            "--exit-with-parent",
        ]
        if "--metrics" not in self._arguments:
            flags += ["--metrics", "off"]
        return tuple(flags)

    async def _look_for_port(self, child: asyncio.subprocess.Process) -> None:
        """Wait for the child's ready file; loading a model takes its time, the child's death ends it."""
        while True:
            port = self._port_of(child.pid)
            if port is not None:
                log(logger, "info", "local node ready", pid=child.pid, port=port)
                self.on_ready(HOST, port)
                return
            await asyncio.sleep(POLL_MS / 1_000)

    def _port_of(self, pid: int) -> int | None:
        try:
            with self._ready_file.open("rb") as file:
                said = json.loads(file.read(READY_BYTES_MAX))
        except (FileNotFoundError, ValueError):
            return None
        match said:
            case {"pid": told, "listen": [[str(), int(port)], *_]} if told == pid:
                return port
            case _:
                return None

    async def _stop(self, child: asyncio.subprocess.Process) -> None:
        """End the child: politely, then not. Safe when it has ended. Its stdin closes last: that means "at once"."""
        try:
            if child.returncode is None:
                child.terminate()
                async with asyncio.timeout(self._stop_ms / 1_000):
                    await child.wait()
        except TimeoutError:
            log(logger, "warning", "local node killed", pid=child.pid, waited_ms=self._stop_ms)
            child.kill()
            await child.wait()
        finally:
            if child.stdin is not None:
                child.stdin.close()
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(CLOSE_S):
                        await child.stdin.wait_closed()
