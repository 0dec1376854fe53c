"""Whether a node still hears its head: the PINGs of one link and the answers that are owed. Pure.

A link can break one way: the node's words keep coming and nothing that the head says arrives. So what is judged is the age
of the oldest PING without an answer, and only by what the node itself has said since: its newest stamp tells when that was,
counted from the last answer, so neither a full pipe on the way back nor a head that reads late makes a node look deaf; only
when nothing comes at all do moments count without its word. On the way there what was handed to the link before that PING gets the time that a slow but honest pipe may take for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from superfluid_core.clock import SECOND
from superfluid_core.limits import WireLimits

OWED_MAX = 64
NONCE_FIRST = 1 << 32
"""Above the nonces of the link's own pings: an answer to one of those says nothing of ours."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """One PING. `handed` counts the bytes that were handed to the link before it."""

    nonce: int
    at_ns: int
    handed: int


class Echo:
    """Answers owed on one link. `stamp_ns` is the stamp of the node's WELCOME."""

    def __init__(self, stamp_ns: int, now_ns: int) -> None:
        wire = WireLimits()
        self._bytes_per_s = wire.open_bytes_max // wire.open_seconds
        self._owed: deque[_Asked] = deque()
        self._nonce = NONCE_FIRST
        self._heard = _Asked(0, now_ns, 0)
        self._heard_stamp_ns: int | None = stamp_ns

    @property
    def oldest_ns(self) -> int | None:
        """When the oldest PING that is owed an answer was asked for."""
        return self._owed[0].at_ns if self._owed else None

    def ask(self, handed: int, now_ns: int) -> int | None:
        """Return the nonce of a PING to send now; None while far too many are unanswered."""
        if len(self._owed) >= OWED_MAX:
            return None
        self._nonce += 1
        self._owed.append(_Asked(self._nonce, now_ns, handed))
        return self._nonce

    def on_pong(self, nonce: int, stamp_ns: int | None) -> int | None:
        """Take an answer: it settles every PING up to its own. `stamp_ns` is the node's, if it came with one.

        Returns when that PING was asked for; None if it was not owed.
        """
        is_owed = False
        while self._owed and self._owed[0].nonce <= nonce <= self._nonce:
            self._heard, self._heard_stamp_ns = self._owed.popleft(), stamp_ns
            is_owed = True
        return self._heard.at_ns if is_owed else None

    def forgive(self, paused_ns: int, now_ns: int) -> None:
        """Take a pause of ours out of what is owed."""
        self._owed = deque(
            _Asked(one.nonce, min(now_ns, one.at_ns + paused_ns), one.handed) for one in self._owed
        )
        heard = self._heard
        self._heard = _Asked(heard.nonce, min(now_ns, heard.at_ns + paused_ns), heard.handed)

    def deaf_ns(self, stamp_ns: int, received_ns: int, now_ns: int) -> int:
        """Say for how long an answer is owed: while the node spoke, up to its stamp `stamp_ns`, and since it fell silent."""
        if not self._owed:
            return 0
        oldest, heard = self._owed[0], self._heard
        spoke_ns = now_ns
        if self._heard_stamp_ns is not None:
            word_ns = heard.at_ns + stamp_ns - self._heard_stamp_ns
            spoke_ns = min(now_ns, word_ns + now_ns - received_ns)
        on_its_way_ns = max(0, oldest.handed - heard.handed) * SECOND // self._bytes_per_s
        return max(0, spoke_ns - oldest.at_ns - on_its_way_ns)
