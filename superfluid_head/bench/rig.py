"""Real nodes and a real head on loopback, as child processes with a fresh key: for the demo, the benches and the e2e tests.

Owns the children, a private folder with the key, the ready files and one log per process. Everything is addressed by the
process ids that were started here; `close()` ends them all, whatever happened before. It must not know what is asked
of the fleet, and it has no settings of its own: the caller gives flags, the rig adds addresses, key and ready file.
Every wait has a deadline; a child that dies while it is waited for is reported with the last lines of its log.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from superfluid_core.clock import MS, SECOND, Clock, SystemClock
from superfluid_core.errors import ConfigError
from superfluid_core.link.keys import write_key_file

READY_SECONDS = 120.0
STOP_SECONDS = 3.0
POLL_SECONDS = 0.02
LOG_LINES_SHOWN = 12


class RigError(Exception):
    """Raised when a process does not come up or dies unasked; the message carries the end of its log."""


def program(name: str) -> list[str]:
    """Name the command of one of our two programs, as installed beside this interpreter."""
    beside = Path(sys.executable).with_name(name)
    return [str(beside)] if beside.exists() else [name]


def hostport(address: Sequence[Any]) -> str:
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


@dataclass(slots=True)
class Child:
    """One process of the rig. `ready` is what its ready file said, once it did."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    ready_file: Path
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def listen(self) -> str:
        """HOST:PORT of a node's link."""
        return hostport(self.ready["listen"][0])

    @property
    def url(self) -> str:
        """Base URL of a head."""
        return "http://" + hostport(self.ready["http"][0])

    def signal(self, number: signal.Signals) -> None:
        if self.is_running:
            self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.signal(signal.SIGKILL)
        self.process.wait(timeout=10)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def log_end(self) -> str:
        return "\n".join("    " + line for line in self.log_text().splitlines()[-LOG_LINES_SHOWN:])


class Rig:
    """Starts children and ends them. Use it as a context manager."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._pause = threading.Event()
        self.folder = Path(tempfile.mkdtemp(prefix="superfluid-"))
        self.children: list[Child] = []
        self._starts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def make_key(self, name: str = "fleet.key") -> Path:
        """Write a fresh fleet key, as `superfluid fleet key` does; a process for it would take half a second of every rig."""
        path = self.folder / name
        try:
            write_key_file(path)
        except ConfigError as error:
            raise RigError(error.message) from error
        return path

    def spawn(self, name: str, command: Sequence[str]) -> Child:
        """Start `command` with a ready file and a log of its own; does not wait."""
        self._starts += 1
        ready_file = self.folder / f"{self._starts}-{name}.ready"
        return self._start(name, [*command, "--ready-file", str(ready_file)], ready_file)

    def spawn_plain(self, name: str, command: Sequence[str], *, is_group: bool = False) -> Child:
        """Start somebody else's program, which knows no ready file; whoever starts it asks it whether it is there.

        With `is_group` it and its own children are a process group by its id.
        """
        self._starts += 1
        ready_file = self.folder / f"{self._starts}-{name}.ready"
        return self._start(name, command, ready_file, is_group=is_group)

    def _start(
        self, name: str, command: Sequence[str], ready_file: Path, *, is_group: bool = False
    ) -> Child:
        log = ready_file.with_suffix(".log")
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=is_group,
            )  # fmt: skip
        child = Child(name, process, log, ready_file)
        self.children.append(child)
        return child

    def start_node(self, name: str, *flags: str, key: Path | None, listen: str = "") -> Child:
        """Start a node on a free port of loopback (or on `listen`, to come back where one was)."""
        auth = ("--auth-file", str(key)) if key else ("--insecure-no-auth",)
        return self.spawn(
            name,
            [
                *program("superfluid-noded"),
                "--identity", name, "--listen", listen or "127.0.0.1:0", *auth, *flags,
            ],
        )  # fmt: skip

    def start_head(
        self,
        *flags: str,
        nodes: Sequence[str] = (),
        key: Path | None = None,
        http: str = "127.0.0.1:0",
    ) -> Child:
        """Start a head of `nodes` (HOST:PORT, or an @FILE); `flags` begin with the models to serve."""
        auth = ("--fleet-auth", str(key)) if key else ()
        fleet = ("--fleet", ",".join(nodes)) if nodes else ()
        command = [*program("superfluid"), "serve", *flags, "--http", http, *fleet, *auth]
        return self.spawn("head", command)

    def wait_ready(self, *children: Child, timeout_s: float = READY_SECONDS) -> None:
        """Wait for every ready file. Raises RigError when a child dies or the time is over."""
        deadline = self._clock.now_ns() + int(timeout_s * SECOND)
        for child in children:
            while not child.ready_file.exists():
                if not child.is_running:
                    code = child.process.returncode
                    raise RigError(f"{child.name} ended with exit {code}:\n{child.log_end()}")
                if self._clock.now_ns() > deadline:
                    raise RigError(
                        f"{child.name}: not ready in {timeout_s:.0f} s:\n{child.log_end()}"
                    )
                self.sleep(POLL_SECONDS)
            child.ready = json.loads(child.ready_file.read_text(encoding="utf-8"))

    def wait_for_log(self, child: Child, words: str, timeout_s: float = 20.0) -> str:
        """Wait until the log of `child` holds `words` and return it. Raises RigError."""
        deadline = self._clock.now_ns() + int(timeout_s * SECOND)
        while words not in child.log_text():
            if self._clock.now_ns() > deadline:
                raise RigError(f"{child.name} did not log {words!r}:\n{child.log_end()}")
            self.sleep(POLL_SECONDS)
        return child.log_text()

    def sleep(self, seconds: float) -> None:
        self._pause.wait(seconds)

    def now_ms(self) -> float:
        return self._clock.now_ns() / MS

    def named(self, name: str) -> Child:
        """Find the newest child of that name. Raises RigError when there is none."""
        for child in reversed(self.children):
            if child.name == name:
                return child
        raise RigError(f"no process is called {name!r}")

    def close(self) -> None:
        """End every child: SIGTERM, then SIGKILL after a few seconds. Removes the folder. Idempotent."""
        for child in self.children:
            child.thaw()
            child.signal(signal.SIGTERM)
        deadline = self._clock.now_ns() + int(STOP_SECONDS * SECOND)
        for child in self.children:
            left = max(0.0, (deadline - self._clock.now_ns()) / SECOND)
            try:
                child.process.wait(timeout=left)
            except subprocess.TimeoutExpired:
                with suppress(subprocess.TimeoutExpired):
                    child.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an ordinary exit, so that the children are ended too."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
