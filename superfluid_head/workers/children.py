"""One worker as its parent sees it: a process, how long to wait before it is started again, and the socket on which it tells how it does.

Whether it hangs is told from when it was last heard. Its event loop tells at least twice in that time, and while it loads now and then.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

from superfluid_core.clock import MS
from superfluid_core.limits import WorkerLimits
from superfluid_core.notify import STATE_BYTES_MAX
from superfluid_head.workers.board import DIED, HUNG

EXTEND = "EXTEND_TIMEOUT_USEC="
WORDS_AT_ONCE = 64


class Child:
    """A worker. `pid` is 0 while there is none."""

    def __init__(self, number: int, folder: Path, limits: WorkerLimits) -> None:
        self.number = number
        self.path = folder / f"worker-{number}.notify"
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.channel.bind(str(self.path))
        self.channel.setblocking(False)
        self.pid = 0
        self.is_ready = False
        self.due_ns = 0
        self.heard_ns = 0
        self._limits = limits
        self._began_ns = 0
        self._told_to_end_ns: int | None = None
        self._pause_ms = limits.pause_ms_min

    def begin(self, now_ns: int) -> None:
        self.is_ready = False
        self._began_ns = self.heard_ns = now_ns
        self._told_to_end_ns = None

    @property
    def cause(self) -> str:
        """Why it ended, once it has."""
        return DIED if self._told_to_end_ns is None else HUNG

    def ended(self, now_ns: int) -> int:
        """Note its end; returns after how many ms it is started again: twice as many each time, from the least for one that lasted."""
        limits = self._limits
        if now_ns - self._began_ns >= limits.settled_ms * MS:
            self._pause_ms = limits.pause_ms_min
        pause_ms = self._pause_ms
        self._pause_ms = min(limits.pause_ms_max, 2 * pause_ms)
        self.due_ns = now_ns + pause_ms * MS
        return pause_ms

    def silent_ms(self, now_ns: int) -> int:
        return (now_ns - self.heard_ns) // MS

    def is_hung(self, now_ns: int) -> bool:
        """Whether it has been silent for longer than it may."""
        limits = self._limits
        silent_ms_max = limits.hang_ms if self.is_ready else limits.start_silent_ms
        return self.pid != 0 and self.silent_ms(now_ns) > silent_ms_max

    def paused(self, pause_ns: int) -> None:
        """Take a pause of the parent's own out of the verdict."""
        self.heard_ns += pause_ns

    def end(self, now_ns: int, *, is_told: bool) -> bool:
        """End one that hangs: with SIGABRT where it can still tell its stack (`is_told`), and with SIGKILL after that. True the first time."""
        if self._told_to_end_ns is None:
            self._told_to_end_ns = now_ns
            self.send(signal.SIGABRT if is_told else signal.SIGKILL)
            return True
        if now_ns - self._told_to_end_ns > self._limits.abort_ms * MS:
            self.send(signal.SIGKILL)
        return False

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

    def reap(self) -> int | None:
        """Return its exit status once it has ended, and end what it had started itself."""
        group, found = os.waitpid(self.pid, os.WNOHANG)
        if not group:
            return None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)  # it led a group of its own
        self.pid = 0
        return os.waitstatus_to_exitcode(found)
