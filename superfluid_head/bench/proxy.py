"""TCP proxies on loopback: one keeps what it saw, the proof that nobody on the way reads a prompt; one can become a black hole.

One thread, one selector, loopback only. It is for short exchanges: what it keeps is bounded by `SEEN_BYTES_MAX`, and it
refuses to go on beyond that rather than forget. A hole keeps what it swallows, as the network's own buffers would, and gives it
out when it is filled.
"""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

SEEN_BYTES_MAX = 64 * 1024 * 1024
RECEIVE_BYTES = 65536


class RecordingProxy:
    """Listens on a free port of loopback and connects to `target` for every client."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host.strip("[]"), int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        self._is_closed = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="recording-proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            for key, _ in self._selector.select(timeout=0.1):
                if key.data is None:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj.fileno() != -1:
                    self._pass_on(key.fileobj, key.data)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._target, timeout=5)
        except OSError:
            near.close()
            return
        self._selector.register(near, selectors.EVENT_READ, far)
        self._selector.register(far, selectors.EVENT_READ, near)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            data = source.recv(RECEIVE_BYTES)
            if data and len(self.seen) + len(data) <= SEEN_BYTES_MAX:
                self.seen += data
                target.sendall(data)
                return
        except OSError:
            data = b""
        for end in (source, target):
            self._selector.unregister(end)
            end.close()

    def close(self) -> None:
        """End every connection. Idempotent."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._thread.join(timeout=5)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()


class HoleProxy(RecordingProxy):
    """Swallows what goes to its target, what comes from it, or both, while it is told to; connections stand all the time."""

    def __init__(self, target: str) -> None:
        self._held: dict[socket.socket, bytearray] = {}
        self._lock = threading.Lock()
        self._swallows: frozenset[str] = frozenset()
        self._near: set[socket.socket] = set()
        super().__init__(target)

    def open_hole(self, *directions: str) -> None:
        """Swallow from now on: "to" the target, "from" it."""
        with self._lock:
            self._swallows = frozenset(directions)

    def fill_hole(self) -> None:
        """Pass on again, first what was swallowed."""
        with self._lock:
            self._swallows = frozenset()
            held, self._held = self._held, {}
            for target, data in held.items():
                with suppress(OSError):
                    target.sendall(data)

    def _accept(self) -> None:
        known = {key.fileobj for key in self._selector.get_map().values()}
        super()._accept()
        fresh = [key for key in self._selector.get_map().values() if key.fileobj not in known]
        # Of the two new sockets the first is the near one: it is registered first.
        self._near |= {key.fileobj for key in fresh[:1] if isinstance(key.fileobj, socket.socket)}

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        direction = "to" if source in self._near else "from"
        with self._lock:
            if direction not in self._swallows:
                self.seen.clear()
                super()._pass_on(source, target)
                return
            with suppress(OSError):
                held = self._held.setdefault(target, bytearray())
                data = source.recv(RECEIVE_BYTES)
                if data and len(held) + len(data) <= SEEN_BYTES_MAX:
                    held += data
                    return
        super()._pass_on(source, target)
