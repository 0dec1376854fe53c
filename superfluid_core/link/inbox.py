"""Messages that wait for the consumer. Pure; it knows when reading should pause, and when it may go on.

Not a bound by itself: what one read of the transport carries is taken in whole, then reading pauses.
"""

from __future__ import annotations

from collections import deque

from superfluid_core.wire.codec import estimate_bytes
from superfluid_core.wire.messages import Message

MESSAGES_MAX = 256
BYTES_MAX = 1024 * 1024


class Inbox:
    """A queue of messages with an estimate of their bytes."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Message, int]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, message: Message) -> None:
        size = estimate_bytes(message)
        self._queue.append((message, size))
        self._bytes += size

    def pop(self) -> Message:
        message, size = self._queue.popleft()
        self._bytes -= size
        return message

    @property
    def is_full(self) -> bool:
        """The consumer is behind: read no more."""
        return len(self._queue) > MESSAGES_MAX or self._bytes > BYTES_MAX

    @property
    def has_room(self) -> bool:
        """At most half full: read on."""
        return len(self._queue) <= MESSAGES_MAX // 2 and self._bytes <= BYTES_MAX // 2
