"""The regular part of one link: when to renew leases, when to ping, what to think of the node and its sessions. Pure.

Called every PERIOD_MS by the node's shell. Two additions to `Liveness`. While idle it pings every IDLE_PING_MS, well below the
15 s that would do for the idle timeout, because a lease counts from the node's last stamp: a stamp older than the lease would
open a session already fenced, and a frozen idle node would be found out by a client. And a session is judged by itself: it
stalls if the node works, or has nothing to do, and this session neither produces nor computes; a session that the
node has queued behind others is given LONG_STALL times as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from superfluid_core.clock import MS
from superfluid_core.limits import LinkLimits
from superfluid_core.link.heartbeat import Liveness, OwnPause, Verdict
from superfluid_core.wire.messages import Message, Ping, Renew, Status

PERIOD_MS = 100
IDLE_PING_MS = 2_000
LIVE_PING_MS = 1_000
QUIET_MS = 400
RISING_MS = 2_000
LONG_STALL = 6


class Placed(Protocol):
    """What the pulse looks at of a session: when it last moved on. Written on the head's own pause only."""

    progressed_ns: int
    is_acknowledged: bool


@dataclass(frozen=True, slots=True)
class Beat:
    """What one look at the link came to."""

    messages: tuple[Message, ...]
    verdict: Verdict


class Pulse:
    """Timers of one link."""

    def __init__(self, limits: LinkLimits, now_ns: int) -> None:
        self._limits = limits
        self._idle_ping_ms = min(IDLE_PING_MS, limits.ping_ms, limits.lease_ttl_ms // 5)
        self._liveness = Liveness(replace(limits, ping_ms=self._idle_ping_ms), now_ns)
        self._own_pause = OwnPause(limits, now_ns)
        self._renewed_ns = now_ns
        self._pinged_ns = now_ns
        self._nonce = 0
        self._steps = -1
        self._rose_ns = now_ns
        self._status: Status | None = None
        self._hung_steps: int | None = None

    def on_status(self, status: Status, now_ns: int) -> None:
        self._liveness.on_status(status, now_ns)
        if status.steps != self._steps:
            self._steps = status.steps
            self._rose_ns = now_ns
        if status.steps != self._hung_steps or status.lanes_busy == 0:
            self._hung_steps = None
        self._status = status

    def expect(self, now_ns: int) -> None:
        """Note that the next beat is due a period from now."""
        self._own_pause.expect(now_ns + PERIOD_MS * MS)

    def has_overslept(self, now_ns: int) -> bool:
        """Say whether this process slept; then the sockets are to be read before anyone is judged."""
        return self._own_pause.has_paused(now_ns)

    def forgive(self, slots: Iterable[Placed], now_ns: int) -> None:
        """Start all timers anew: the pause was ours."""
        self._liveness.forgive(now_ns)
        self._rose_ns = now_ns
        self._hung_steps = None
        for slot in slots:
            slot.progressed_ns = now_ns

    def beat(self, last_received_ns: int, stamp_ns: int, sessions: int, now_ns: int) -> Beat:
        """Look at the link once: what to send, and what to think of the node."""
        self._liveness.on_bytes(last_received_ns)
        messages: list[Message] = []
        if sessions and now_ns - self._renewed_ns >= self._limits.lease_renew_ms * MS:
            self._renewed_ns = now_ns
            messages.append(Renew(stamp_ns))
        if self._is_ping_due(last_received_ns, sessions, now_ns):
            self._pinged_ns = now_ns
            self._nonce += 1
            messages.append(Ping(self._nonce))
        verdict = self._liveness.verdict(now_ns, sessions)
        silence_ns = self._liveness.silence_ns(now_ns)
        suspect_ms = self._idle_ping_ms + self._limits.suspect_ms
        if verdict is Verdict.ALIVE and not sessions and silence_ns >= suspect_ms * MS:
            verdict = Verdict.SUSPECT
        if verdict is Verdict.HUNG:
            self._hung_steps = self._steps
        elif self._hung_steps is not None and verdict is not Verdict.DEAD:
            # Its sessions have moved away, so nothing is awaited of it; it stays hung until it moves.
            verdict = Verdict.HUNG
        return Beat(tuple(messages), verdict)

    def is_stalled(self, slot: Placed, now_ns: int) -> bool:
        """Judge one session of a node that is alive."""
        status = self._status
        if status is None:
            return False
        queued = sum(status.queued)
        is_idle = status.lanes_busy == 0 and queued == 0
        is_rising = now_ns - self._rose_ns < RISING_MS * MS
        if not (is_rising or is_idle):
            return False
        patience_ms = self._limits.session_stalled_ms
        if slot.is_acknowledged and queued > 0:
            patience_ms *= LONG_STALL
        return now_ns - slot.progressed_ns >= patience_ms * MS

    def _is_ping_due(self, last_received_ns: int, sessions: int, now_ns: int) -> bool:
        since_ping_ns = now_ns - self._pinged_ns
        if not sessions:
            return since_ping_ns >= self._idle_ping_ms * MS
        is_quiet = now_ns - last_received_ns >= QUIET_MS * MS
        return is_quiet and since_ping_ns >= LIVE_PING_MS * MS
