"""Is the node alive? Pure: whoever owns the link says what came and asks for a verdict.

    silent with sessions live   SUSPECT after 1 s (nothing new is placed), DEAD after 3 s
    silent without sessions     DEAD only when a PING of the idle link has gone unanswered
    STATUS fresh, steps frozen  HUNG after max(5 s, 4 x the predicted step) with lanes in use

A silence counts from the later of the last byte and the moment sessions became live: an idle node owes nothing. A head that
was itself asleep must read what has come before it judges anyone: `OwnPause` notices, and `Liveness.forgive` takes the pause out of
what it counts. It does not start anew: a head that is short of time pauses often, and would never find out who is dead.
"""

from __future__ import annotations

from enum import StrEnum

from superfluid_core.clock import MS
from superfluid_core.limits import LinkLimits
from superfluid_core.wire.messages import Status

_STEPS_TO_HANG = 4


class Verdict(StrEnum):
    """What to think of a node."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    HUNG = "hung"


class Liveness:
    """One node's signs of life, as one head sees them."""

    def __init__(self, limits: LinkLimits, now_ns: int) -> None:
        self._limits = limits
        self._bytes_ns = now_ns
        self._live_since_ns: int | None = None
        self._steps = -1
        self._moved_ns = now_ns
        self._predicted_ms = 0
        self._is_busy = False

    def on_bytes(self, now_ns: int) -> None:
        """Note that anything at all came from the node."""
        self._bytes_ns = max(self._bytes_ns, now_ns)

    def on_status(self, status: Status, now_ns: int) -> None:
        """Note a STATUS (or the one in a PONG): the step counter tells whether the engine moves."""
        self.on_bytes(now_ns)
        is_busy = status.lanes_busy > 0
        if status.steps != self._steps or not is_busy or not self._is_busy:
            self._moved_ns = now_ns
        self._steps = status.steps
        self._is_busy = is_busy
        self._predicted_ms = status.step_predicted_ms

    def forgive(self, paused_ns: int, now_ns: int) -> None:
        """Take a pause of ours out of every silence, and leave nobody less than a moment to be heard."""
        limits = self._limits
        patient_ns = now_ns - max(0, limits.dead_ms - limits.suspect_ms) * MS
        self._bytes_ns = min(now_ns, max(self._bytes_ns + paused_ns, patient_ns))
        self._moved_ns = min(now_ns, self._moved_ns + paused_ns)
        if self._live_since_ns is not None:
            self._live_since_ns = min(now_ns, self._live_since_ns + paused_ns)

    def silence_ns(self, now_ns: int) -> int:
        """How long nothing came that should have."""
        if self._live_since_ns is None:
            return now_ns - self._bytes_ns
        return now_ns - max(self._bytes_ns, self._live_since_ns)

    def verdict(self, now_ns: int, sessions_live: int) -> Verdict:
        """Judge the node; `sessions_live` counts this head's sessions on it."""
        limits = self._limits
        if sessions_live <= 0:
            self._live_since_ns = None
            unanswered_ms = limits.ping_ms + limits.dead_ms
            is_gone = self.silence_ns(now_ns) >= unanswered_ms * MS
            return Verdict.DEAD if is_gone else Verdict.ALIVE
        if self._live_since_ns is None:
            self._live_since_ns = now_ns
        silence_ns = self.silence_ns(now_ns)
        if silence_ns >= limits.dead_ms * MS:
            return Verdict.DEAD
        if silence_ns >= limits.suspect_ms * MS:
            return Verdict.SUSPECT
        hung_ms = max(limits.engine_hung_ms, _STEPS_TO_HANG * self._predicted_ms)
        if self._is_busy and now_ns - self._moved_ns >= hung_ms * MS:
            return Verdict.HUNG
        return Verdict.ALIVE


class OwnPause:
    """Notices that this process slept, from how late a regular wake-up came."""

    def __init__(self, limits: LinkLimits, now_ns: int) -> None:
        self._pause_ns = limits.own_pause_ms * MS
        self._due_ns = now_ns

    def expect(self, due_ns: int) -> None:
        """Note when the next wake-up is meant to come."""
        self._due_ns = due_ns

    def has_paused(self, now_ns: int) -> bool:
        """Whether the wake-up came over a second late: then drain every socket once before judging."""
        return self.late_ns(now_ns) > self._pause_ns

    def late_ns(self, now_ns: int) -> int:
        """How late the wake-up came."""
        return max(0, now_ns - self._due_ns)
