"""How fast the engine is, measured: the cost of a decode step per batch size, and prompt tokens a second.

Exponentially weighted, so that a slow first step is forgotten within a few. Zero or None means unknown: nobody here
guesses before the first measurement. Pure decode steps teach the step times. Steps with prompt tokens teach what such a step
takes, how that grows with what it carries, and what the prompt tokens alone add to the decode step that they ride on: on a node
that decodes anyway a short prompt costs far less than its step takes, and who takes the one for the other lets few in at a time.
What nodes are compared by is taken from steps that are mostly prompt: the same machine computes single short prompts in steps that
take thirty times as long by the token as those of four of them on idle lanes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

_WEIGHT = 0.2
_DECAY = 0.9
_SPREAD_MIN = 1e-6
_ADDED_SHARE_MIN = 1 / 8
"""Of a step, prompt tokens take at least this: less is lost in how unevenly steps run."""
_SECOND_NS = 1_000_000_000
_TELLING_NS = 10_000_000
"""Prompt tokens that add less than this to a step, or less than it takes without them, do not tell how fast they are computed."""
_TOLD_KEPT = 9


class _Growth:
    """The line through recent steps with prompt tokens: what one more token of the step adds to its time."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, tokens: int, elapsed_ns: int) -> None:
        self._weight = self._weight * _DECAY + 1
        self._x = self._x * _DECAY + tokens
        self._y = self._y * _DECAY + elapsed_ns
        self._xx = self._xx * _DECAY + tokens * tokens
        self._xy = self._xy * _DECAY + tokens * elapsed_ns

    def line(self) -> tuple[float, float]:
        """(ns of no token, ns a token). Steps of one size alone, or a line that falls, tell only their mean cost of a token."""
        spread = self._weight * self._xx - self._x * self._x
        slope = self._weight * self._xy - self._x * self._y
        if spread <= _SPREAD_MIN * self._x * self._x or slope <= 0:
            return 0.0, self._y / self._x if self._x else 0.0
        slope /= spread
        return (self._y - slope * self._x) / self._weight, slope


class Rates:
    """Fed with every step; answers what a step or a prompt will cost."""

    def __init__(self) -> None:
        self._step_ns: dict[int, float] = {}
        self._batches: list[int] = []
        self._prefill_tokens = 0.0
        self._prefill_ns = 0.0
        self._added_ns = 0.0
        self._growth = _Growth()
        self._told: deque[float] = deque(maxlen=_TOLD_KEPT)
        self._service_ns = 0.0
        self._finished = 0

    def on_step(self, decoded: int, prefilled: int, elapsed_ns: int) -> None:
        if elapsed_ns <= 0:
            return
        if prefilled:
            self._prefill_tokens = self._prefill_tokens * _DECAY + prefilled
            self._prefill_ns = self._prefill_ns * _DECAY + elapsed_ns
            beneath_ns = self.step_ns(decoded) if decoded else 0
            alone_ns = elapsed_ns - beneath_ns
            if alone_ns >= max(beneath_ns, _TELLING_NS) and (beneath_ns or not decoded):
                self._told.append(prefilled * _SECOND_NS / alone_ns)
            added_ns = max(alone_ns, elapsed_ns * _ADDED_SHARE_MIN)
            self._added_ns = self._added_ns * _DECAY + added_ns
            self._growth.add(prefilled + decoded, elapsed_ns)
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
        """Prompt tokens a second of steps that have any, whatever else these carry; 0.0 while unknown."""
        return self._prefill_tokens * _SECOND_NS / self._prefill_ns if self._prefill_ns else 0.0

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second without the decoding beside them, by which nodes are compared; 0.0 while unknown.

        The (upper) median of the last steps that tell it: a step that stalled is slow, and none is fast by accident.
        """
        return sorted(self._told)[len(self._told) // 2] if self._told else 0.0

    def prefill_added_ns(self, tokens: int) -> int:
        """Predict what `tokens` prompt tokens add to the steps that carry them; 0 while unknown."""
        if not self._prefill_tokens:
            return 0
        return round(tokens * self._added_ns / self._prefill_tokens)

    def prefill_ns(self, tokens: int) -> int:
        """Predict the time of the steps that compute `tokens` prompt tokens, all of it; 0 while unknown."""
        if not self._prefill_tokens:
            return 0
        return round(tokens * self._prefill_ns / self._prefill_tokens)

    def riding_ns(self, tokens: int, lanes: int) -> float:
        """Predict what `tokens` prompt tokens add to a step in which `lanes` decode; 0.0 while unknown.

        Nothing, up to what such a step has room for while it waits for memory; then what a token adds to a step, as measured.
        No token adds nothing, whatever the line through the measured steps says.
        """
        fixed_ns, token_ns = self._growth.line()
        beneath_ns = max(0.0, self.step_ns(lanes) - fixed_ns - lanes * token_ns)
        return max(0.0, tokens * token_ns - beneath_ns)

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
