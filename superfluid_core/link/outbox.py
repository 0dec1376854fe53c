"""Messages that wait for the transport, as values, with an estimate of their bytes. Pure.

They stay values so that what a fenced session still has queued can be taken out again, row by row.
"""

from __future__ import annotations

from collections import deque

from superfluid_core.wire.codec import estimate_bytes
from superfluid_core.wire.messages import Message, Tokens


class Outbox:
    """A queue of messages; whoever fills it looks at `bytes`."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Message, int]] = deque()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, message: Message) -> None:
        size = estimate_bytes(message)
        self._queue.append((message, size))
        self.bytes += size

    def pop(self) -> Message:
        message, size = self._queue.popleft()
        self.bytes -= size
        return message

    def purge(self, session: int, epoch: int) -> int:
        """Take out every message and every row of TOKENS of a placement; returns how many."""
        kept: deque[tuple[Message, int]] = deque()
        purged = 0
        for message, size in self._queue:
            if isinstance(message, Tokens):
                rows = tuple(
                    row for row in message.rows if (row.session, row.epoch) != (session, epoch)
                )
                purged += len(message.rows) - len(rows)
                if not rows:
                    continue
                rest = message if len(rows) == len(message.rows) else Tokens(rows)
                kept.append((rest, size if rest is message else estimate_bytes(rest)))
            elif (
                getattr(message, "session", 0) == session
                and getattr(message, "epoch", None) == epoch
            ):
                purged += 1
            else:
                kept.append((message, size))
        self._queue = kept
        self.bytes = sum(size for _, size in kept)
        return purged

    def clear(self) -> None:
        self._queue.clear()
        self.bytes = 0
