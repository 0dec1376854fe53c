"""A worker's place among the others: its number, the folder with everybody's side doors, and the pipe that tells that the parent is gone.

A side door is a Unix socket in a folder that only this user can enter. The other workers come in by it, to ask what only this process
knows; what comes in there is never asked on. It knows no routes.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path

from superfluid_core.errors import ConfigError
from superfluid_head.workers.board import Board

BACKLOG = 64
NAME = "worker-{}.sock"


@dataclass(frozen=True, slots=True)
class Place:
    """Worker `number` of `count`. `leash` is the reading end of a pipe whose other end the parent holds, `board` what the parent counts."""

    number: int
    count: int
    folder: Path
    leash: int
    board: Board = field(default_factory=Board)

    def door(self, number: int) -> Path:
        """Where a worker is found by the others."""
        return self.folder / NAME.format(number)

    def open_door(self) -> socket.socket:
        """Open one's own side door. Raises ConfigError."""
        path = self.door(self.number)
        path.unlink(missing_ok=True)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.bind(str(path))
            made.listen(BACKLOG)
            made.setblocking(False)
        except OSError as error:
            made.close()
            raise ConfigError(f"cannot listen on {path}: {error.strerror}") from None
        return made

    def others(self) -> list[int]:
        return [number for number in range(self.count) if number != self.number]

    def watch_leash(self) -> None:
        """End this process as a SIGTERM would when the parent is gone."""

        def wait() -> None:
            while os.read(self.leash, 1):
                pass
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=wait, name="leash", daemon=True).start()
