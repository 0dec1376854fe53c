"""Plays systemd to a real program: its notification socket, its watchdog, and the environment that a unit gives.

Nothing here decides; the tests do. `Supervisor.hear` gives datagrams as they come, each as its assignments.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "systemd"
SECONDS = 40


def settings(name: str) -> dict[str, list[str]]:
    """Read a unit: every assignment of it, in order."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text(encoding="utf-8").splitlines():
        key, equals, value = line.partition("=")
        if equals and re.fullmatch(r"[A-Za-z]+", key):
            found.setdefault(key, []).append(value)
    return found


def unit_environment(name: str, instance: str = "0") -> dict[str, str]:
    """Read what a unit puts into the environment, but for folders of an installed host."""
    pairs = [each.replace("%i", instance).partition("=") for each in settings(name)["Environment"]]
    return {key: value for key, _, value in pairs if not value.startswith("/")}


class Supervisor:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, folder: Path, watchdog_s: float) -> None:
        self.path = folder / "notify"
        self.watchdog_s = watchdog_s
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.channel.bind(str(self.path))
        self.heard: list[dict[str, str]] = []

    def hear(self, timeout_s: float = SECONDS) -> dict[str, str]:
        """Wait for the next datagram. Raises TimeoutError."""
        self.channel.settimeout(timeout_s)
        pairs = [line.partition("=") for line in self.channel.recv(4096).decode().splitlines()]
        self.heard.append({key: value for key, _, value in pairs})
        return self.heard[-1]

    def until(self, key: str, value: str = "", seconds: float = SECONDS) -> dict[str, str]:
        """Hear until an assignment of `key` begins with `value`. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while True:
            said = self.hear(max(0.01, end - time.monotonic()))
            if key in said and said[key].startswith(value):
                return said

    def environment(self) -> dict[str, str]:
        return {
            "NOTIFY_SOCKET": str(self.path),
            "WATCHDOG_USEC": str(round(self.watchdog_s * 1e6)),
        }


@contextmanager
def supervised(
    folder: Path, module: str, *arguments: str, unit: str, watchdog_s: float = 1.0
) -> Iterator[tuple[Supervisor, subprocess.Popen[str]]]:
    """Start a program as its unit would; kills it at the end if it still runs."""
    supervisor = Supervisor(folder, watchdog_s)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SUPERFLUID_")}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**kept, **unit_environment(unit), **supervisor.environment()},
    )
    try:
        yield supervisor, process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
        supervisor.channel.close()
