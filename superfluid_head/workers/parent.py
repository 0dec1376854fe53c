"""`serve --workers N`: the parent of N heads on one port. It serves nothing itself.

Owns the port's name (a bound socket that never listens), the folder of side doors, and the children: it forks them, starts one that
died anew after a pause, ends one that hangs, and passes signals on. To each child it is the service supervisor (`supervisor.py`), to
the real one it is the service: ready when all are, alive while they are. A worker that hangs is ended within half of the time that the
real one allows, so that it costs a worker and not the service. One thread and no event loop, so that it can always fork; what it forked
comes back from `keep` with its place, and is a head like any other.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import selectors
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from superfluid_core.clock import MS, SECOND, Clock
from superfluid_core.errors import ConfigError, ModelFilesError
from superfluid_core.limits import WorkerLimits
from superfluid_core.logs import log
from superfluid_core.notify import READY, STOPPING, WATCHDOG, notify, status
from superfluid_head.workers.board import Board
from superfluid_head.workers.children import EXTEND, Child
from superfluid_head.workers.place import Place

LOOK_S, BUSY_LOOK_S = 1.0, 0.2
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
    limits: WorkerLimits = field(default_factory=WorkerLimits)

    def judged(self) -> WorkerLimits:
        """Return the limits with a verdict on workers that comes before the supervisor's own on all of them."""
        if self.watchdog_ms is None:
            return self.limits
        return replace(self.limits, hang_ms=min(self.limits.hang_ms, self.watchdog_ms // 2))


class Parent:
    """Keeps the workers. `keep` returns a place in every worker, and None in the parent when all have ended as asked."""

    def __init__(self, told: Told, clock: Clock) -> None:
        self._told = told
        self._limits = told.judged()
        self._clock = clock
        self._folder = Path(tempfile.mkdtemp(prefix="superfluid-workers-"))
        self._leash, self._hand = os.pipe()
        self._woken, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._board = Board()
        self._children: list[Child] = []
        self._signals: list[int] = []
        self._is_ready = False
        self._stop_by_ns: int | None = None
        self._looked_ns = clock.now_ns()
        self._feed_ns = 0
        self.on_ready: Callable[[], None] = lambda: None
        self.on_reload: Callable[[], None] = lambda: None

    @property
    def beat_ms(self) -> int:
        """Within which time a worker is to say that it lives: twice as often as it has to."""
        return self._limits.hang_ms // 2

    def keep(self) -> Place | None:
        """Start all and keep them until told to stop. Raises SuperfluidError."""
        self._listen_to_signals()
        gc.freeze()
        try:
            for number in range(self._told.count):
                child = Child(number, self._folder, self._limits)
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
        """Make a worker's process; True in it. There SIGHUP waits until it is listened to: whatever the worker has read by then may be old."""
        child.begin(self._clock.now_ns())
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        child.pid = os.fork()
        if child.pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        return child.pid == 0

    def _as_worker(self, child: Child) -> Place:
        """Put away what is the parent's, in the worker."""
        for each in self._children:
            each.pid = 0  # none of this process's business
        os.setpgid(0, 0)  # what a terminal sends to all comes from the parent, once
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        os.close(self._hand)
        for one in (self._woken, self._wake, *(each.channel for each in self._children)):
            one.close()
        return Place(child.number, self._told.count, self._folder, self._leash, self._board)

    def notify_path(self, place: Place) -> str:
        """Where a worker tells how it does."""
        return str(self._children[place.number].path)

    def _reap(self) -> None:
        for child in self._children:
            code = child.reap() if child.pid else None
            if code is not None:
                self._on_end(child, code)

    def _on_end(self, child: Child, code: int) -> None:
        was_ready, child.is_ready = child.is_ready, False
        child.words()  # nothing that it said is of the one that comes next
        if self._stop_by_ns is not None:
            return
        if not self._is_ready and not was_ready and code in GIVES_UP_WITH:
            raise GIVES_UP_WITH[code]("a worker could not start; its own words are above")
        self._board.count(child.cause)
        pause_ms = child.ended(self._clock.now_ns())
        fields: dict[str, Any] = {"worker": child.number, "cause": child.cause, "exit": code}
        fields["again_in_ms"] = pause_ms
        log(_logger, "error", "a worker ended; it is started again", **fields)

    # --- what happens ---

    def _look(self) -> None:
        """Wait for news, a moment at most, and act on it."""
        wait_s = min(LOOK_S if self._is_calm() else BUSY_LOOK_S, self.beat_ms / 4_000)
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4_096)
            else:
                self._hear(key.data)
        while self._signals:
            self._on_signal(self._signals.pop(0))
        self._reap()
        self._excuse(wait_s)
        self._judge()
        self._feed()

    def _is_calm(self) -> bool:
        return self._stop_by_ns is None and all(child.pid for child in self._children)

    def _hear(self, child: Child) -> None:
        for line in child.words():
            child.heard_ns = self._clock.now_ns()
            if line == READY:
                child.is_ready = True
            elif line.startswith(EXTEND):
                notify(line, self._told.notify_socket)
        if not self._is_ready and all(each.is_ready for each in self._children):
            self._is_ready = True
            self.on_ready()
            words = status(f"serving with {len(self._children)} workers")
            notify(f"{READY}\n{words}", self._told.notify_socket)
            log(_logger, "info", "all workers are ready", workers=len(self._children))

    def _excuse(self, wait_s: float) -> None:
        """Blame no worker for a time in which this process did not run either."""
        now_ns = self._clock.now_ns()
        pause_ns = now_ns - self._looked_ns - round(wait_s * SECOND)
        self._looked_ns = now_ns
        if pause_ns > self._limits.own_pause_ms * MS:
            log(_logger, "warning", "the parent of the workers stood still", ms=pause_ns // MS)
            for child in self._children:
                child.paused(pause_ns)

    def _judge(self) -> None:
        """End workers that hang, and all of them when the time to stop is over."""
        now_ns = self._clock.now_ns()
        for child in self._children:
            if child.is_hung(now_ns):
                silent_ms = child.silent_ms(now_ns)
                if child.end(now_ns, is_told=faulthandler.is_enabled()):
                    fields = {"worker": child.number, "pid": child.pid, "silent_ms": silent_ms}
                    log(_logger, "error", "a worker hangs; it is ended", **fields)
        if self._stop_by_ns is not None and now_ns > self._stop_by_ns:
            self._signal_all(signal.SIGKILL)

    def _feed(self) -> None:
        """Tell the real supervisor that the service lives: while workers serve, and none of them is beyond helping."""
        now_ns = self._clock.now_ns()
        watchdog_ms = self._told.watchdog_ms
        serving = [child for child in self._children if child.is_ready]
        if watchdog_ms is None or not serving or now_ns < self._feed_ns:
            return
        if max(child.silent_ms(now_ns) for child in serving) < watchdog_ms:
            self._feed_ns = now_ns + watchdog_ms * MS // 4
            notify(WATCHDOG, self._told.notify_socket)

    def _listen_to_signals(self) -> None:
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda number, _frame: self._signals.append(number))
        self._selector.register(self._woken, selectors.EVENT_READ, None)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            self.on_reload()
            self._signal_all(signal.SIGHUP)
        elif number in (signal.SIGTERM, signal.SIGINT):
            if self._stop_by_ns is None:
                log(_logger, "info", "stopping all workers")
                notify(STOPPING, self._told.notify_socket)
                stop_ms = self._told.drain_ms + self._limits.stop_margin_ms
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
        for one in (self._woken, self._wake, *(each.channel for each in self._children)):
            one.close()
        for end in (self._leash, self._hand):
            os.close(end)
        shutil.rmtree(self._folder, ignore_errors=True)
