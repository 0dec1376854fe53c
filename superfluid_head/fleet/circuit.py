"""Rests a node that keeps failing: a circuit per node, pure.

    CLOSED --`faults_to_open` faults within the window--> OPEN --time--> HALF (one probe) --success--> CLOSED, warming up
                                                           ^--fault-----'     each time it opens, twice as long

While it warms up, its lanes come back in proportion to the time; so do those of a node that has just joined. The last healthy
node is never opened: the caller says whether another one stands. Busy answers and refused requests never get here.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from superfluid_core.clock import MS
from superfluid_core.limits import FleetLimits


class CircuitState(StrEnum):
    """What a node may take: anything, nothing, one probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF = "half-open"


class Circuit:
    """Faults of one node, and when it may work again."""

    def __init__(self, limits: FleetLimits) -> None:
        self._limits = limits
        self._faults: deque[int] = deque(maxlen=limits.faults_to_open)
        self._open_until_ns: int | None = None
        self._open_ms = limits.circuit_open_ms
        self._warm_at_ns: int | None = None
        self._is_probing = False

    def fault(self, now_ns: int, *, is_last_healthy: bool) -> bool:
        """Count a fault. Returns True if the circuit opened by it."""
        self._faults.append(now_ns)
        if self.state(now_ns) is CircuitState.OPEN:
            return False
        is_probe = self.state(now_ns) is CircuitState.HALF
        window_ns = self._limits.fault_window_ms * MS
        is_full = (
            len(self._faults) == self._limits.faults_to_open
            and now_ns - self._faults[0] <= window_ns
        )
        if is_last_healthy or not (is_full or is_probe):
            return False
        if is_probe:
            self._open_ms = min(2 * self._open_ms, self._limits.circuit_open_ms_max)
        self._open_until_ns = now_ns + self._open_ms * MS
        self._is_probing = False
        self._warm_at_ns = None
        return True

    def success(self, now_ns: int) -> None:
        """Note that a session made progress here: a half-open circuit closes."""
        if self.state(now_ns) is CircuitState.HALF:
            self._open_until_ns = None
            self._open_ms = self._limits.circuit_open_ms
            self._is_probing = False
            self._faults.clear()
            self._warm_at_ns = now_ns

    def warm_up(self, now_ns: int) -> None:
        """Note that the node has just joined, or come back."""
        self._warm_at_ns = now_ns

    @property
    def is_settled(self) -> bool:
        """True when time alone will not change what it says: closed, and warm as of the last `allowance`."""
        return self._open_until_ns is None and self._warm_at_ns is None

    def probe(self) -> None:
        """Note that a session was placed: while half-open it is the one probe."""
        self._is_probing = self._open_until_ns is not None

    def probe_over(self) -> None:
        """Note that the probe ended without a verdict: another may try."""
        self._is_probing = False

    def state(self, now_ns: int) -> CircuitState:
        if self._open_until_ns is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if now_ns < self._open_until_ns else CircuitState.HALF

    def lets_through(self, now_ns: int) -> bool:
        state = self.state(now_ns)
        return state is CircuitState.CLOSED or (state is CircuitState.HALF and not self._is_probing)

    def allowance(self, now_ns: int) -> float:
        """Share of the lanes that may be used, 0..1: grows over `warm_up_ms`."""
        if self._warm_at_ns is None or not self._limits.warm_up_ms:
            self._warm_at_ns = None
            return 1.0
        share = (now_ns - self._warm_at_ns) / (self._limits.warm_up_ms * MS)
        if share >= 1.0:
            self._warm_at_ns = None
            return 1.0
        return max(0.0, share)
