"""A connection whose writes of one turn of the event loop leave together: each system call costs more than what it carries.

Owns what was written in this turn and is not with the transport yet. An answer's status line, its first events and its last ones are
made in one turn mostly; each would be a packet, and wake the reader, of its own. It must not know HTTP.
"""

from __future__ import annotations

import asyncio
from typing import Any

GATHERED_BYTES_MAX = 65_536


class Gathering:
    """The part of a Transport that uvicorn uses. What is written leaves at the end of the turn, at once when it is much."""

    __slots__ = ("_bytes", "_loop", "_parts", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._bytes = 0

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)
        self._bytes += len(data)
        if self._bytes > GATHERED_BYTES_MAX:
            self.flush()

    def write_now(self, data: bytes) -> None:
        """Write without waiting for the turn's end, behind what does wait."""
        if self._parts:
            self._parts.append(data)
            self.flush()
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Hand the transport what has been gathered."""
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            self._bytes = 0
            self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._parts.clear()
        self._bytes = 0
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high=high, low=low)

    def get_extra_info(self, name: str) -> Any:
        return self._transport.get_extra_info(name)
