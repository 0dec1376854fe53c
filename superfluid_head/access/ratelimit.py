"""Token buckets per client, in integer nanoseconds. Pure: names and times in, verdicts out.

A bucket is one number, the time at which it will be full again (GCRA): nothing runs in the background, and a client that
was quiet for long costs nothing to forget. Bounded: beyond `clients_max` the client that was heard least recently is
forgotten, which can only be to its advantage.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

SECOND_NS = 1_000_000_000
MS_NS = 1_000_000
CLIENTS_MAX = 4_096


@dataclass(frozen=True, slots=True)
class RateLimit:
    """At most `burst` at once and `per_second` in the long run; 0 a second is no limit."""

    per_second: float
    burst: int

    @property
    def cost_ns(self) -> int:
        return round(SECOND_NS / self.per_second) if self.per_second > 0 else 0


class TokenBuckets:
    """One bucket for each client, all of one size."""

    def __init__(self, limit: RateLimit, clients_max: int = CLIENTS_MAX) -> None:
        self._limit = limit
        self._clients_max = clients_max
        self._full_ns: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_ns)

    def wait_ms(self, client: str, now_ns: int) -> int:
        """Return after how many milliseconds there will be one for `client`; 0 when there is."""
        cost_ns = self._limit.cost_ns
        start_ns = max(self._full_ns.get(client, 0), now_ns)
        over_ns = start_ns + cost_ns - now_ns - max(1, self._limit.burst) * cost_ns
        return -(-over_ns // MS_NS) if over_ns > 0 else 0

    def take(self, client: str, now_ns: int) -> int | None:
        """Take one for `client`: None when there was one, else after how many milliseconds there will be."""
        cost_ns = self._limit.cost_ns
        if not cost_ns:
            return None
        wait_ms = self.wait_ms(client, now_ns)
        if wait_ms:
            return wait_ms
        self._full_ns[client] = max(self._full_ns.get(client, 0), now_ns) + cost_ns
        self._full_ns.move_to_end(client)
        while len(self._full_ns) > self._clients_max:
            self._full_ns.popitem(last=False)
        return None
