"""A TCP proxy that passes everything on and keeps what it saw: the proof that nobody on the way reads a prompt.

One thread, one selector, loopback only. It is for short exchanges: what it keeps is bounded by `SEEN_BYTES_MAX`, and it
refuses to go on beyond that rather than forget.
"""

from __future__ import annotations

import selectors
import socket
import threading
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
