"""`serve --workers N`: the parent of N heads on one port. It serves nothing itself.

Owns the port's name (a bound socket that never listens), the folder of side doors, and the children: it forks them, starts one that
died anew after a pause, ends one that hangs, and passes signals on. To each child it is the service supervisor (`supervisor.py`), to
the real one it is the service: ready when all are, alive while they are. One thread and no event loop, so that it can always fork;
what it forked comes back from `keep` with its place, and is a head like any other.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import selectors
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from superfluid_core.clock import MS, SECOND, Clock
from superfluid_core.errors import ConfigError, ModelFilesError
from superfluid_core.logs import log
from superfluid_core.notify import READY, STOPPING, WATCHDOG, notify, status
from superfluid_head.workers.children import EXTEND, Child
from superfluid_head.workers.place import Place

BUSY_LOOK_S = 0.2
SETTLED_S = 60
WATCHDOG_MS = 30_000
STOP_MARGIN_MS = 20_000
LOOK_S = 1.0
GIVES_UP_WITH = {2: ConfigError, 3: ModelFilesError}
"""Exit statuses of a head that cannot serve as it was told: starting it again helps nobody, and the parent ends with the same."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Told:
    """What the parent was told: how many heads, how long they may drain, and who supervises it."""

    count: int
    drain_ms: int
    notify_socket: str | None
    watchdog_ms: int | None


class Parent:
    """Keeps the workers. `keep` returns a place in every worker, and None in the parent when all have ended as asked."""

    def __init__(self, told: Told, clock: Clock) -> None:
        self._told = told
        self._clock = clock
        self._folder = Path(tempfile.mkdtemp(prefix="superfluid-workers-"))
        self._leash, self._hand = os.pipe()
        self._woken, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []
        self._signals: list[int] = []
        self._is_ready = False
        self._stop_by_ns: int | None = None
        self.on_ready: Callable[[], None] = lambda: None

    @property
    def watchdog_ms(self) -> int:
        """Within which time a worker has to show that it lives."""
        return self._told.watchdog_ms or WATCHDOG_MS

    def keep(self) -> Place | None:
        """Start all and keep them until told to stop. Raises SuperfluidError."""
        self._listen_to_signals()
        gc.freeze()
        try:
            for number in range(self._told.count):
                child = Child(number, self._folder)
                self._children.append(child)
                self._selector.register(child.channel, selectors.EVENT_READ, child)
            while not self._is_over():
                for child in self._children:
                    if self._may_start(child) and self._fork(child):
                        return self._as_worker(child)
                self._look()
        except BaseException:
            self._signal_all(signal.SIGKILL)
            self._clean()
            raise
        self._clean()
        return None

    # --- children ---

    def _may_start(self, child: Child) -> bool:
        is_due = self._clock.now_ns() >= child.due_ns
        return child.pid == 0 and is_due and self._stop_by_ns is None

    def _fork(self, child: Child) -> bool:
        """Make a worker's process; True in it."""
        child.begin(self._clock.now_ns())
        child.pid = os.fork()
        return child.pid == 0

    def _as_worker(self, child: Child) -> Place:
        """Put away what is the parent's, in the worker."""
        for each in self._children:
            each.pid = 0  # none of this process's business
        os.setpgid(0, 0)  # what a terminal sends to all comes from the parent, once
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it is listened to
        self._selector.close()
        os.close(self._hand)
        for one in (self._woken, self._wake, *(each.channel for each in self._children)):
            one.close()
        return Place(child.number, self._told.count, self._folder, self._leash)

    def notify_path(self, place: Place) -> str:
        """Where a worker tells how it does."""
        return str(self._children[place.number].path)

    def _reap(self) -> None:
        for child in self._children:
            if child.pid == 0:
                continue
            pid, found = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                self._on_end(child, os.waitstatus_to_exitcode(found))

    def _on_end(self, child: Child, code: int) -> None:
        was_ready, child.pid, child.is_ready = child.is_ready, 0, False
        if self._stop_by_ns is not None:
            return
        if not self._is_ready and not was_ready and code in GIVES_UP_WITH:
            raise GIVES_UP_WITH[code]("a worker could not start; its own words are above")
        now_ns = self._clock.now_ns()
        pause_ms = child.ended(now_ns, settled_ns=SETTLED_S * SECOND)
        fields = {"worker": child.number, "exit": code, "again_in_ms": pause_ms}
        log(_logger, "error", "a worker ended; it is started again", **fields)

    # --- what happens ---

    def _look(self) -> None:
        """Wait for news, a moment at most, and act on it."""
        for key, _ in self._selector.select(LOOK_S if self._is_calm() else BUSY_LOOK_S):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4_096)
            else:
                self._hear(key.data)
        while self._signals:
            self._on_signal(self._signals.pop(0))
        self._reap()
        self._judge()

    def _is_calm(self) -> bool:
        return self._stop_by_ns is None and all(child.pid for child in self._children)

    def _hear(self, child: Child) -> None:
        for line in child.words():
            if line == READY:
                child.is_ready = True
            elif line == WATCHDOG:
                child.beat_ns = self._clock.now_ns()
                self._pass_beat()
            elif line.startswith(EXTEND):
                notify(line, self._told.notify_socket)
        if not self._is_ready and all(each.is_ready for each in self._children):
            self._is_ready = True
            self.on_ready()
            words = status(f"serving with {len(self._children)} workers")
            notify(f"{READY}\n{words}", self._told.notify_socket)
            log(_logger, "info", "all workers are ready", workers=len(self._children))

    def _pass_beat(self) -> None:
        """Tell the real supervisor, if every worker that serves has shown lately that it lives."""
        serving = [child for child in self._children if child.is_ready]
        oldest_ns = min((child.beat_ns for child in serving), default=0)
        if self._clock.now_ns() - oldest_ns < self.watchdog_ms * MS:
            notify(WATCHDOG, self._told.notify_socket)

    def _judge(self) -> None:
        """End workers that hang, and all of them when the time to stop is over."""
        now_ns = self._clock.now_ns()
        for child in self._children:
            if child.is_ready and child.pid and now_ns - child.beat_ns > self.watchdog_ms * MS:
                log(_logger, "error", "a worker hangs; it is ended", worker=child.number)
                child.send(signal.SIGKILL)
        if self._stop_by_ns is not None and now_ns > self._stop_by_ns:
            self._signal_all(signal.SIGKILL)

    def _listen_to_signals(self) -> None:
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda number, _frame: self._signals.append(number))
        self._selector.register(self._woken, selectors.EVENT_READ, None)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._signal_all(signal.SIGHUP)
        elif number in (signal.SIGTERM, signal.SIGINT):
            if self._stop_by_ns is None:
                log(_logger, "info", "stopping all workers")
                notify(STOPPING, self._told.notify_socket)
                stop_ms = self._told.drain_ms + STOP_MARGIN_MS
                self._stop_by_ns = self._clock.now_ns() + stop_ms * MS
            self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: int) -> None:
        for child in self._children:
            child.send(number)

    def _is_over(self) -> bool:
        return self._stop_by_ns is not None and not any(child.pid for child in self._children)

    def _clean(self) -> None:
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for child in self._children:
            child.channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)
