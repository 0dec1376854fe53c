"""How fast the engine is, measured: the cost of a decode step per batch size, and prompt tokens a second.

Exponentially weighted, so that a slow first step is forgotten within a few. Zero or None means unknown: nobody here
guesses before the first measurement. Mixed steps teach the prefill rate, pure decode steps the step times.
"""

from __future__ import annotations

from bisect import bisect_left, insort

_WEIGHT = 0.2
_DECAY = 0.9
_SECOND_NS = 1_000_000_000


class Rates:
    """Fed with every step; answers what a step or a prompt will cost."""

    def __init__(self) -> None:
        self._step_ns: dict[int, float] = {}
        self._batches: list[int] = []
        self._prefill_tokens = 0.0
        self._prefill_ns = 0.0
        self._service_ns = 0.0
        self._finished = 0

    def on_step(self, decoded: int, prefilled: int, elapsed_ns: int) -> None:
        if elapsed_ns <= 0:
            return
        if prefilled:
            self._prefill_tokens = self._prefill_tokens * _DECAY + prefilled
            self._prefill_ns = self._prefill_ns * _DECAY + elapsed_ns
        elif decoded:
            known = self._step_ns.get(decoded)
            if known is None:
                insort(self._batches, decoded)
                self._step_ns[decoded] = float(elapsed_ns)
            else:
                self._step_ns[decoded] = known + (elapsed_ns - known) * _WEIGHT

    def on_finish(self, service_ns: int) -> None:
        """Learn from a session that left its lane for good after `service_ns` in it."""
        self._finished += 1
        weight = max(_WEIGHT / 4, 1 / self._finished)
        self._service_ns += (service_ns - self._service_ns) * weight

    def step_ns(self, batch: int) -> int:
        """Predict a decode step; 0 while nothing was measured. Unknown sizes take the next known above."""
        if not self._batches:
            return 0
        place = min(bisect_left(self._batches, batch), len(self._batches) - 1)
        return max(1, round(self._step_ns[self._batches[place]]))

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second; 0.0 while unknown."""
        return self._prefill_tokens * _SECOND_NS / self._prefill_ns if self._prefill_ns else 0.0

    def prefill_ns(self, tokens: int) -> int:
        """Predict the time to compute `tokens` prompt tokens; 0 while unknown."""
        if not self._prefill_tokens:
            return 0
        return round(tokens * self._prefill_ns / self._prefill_tokens)

    def decode_rates(self) -> tuple[tuple[int, float], ...]:
        """(batch, tokens a second over the batch) for every measured size."""
        return tuple((batch, batch * _SECOND_NS / self._step_ns[batch]) for batch in self._batches)

    @property
    def service_ns(self) -> int:
        """Mean time a session holds a lane; 0 while unknown."""
        return round(self._service_ns)

    def drain_ns(self, queued: int, lanes: int) -> int:
        """Predict the time until `queued` sessions have been given a lane; 0 while unknown."""
        return round(self._service_ns * queued / max(1, lanes))
