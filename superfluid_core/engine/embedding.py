"""Texts on their way to vectors, beside the ticks of one engine: in a line of their own, a short turn at a time.

Owns the line and its bounds. A text is computed in passes of few tokens; a turn is one pass, or as many as begin within `TURN_MS`. It is
handed to the engine thread only behind the plan that was made before it, and one at a time, so ticks and turns alternate. No
scheduler knows of this: nothing here touches the pool or the lanes. Only the event loop's thread calls the line; `step` is the engine thread's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from superfluid_core.clock import MS, Clock
from superfluid_core.errors import EngineError, SuperfluidError

EMBEDDINGS_MAX = 64
TURN_MS = 200
POOLINGS = ("mean", "last")

Outcome = bytes | SuperfluidError


@runtime_checkable
class Embedder(Protocol):
    """An engine that can embed."""

    def embed(self, ids: Sequence[int], pooling: str) -> Iterator[bytes | None]:
        """Compute in bounded passes: None after each, at last the vector, little-endian float32 of length 1.

        `pooling` may also be a wish for scores (scores.py).
        Raises SuperfluidError when this text cannot be done; the engine goes on.
        """
        ...


class Embedding:
    """One text. `done` hears on the event loop what came of it, once."""

    def __init__(self, ids: Sequence[int], pooling: str, done: Callable[[Outcome], None]) -> None:
        self._ids = ids
        self._pooling = pooling
        self._passes: Iterator[bytes | None] | None = None
        self.done = done
        self.outcome: Outcome | None = None
        self.is_wanted: Callable[[], bool] = lambda: True

    def step(self, engine: Embedder, clock: Clock) -> None:
        """Run passes for a turn, one at least, in the engine thread. Raises what breaks the engine."""
        until_ns = clock.now_ns() + TURN_MS * MS
        if self._passes is None:
            self._passes = engine.embed(self._ids, self._pooling)
        try:
            self.outcome = next(self._passes)
            while self.outcome is None and clock.now_ns() < until_ns:
                self.outcome = next(self._passes)
        except EngineError:
            raise
        except SuperfluidError as error:
            self.outcome = error


class EmbeddingLine:
    """The texts of one engine, in order."""

    def __init__(self) -> None:
        self._waiting: deque[Embedding] = deque()
        self._running: Embedding | None = None

    @property
    def is_running(self) -> bool:
        """The engine thread has a pass."""
        return self._running is not None

    @property
    def is_empty(self) -> bool:
        """No text runs or waits."""
        return self._running is None and not self._waiting

    def add(self, text: Embedding) -> bool:
        """Take a text; False when the line is full."""
        if len(self._waiting) >= EMBEDDINGS_MAX:
            return False
        self._waiting.append(text)
        return True

    def next(self) -> Embedding | None:
        """Give what the engine thread is to run now; None while it has a pass, or when there is nothing."""
        if self._running is not None:
            return None
        while self._waiting:
            text = self._waiting.popleft()
            if text.is_wanted():
                self._running = text
                return text
        return None

    def settle(self, text: Embedding) -> None:
        """Take a pass back from the engine thread: the text is done, or the next in the line."""
        self._running = None
        if text.outcome is None:
            self._waiting.appendleft(text)
        else:
            text.done(text.outcome)
