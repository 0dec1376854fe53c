"""`--record FILE`: a scheduler that notes its calls, and the thread that writes them down (decisions 21).

The event loop only queues what went in and came out; hashing, JSON and disk are the thread's. The file is new, mode 0600.
A gap would make the rest worthless, so a recording that cannot keep up, grows past its bound or meets a full disk ends there,
is told once, and the node serves on.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from superfluid_core.engine.record import Recorder
from superfluid_core.errors import ConfigError
from superfluid_core.kv.blocks import PoolShape
from superfluid_core.limits import MIB, SchedulerLimits
from superfluid_core.logs import log
from superfluid_core.scheduler.foresight import Foreseen
from superfluid_core.scheduler.plan import Effect, Input, TickPlan
from superfluid_core.scheduler.rules import Rules
from superfluid_core.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

CALLS_WAITING_MAX = 65_536
RECORD_BYTES_MAX = 4096 * MIB
CLOSE_S = 10.0
SALT_BYTES = 32
SECOND_SUFFIX = ".fim"

Note = Callable[[Recorder], str]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a scheduler is made of, beside its salt."""

    limits: SchedulerLimits
    rules: Rules
    pool: PoolShape
    cuts_are_free: bool


class RecordFile:
    """Writes notes in a thread of its own until `close`."""

    def __init__(self, path: Path, *, has_content: bool, bytes_max: int = RECORD_BYTES_MAX) -> None:
        salt = None if has_content else os.urandom(SALT_BYTES)
        try:
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--record {path}: {error.strerror}") from None
        self._file = os.fdopen(number, "w", encoding="ascii")
        self._path = path
        self._bytes_left = bytes_max
        self._recorder = Recorder(salt)
        self._notes: queue.Queue[Note | None] = queue.Queue(CALLS_WAITING_MAX)
        self._is_over = False
        self._writing = threading.Thread(target=self._write, name="superfluid-record", daemon=True)
        self._writing.start()

    def add(self, note: Note) -> None:
        """Queue one call; never waits."""
        if self._is_over:
            return
        try:
            self._notes.put_nowait(note)
        except queue.Full:
            self._give_up("the writer cannot keep up")

    def close(self) -> None:
        """Write what waits and the last line. Blocks for a moment: called when the node has stopped."""
        if not self._is_over:
            self._is_over = True
            self._notes.put(lambda recorder: recorder.end())
        self._notes.put(None)
        self._writing.join(CLOSE_S)

    def _give_up(self, cause: str) -> None:
        if not self._is_over:
            self._is_over = True
            log(logger, "warning", "the recording ends here", file=str(self._path), cause=cause)

    def _write(self) -> None:
        is_broken = False
        with self._file:
            while (note := self._notes.get()) is not None:
                if is_broken:
                    continue
                try:
                    line = note(self._recorder)
                    self._bytes_left -= len(line) + 1
                    if self._bytes_left < 0:
                        raise OSError(0, "the file has reached its bound")
                    self._file.write(line + "\n")
                    if self._notes.empty():
                        self._file.flush()
                except OSError as error:
                    is_broken = True
                    self._give_up(error.strerror or "cannot be written")


class Recordings:
    """One file for each model of a node, in their order: FILE for the main one, FILE.fim for the one beside it."""

    def __init__(self, path: Path, models: int, *, has_content: bool) -> None:
        paths = [path, path.with_name(path.name + SECOND_SUFFIX)][:models]
        self.files: list[RecordFile] = []
        try:
            for each in paths:
                self.files.append(RecordFile(each, has_content=has_content))
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        for file in self.files:
            file.close()


class RecordedScheduler(Scheduler):
    """A scheduler whose every call is noted, in the order in which it happened."""

    def __init__(self, sizes: Sizes, prefix_salt: bytes, file: RecordFile) -> None:
        super().__init__(
            sizes.limits,
            sizes.pool,
            prefix_salt=prefix_salt,
            cuts_are_free=sizes.cuts_are_free,
            rules=sizes.rules,
        )
        self._file = file
        self._places: dict[bytes, int] | None = None
        file.add(
            lambda recorder: recorder.header(
                sizes.limits, sizes.rules, sizes.pool, cuts_are_free=sizes.cuts_are_free
            )
        )

    def receive(self, inputs: Sequence[Input], now_ns: int) -> list[Effect]:
        self._places = None
        effects = super().receive(inputs, now_ns)
        seen = tuple(effects)
        self._file.add(lambda recorder: recorder.received(inputs, seen, now_ns))
        return effects

    def plan(self, now_ns: int) -> TickPlan | None:
        self._places = None
        plan = super().plan(now_ns)
        self._file.add(lambda recorder: recorder.planned(plan, now_ns))
        return plan

    def foresee(self) -> Foreseen | None:
        foreseen = super().foresee()
        if foreseen is not None:
            plan = foreseen.plan
            self._file.add(lambda recorder: recorder.foreseen(plan))
        return foreseen

    def pin_prefix(self, name: bytes, *, pinned: bool) -> bool:
        if self._places is None:
            self._places = {each: place for place, each in enumerate(self.prefix_names())}
        place = self._places.get(name)
        if place is not None:
            self._file.add(lambda recorder: recorder.pinned(place, pinned=pinned))
        return super().pin_prefix(name, pinned=pinned)
