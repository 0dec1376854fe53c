"""Judges constraints before the first byte, in processes that are killed when one takes too long.

Owns at most `CHILDREN_MAX` processes, started when first needed, and what they said lately. A grammar that is not judged within
`CHECK_MS`, or that kills its process by its appetite for memory, is refused like one that is wrong; starting a process and handing it
a vocabulary have a deadline of their own, for they are not the request's doing. Threads wait for the processes, never the event
loop. A process that has judged `CHECKS_PER_CHILD` makes room for a fresh one, so that nothing can pile up in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import select
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgpack

from superfluid_core.clock import MS, Clock, SystemClock
from superfluid_core.errors import CapacityError, ErrorCode
from superfluid_core.grammar.compiler import Vocabulary
from superfluid_core.grammar.sources import invalid_grammar
from superfluid_core.limits import KIB

CHILDREN_MAX = 2
WAITING_MAX = 64
CHECK_MS = 1_500
START_MS = 20_000
KILLED_S = 5.0
CHECKS_PER_CHILD = 5_000
VERDICTS_MAX = 1_024
ANSWER_BYTES_MAX = 256 * KIB

GREETING = {"key": "", "source": ""}

Collect = Callable[[], Vocabulary]


class _TooSlowError(Exception):
    """Raised when a process did not answer in time."""


class _Child:
    """One process. Used by one thread at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.checks = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "superfluid_head.text.grammar_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None, "both are pipes"
            os.set_blocking(stream.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, question: dict[str, Any], wait_ms: int) -> dict[str, Any]:
        """Put a question and wait for its answer. Raises _TooSlowError, or EOFError when the process ended."""
        until_ns = self._clock.now_ns() + wait_ms * MS
        data = msgpack.packb(question)
        self._write(len(data).to_bytes(4, "big") + data, until_ns)
        size = int.from_bytes(self._read(4, until_ns), "big")
        if size > ANSWER_BYTES_MAX:
            raise EOFError
        found = msgpack.unpackb(self._read(size, until_ns))
        return found if isinstance(found, dict) else {}

    def kill(self) -> None:
        """End the process whatever it does. Safe to call twice."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue
        with suppress(subprocess.TimeoutExpired):  # the kernel may keep it for a while
            self._process.wait(KILLED_S)

    def _wait(self, descriptor: int, event: int, until_ns: int) -> None:
        """Wait until a pipe is ready. poll, for a head may hold more descriptors than select can count."""
        left_ms = (until_ns - self._clock.now_ns()) // MS
        poll = select.poll()
        poll.register(descriptor, event)
        if left_ms <= 0 or not poll.poll(left_ms):
            raise _TooSlowError

    def _write(self, data: bytes, until_ns: int) -> None:
        assert self._process.stdin is not None
        descriptor = self._process.stdin.fileno()
        rest = memoryview(data)
        while rest:
            self._wait(descriptor, select.POLLOUT, until_ns)
            try:
                rest = rest[os.write(descriptor, rest[: 64 * KIB]) :]
            except BrokenPipeError:
                raise EOFError from None

    def _read(self, size: int, until_ns: int) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        parts: list[bytes] = []
        while size > 0:
            self._wait(descriptor, select.POLLIN, until_ns)
            part = os.read(descriptor, size)
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


class GrammarChecker:
    """Asks the processes. `check` and `lark_of` belong to the event loop, everything below to the threads."""

    def __init__(self, clock: Clock | None = None, *, check_ms: int = CHECK_MS) -> None:
        self._clock = clock or SystemClock()
        self._check_ms = check_ms
        self._threads = ThreadPoolExecutor(CHILDREN_MAX, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._is_closed = False
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._waiting = 0
        self.killed = 0

    @property
    def pids(self) -> list[int]:
        """Processes that wait for work."""
        with self._lock:
            return [child.pid for child in self._idle]

    async def check(self, key: str, collect: Collect, source: str) -> None:
        """Judge a grammar against the vocabulary called `key`. Raises InvalidRequestError(INVALID_GRAMMAR)."""
        digest = hashlib.sha256(f"{key}\0{source}".encode()).digest()
        if digest not in self._verdicts:
            found = await self._ask(key, collect, {"key": key, "source": source})
            self._verdicts[digest] = found.get("refused")
            while len(self._verdicts) > VERDICTS_MAX:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(digest)
        refused = self._verdicts[digest]
        if refused is not None:
            raise invalid_grammar(refused)

    async def lark_of(self, key: str, collect: Collect, gbnf: str) -> str:
        """Translate a GBNF grammar. Raises InvalidRequestError(INVALID_GRAMMAR)."""
        found = await self._ask(key, collect, {"key": key, "source": gbnf, "gbnf": True})
        if "lark" not in found:
            raise invalid_grammar(str(found.get("refused")))
        return str(found["lark"])

    def close(self) -> None:
        """Kill the processes and end the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for child in idle:
            child.kill()

    async def _ask(self, key: str, collect: Collect, question: dict[str, Any]) -> dict[str, Any]:
        if self._waiting >= WAITING_MAX:
            raise CapacityError(
                "too many constraints wait to be judged",
                code=ErrorCode.OVERLOADED,
                retry_after_ms=1_000,
            )
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._work, key, collect, question)
        finally:
            self._waiting -= 1

    # --- in the threads

    def _work(self, key: str, collect: Collect, question: dict[str, Any]) -> dict[str, Any]:
        child = self._take()
        is_fit = False
        try:
            found = self._judged(child, question)
            if found.get("unknown"):
                self._load(child, key, collect)
                found = self._judged(child, question)
            child.checks += 1
            is_fit = found.pop("is_fit", True) and child.checks < CHECKS_PER_CHILD
            return found
        finally:
            self._give(child, is_fit=is_fit)

    def _judged(self, child: _Child, question: dict[str, Any]) -> dict[str, Any]:
        try:
            return child.ask(question, self._check_ms)
        except _TooSlowError:
            return {"refused": "the constraint takes too long to compile", "is_fit": False}
        except EOFError:
            return {"refused": "the constraint takes too much memory to compile", "is_fit": False}

    def _load(self, child: _Child, key: str, collect: Collect) -> None:
        vocabulary = collect()
        question = {
            "key": key,
            "tokens": list(vocabulary.tokens),
            "eos": list(vocabulary.eos_ids),
            "special": sorted(vocabulary.special_ids),
        }
        try:
            refused = child.ask(question, START_MS).get("refused")
        except (_TooSlowError, EOFError):
            raise _not_up() from None
        if refused is not None:
            raise invalid_grammar(str(refused))

    def _take(self) -> _Child:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        child = _Child(self._clock)
        try:
            child.ask(GREETING, START_MS)
        except (_TooSlowError, EOFError):
            child.kill()
            raise _not_up() from None
        return child

    def _give(self, child: _Child, *, is_fit: bool) -> None:
        with self._lock:
            if is_fit and not self._is_closed:
                self._idle.append(child)
                return
            self.killed += 1
        child.kill()


def _not_up() -> CapacityError:
    return CapacityError(
        "the process that judges constraints does not come up", retry_after_ms=5_000
    )
