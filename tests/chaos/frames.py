"""Counts the TOKENS frames that pass a proxy in the clear, and when: what a node says that no head listens to any more."""

from __future__ import annotations

from superfluid_core.clock import MS, SystemClock
from superfluid_core.wire.codec import encode
from superfluid_core.wire.frames import HEADER, HEADER_BYTES
from superfluid_core.wire.messages import TokenRow, Tokens
from tests.chaos.proxy import Way

TOKENS_TYPE = HEADER.unpack(encode(Tokens((TokenRow(1, 1, 0, (1,)),)))[:HEADER_BYTES])[1]


class FrameCounter:
    """A tap for one node's proxy: arrivals of TOKENS frames and their connections. `newest` is the number of the last one."""

    def __init__(self) -> None:
        self._waiting: dict[int, bytearray] = {}
        self._clock = SystemClock()
        self.newest = 0
        self._tokens: list[tuple[float, int]] = []

    def __call__(self, connection: int, way: Way, data: bytes) -> None:
        if way is not Way.DOWN:
            return
        self.newest = max(self.newest, connection)
        buffer = self._waiting.setdefault(connection, bytearray())
        buffer += data
        while len(buffer) >= HEADER_BYTES:
            header = HEADER.unpack_from(buffer)
            whole = HEADER_BYTES + header[0]
            if len(buffer) < whole:
                break
            if header[1] == TOKENS_TYPE:
                self._tokens.append((self._clock.now_ns() / MS, connection))
            del buffer[:whole]

    def since(self, at_ms: float, newest: int) -> int:
        """Count the frames that came since, on connections up to number `newest`."""
        return sum(at >= at_ms and connection <= newest for at, connection in self._tokens)
