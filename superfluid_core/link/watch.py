"""What a link's one timer goes by. Pure: times come in, verdicts go out.

A node drops a head that it has not heard from for its idle timeout. A head pings when either direction has been quiet for
the ping interval, at most a third of that timeout: its own silence is what the node would hold against it. A process that
slept must not judge by the time it was away: `forgive` starts the silence anew.
"""

from __future__ import annotations

from superfluid_core.clock import MS, SECOND
from superfluid_core.limits import LinkLimits
from superfluid_core.wire.schema import Role

PONGS_BURST = 10


class Watch:
    """Silence, pings and the answers to them, of one link."""

    def __init__(self, role: Role, limits: LinkLimits, now_ns: int) -> None:
        self.last_received_ns = now_ns
        self.last_sent_ns = now_ns
        self.round_trip_ns: int | None = None
        self._role = role
        self._idle_ns = limits.idle_timeout_ms * MS
        self._ping_ns = limits.ping_ms * MS
        self._own_pause_ns = limits.own_pause_ms * MS
        self._forgiven_ns = now_ns
        self._pinged_ns = now_ns
        self._ponged_ns = now_ns
        self._nonce = 0
        self._pongs = float(PONGS_BURST)

    def stay_below(self, idle_timeout_ms: int) -> None:
        """Ping often enough for the timeout that the node announced."""
        self._ping_ns = max(MS, min(self._ping_ns, idle_timeout_ms * MS // 3))

    def due_ns(self) -> int:
        """When to look again, if nothing comes or goes until then."""
        if self._role is Role.NODE:
            return max(self.last_received_ns, self._forgiven_ns) + self._idle_ns
        quiet_since_ns = min(self.last_received_ns, self.last_sent_ns)
        return max(quiet_since_ns, self._pinged_ns) + self._ping_ns

    def has_slept(self, due_ns: int, now_ns: int) -> bool:
        """Whether a wake-up that was due then comes so late that this process must have slept."""
        return now_ns - due_ns > self._own_pause_ns

    def forgive(self, now_ns: int) -> None:
        self._forgiven_ns = now_ns

    def is_idle(self, now_ns: int) -> bool:
        """Whether this node has waited long enough for its head."""
        return self._role is Role.NODE and now_ns >= self.due_ns()

    def next_ping(self, now_ns: int) -> int | None:
        """Return the nonce of a PING to send now, if this head should."""
        if self._role is Role.NODE or now_ns < self.due_ns():
            return None
        self._nonce += 1
        self._pinged_ns = now_ns
        return self._nonce

    def on_pong(self, nonce: int, now_ns: int) -> None:
        if nonce == self._nonce:
            self.round_trip_ns = now_ns - self._pinged_ns

    def may_answer(self, now_ns: int) -> bool:
        """Whether a PING gets its PONG: ten at once, then one a second; a flood is not answered."""
        filled = self._pongs + (now_ns - self._ponged_ns) / SECOND
        self._pongs = min(float(PONGS_BURST), filled)
        self._ponged_ns = now_ns
        if self._pongs < 1.0:
            return False
        self._pongs -= 1.0
        return True
