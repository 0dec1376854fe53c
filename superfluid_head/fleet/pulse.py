"""The regular part of one link: when to renew leases, when to ping, what to think of the node and its sessions. Pure.

Called by the node's shell every PERIOD_MS while sessions live, and when `ease_ns` says while none do. Three additions to `Liveness`. While idle it pings every IDLE_PING_MS, well below the
15 s that would do for the idle timeout, because a lease counts from the node's last stamp: a stamp older than the lease would
open a session already fenced, and a frozen idle node would be found out by a client. With sessions live it pings all the while,
and a node that speaks without answering is as suspect, then dead, as one that is silent (`echo.py`): it cannot hear. And a
session is judged by itself: it stalls if the node works, or has no lane in use, and this session neither produces nor computes;
a session that a node at work has queued behind others is given LONG_STALL times as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from superfluid_core.clock import MS
from superfluid_core.limits import LinkLimits
from superfluid_core.link.heartbeat import Liveness, OwnPause, Verdict
from superfluid_core.wire.messages import Message, Ping, Pong, Renew, Status
from superfluid_head.fleet.echo import Echo

PERIOD_MS = 100
IDLE_PING_MS = 1_500
EASE_MS = IDLE_PING_MS // 2
"""An idle link is looked at so often at least: a pause of ours is noticed by looks that come late."""
SLACK_MS = 5
"""A timer may end a little early, and the look that it is for would come to nothing."""
LIVE_PING_MS = 1_000
RISING_MS = 2_000
LONG_STALL = 6


class Placed(Protocol):
    """What the pulse looks at of a session: when it last moved on. Written on the head's own pause only."""

    progressed_ns: int
    is_acknowledged: bool


class Heard(NamedTuple):
    """What is known of the link at a look: when bytes came last, the node's newest stamp, how many bytes it was handed."""

    received_ns: int
    stamp_ns: int
    handed_bytes: int


@dataclass(frozen=True, slots=True)
class Beat:
    """What one look at the link came to."""

    messages: tuple[Message, ...]
    verdict: Verdict


_SILENT = {verdict: Beat((), verdict) for verdict in Verdict}
"""Most looks come to nothing to say."""


class Pulse:
    """Timers of one link. `stamp_ns` is the node's clock at its WELCOME."""

    def __init__(self, limits: LinkLimits, stamp_ns: int, now_ns: int) -> None:
        self._limits = limits
        self._idle_ping_ms = min(IDLE_PING_MS, limits.ping_ms, limits.lease_ttl_ms // 5)
        self._liveness = Liveness(replace(limits, ping_ms=self._idle_ping_ms), now_ns)
        self._own_pause = OwnPause(limits, now_ns)
        self._renewed_ns = now_ns
        self._pinged_ns = now_ns
        self._echo = Echo(stamp_ns, now_ns)
        self.rtt_ns: int | None = None
        self._steps = -1
        self._rose_ns = now_ns
        self._status: Status | None = None
        self._hung_steps: int | None = None
        self._verdict_last: Verdict | None = None
        self._heard_ns = now_ns

    def on_status(self, status: Status, now_ns: int) -> None:
        self._liveness.on_status(status, now_ns)
        if status.steps != self._steps:
            self._steps = status.steps
            self._rose_ns = now_ns
        if status.steps != self._hung_steps:
            self._hung_steps = None
        self._status = status

    def on_pong(self, pong: Pong, now_ns: int) -> None:
        """Take an answer to a PING, and the STATUS in it."""
        stamp_ns = None if pong.status is None else pong.status.stamp_ns
        asked_ns = self._echo.on_pong(pong.nonce, stamp_ns)
        if asked_ns is not None:
            self.rtt_ns = max(0, now_ns - asked_ns)
        if pong.status is not None:
            self.on_status(pong.status, now_ns)

    def ease_ns(self, now_ns: int) -> int:
        """Say for how long a look at this link would come to nothing, while it is idle and nothing is placed on it."""
        if self._verdict_last is not Verdict.ALIVE:
            return PERIOD_MS * MS
        suspect_ns = self._limits.suspect_ms * MS
        dues = [now_ns + EASE_MS * MS, self._pinged_ns + self._idle_ping_ms * MS]
        dues.append(self._heard_ns + self._idle_ping_ms * MS + suspect_ns)
        asked_ns = self._echo.oldest_ns
        if asked_ns is not None:
            dues.append(asked_ns + suspect_ns)
        return max(PERIOD_MS * MS, min(dues) - now_ns + SLACK_MS * MS)

    def expect(self, now_ns: int, ease_ns: int | None = None) -> None:
        """Note that the next beat is due `ease_ns` from now, or a period."""
        self._own_pause.expect(now_ns + (PERIOD_MS * MS if ease_ns is None else ease_ns))

    def has_overslept(self, now_ns: int) -> bool:
        """Say whether this process slept; then the sockets are to be read before anyone is judged."""
        return self._own_pause.has_paused(now_ns)

    def forgive(self, slots: Iterable[Placed], now_ns: int) -> None:
        """Take the pause that was noticed out of everything that is timed: it was ours."""
        paused_ns = self._own_pause.late_ns(now_ns)
        self._liveness.forgive(paused_ns, now_ns)
        self._echo.forgive(paused_ns, now_ns)
        self._rose_ns = min(now_ns, self._rose_ns + paused_ns)
        self._hung_steps = None
        for slot in slots:
            slot.progressed_ns = min(now_ns, slot.progressed_ns + paused_ns)

    def beat(self, heard: Heard, sessions: int, now_ns: int) -> Beat:
        """Look at the link once: what to send, and what to think of the node."""
        self._liveness.on_bytes(heard.received_ns)
        messages: list[Message] = []
        if sessions and now_ns - self._renewed_ns >= self._limits.lease_renew_ms * MS:
            self._renewed_ns = now_ns
            messages.append(Renew(heard.stamp_ns))
        ping_ms = LIVE_PING_MS if sessions else self._idle_ping_ms
        if now_ns - self._pinged_ns >= ping_ms * MS:
            self._pinged_ns = now_ns
            nonce = self._echo.ask(heard.handed_bytes, now_ns)
            messages += [] if nonce is None else [Ping(nonce)]
        verdict = self._verdict(heard, sessions, now_ns)
        if verdict is Verdict.HUNG:
            self._hung_steps = self._steps
        elif self._hung_steps is not None and verdict is not Verdict.DEAD:
            # Its sessions have moved away and its lanes look free; the step that hangs is still to end.
            verdict = Verdict.HUNG
        self._verdict_last, self._heard_ns = verdict, heard.received_ns
        return Beat(tuple(messages), verdict) if messages else _SILENT[verdict]

    def _verdict(self, heard: Heard, sessions: int, now_ns: int) -> Verdict:
        """Judge by silence and by answers that are owed, whichever is worse."""
        limits = self._limits
        verdict = self._liveness.verdict(now_ns, sessions)
        deaf_ns = self._echo.deaf_ns(heard.stamp_ns, heard.received_ns, now_ns)
        if verdict is Verdict.DEAD or deaf_ns >= limits.dead_ms * MS:
            return Verdict.DEAD
        silence_ns = self._liveness.silence_ns(now_ns)
        suspect_ms = self._idle_ping_ms + limits.suspect_ms
        is_quiet = not sessions and silence_ns >= suspect_ms * MS
        is_suspect = is_quiet or deaf_ns >= limits.suspect_ms * MS
        return Verdict.SUSPECT if verdict is Verdict.ALIVE and is_suspect else verdict

    def is_stalled(self, slot: Placed, now_ns: int) -> bool:
        """Judge one session of a node that is alive."""
        status = self._status
        if status is None:
            return False
        is_rising = now_ns - self._rose_ns < RISING_MS * MS
        if status.lanes_busy > 0 and not is_rising:
            return False  # that is for the verdict on its engine
        patience_ms = self._limits.session_stalled_ms
        if slot.is_acknowledged and sum(status.queued) > 0 and is_rising:
            patience_ms *= LONG_STALL
        return now_ns - slot.progressed_ns >= patience_ms * MS
