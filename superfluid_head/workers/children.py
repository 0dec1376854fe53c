"""One worker as its parent sees it: a process, how long to wait before it is started again, and the socket on which it tells how it does."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from superfluid_core.clock import MS
from superfluid_core.notify import STATE_BYTES_MAX

EXTEND = "EXTEND_TIMEOUT_USEC="
PAUSE_MS_MIN, PAUSE_MS_MAX = 200, 10_000
WORDS_AT_ONCE = 64


class Child:
    """A worker. `pid` is 0 while there is none."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.path = folder / f"worker-{number}.notify"
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.channel.bind(str(self.path))
        self.channel.setblocking(False)
        self.pid = 0
        self.is_ready = False
        self.due_ns = 0
        self.beat_ns = 0
        self._began_ns = 0
        self._pause_ms = PAUSE_MS_MIN

    def begin(self, now_ns: int) -> None:
        self._began_ns = self.beat_ns = now_ns

    def ended(self, now_ns: int, settled_ns: int) -> int:
        """Note its end; returns after how many ms it is started again: twice as many each time, from the least for one that lasted."""
        if now_ns - self._began_ns >= settled_ns:
            self._pause_ms = PAUSE_MS_MIN
        pause_ms = self._pause_ms
        self._pause_ms = min(PAUSE_MS_MAX, 2 * pause_ms)
        self.due_ns = now_ns + pause_ms * MS
        return pause_ms

    def words(self) -> list[str]:
        """Return the lines that it has told since."""
        found: list[str] = []
        for _ in range(WORDS_AT_ONCE):
            try:
                data = self.channel.recv(STATE_BYTES_MAX)
            except BlockingIOError:
                break
            found += data.decode("utf-8", "replace").split("\n")
        return found

    def send(self, number: int) -> None:
        if self.pid:
            os.kill(self.pid, number)
