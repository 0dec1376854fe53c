"""Gate G6: when too much of the work is done twice, fewer lanes may be busy.

Over a window of 30 s, recomputed tokens are weighed against newly computed ones. Every period above the limit takes
one lane away, every period below gives one back; one lane always stays.
"""

from __future__ import annotations

from collections import deque

_BUCKET_NS = 1_000_000_000
_WINDOW_BUCKETS = 30
_TOKENS_MIN = 512


class Thrash:
    """Counts computed tokens in one-second buckets and says how many lanes may be busy."""

    def __init__(self, lanes: int, limit_pct: int, period_ns: int) -> None:
        self._lanes = lanes
        self._limit_pct = limit_pct
        self._period_ns = period_ns
        self._allowed = lanes
        self._judged_ns: int | None = None
        # bucket number, fresh tokens, recomputed tokens
        self._buckets: deque[list[int]] = deque()
        self._last = [-1, 0, 0]
        self._fresh = 0
        self._again = 0
        self.trips = 0

    def on_tokens(self, fresh: int, again: int, now_ns: int) -> None:
        number = now_ns // _BUCKET_NS
        last = self._last
        if last[0] != number:
            last = self._last = [number, 0, 0]
            self._buckets.append(last)
            self._expire(number)
        last[1] += fresh
        last[2] += again
        self._fresh += fresh
        self._again += again

    @property
    def allowed(self) -> int:
        """How many lanes may be busy, as last judged."""
        return self._allowed

    @property
    def ratio(self) -> float:
        """Recomputed over newly computed tokens within the window."""
        return self._again / self._fresh if self._fresh else float(bool(self._again))

    def lanes_allowed(self, now_ns: int) -> int:
        """How many lanes may be busy from now on."""
        if not self._limit_pct or (self._allowed == self._lanes and not self._again):
            return self._lanes
        if self._judged_ns is None or now_ns - self._judged_ns >= self._period_ns:
            self._expire(now_ns // _BUCKET_NS)
            is_over = (
                self._again * 100 > self._limit_pct * self._fresh
                and self._fresh + self._again >= _TOKENS_MIN
            )
            if is_over:
                self.trips += self._allowed == self._lanes
                self._allowed = max(1, self._allowed - 1)
            else:
                self._allowed = min(self._lanes, self._allowed + 1)
            self._judged_ns = now_ns
        return self._allowed

    def _expire(self, number: int) -> None:
        while self._buckets and self._buckets[0][0] <= number - _WINDOW_BUCKETS:
            _, fresh, again = self._buckets.popleft()
            self._fresh -= fresh
            self._again -= again
