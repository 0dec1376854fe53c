"""Who may begin a handshake. Pure: the listener asks, with the time.

Limits (fleet.md 2): so many pending handshakes in all and per address, so many new connections a second per address. When
the pending ones are full the oldest gives way, if it has had its time for an honest handshake: a crowd of silent sockets
then cannot keep an honest head out, and a crowd of honest heads does not cut each other off.
An address is an IPv4 address or an IPv6 network of 64 bits; tables are bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

from superfluid_core.clock import MS, SECOND
from superfluid_core.limits import LinkLimits

ADDRESSES_MAX = 4_096
PROTECTED_MS = 500
"""A pending handshake younger than this is never made to give way."""


def address_key(host: str) -> str:
    """Name what limits count: the IPv4 address (mapped ones too), or the /64 of an IPv6 address."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host[:64]
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(IPv6Address(int(address) >> 64 << 64)) + "/64"
    return str(address)


class Admission(NamedTuple):
    """`number` names the admitted handshake; `evicted` the one that has to be aborted; or the `cause` of a no."""

    number: int | None
    evicted: int | None = None
    cause: str = ""


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_ns: int


class Prelimits:
    """Counts handshakes and connection rates."""

    def __init__(self, limits: LinkLimits) -> None:
        self._limits = limits
        self._pending: OrderedDict[int, tuple[str, int]] = OrderedDict()
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._last_number = 0

    @property
    def pending(self) -> int:
        return len(self._pending)

    def admit(self, host: str, now_ns: int) -> Admission:
        """Ask for one handshake; `release` it when it has ended, however."""
        address = address_key(host)
        if not self._take(address, now_ns):
            return Admission(None, cause="too many new connections from this address")
        own = [number for number, (other, _) in self._pending.items() if other == address]
        evicted: int | None = None
        if len(own) >= self._limits.pending_per_address_max:
            evicted = own[0]
        elif len(self._pending) >= self._limits.pending_handshakes_max:
            evicted = next(iter(self._pending))
        if evicted is not None:
            if now_ns - self._pending[evicted][1] < PROTECTED_MS * MS:
                return Admission(None, cause="too many handshakes are pending")
            self.release(evicted)
        self._last_number += 1
        self._pending[self._last_number] = (address, now_ns)
        return Admission(self._last_number, evicted)

    def release(self, number: int) -> None:
        """Forget a handshake; harmless when it was evicted before."""
        self._pending.pop(number, None)

    def _take(self, address: str, now_ns: int) -> bool:
        burst = float(self._limits.new_burst_per_address)
        bucket = self._buckets.get(address)
        if bucket is None:
            bucket = self._buckets[address] = _Bucket(burst, now_ns)
            if len(self._buckets) > ADDRESSES_MAX:
                self._buckets.popitem(last=False)
        rate = self._limits.new_per_second_per_address
        filled = bucket.tokens + (now_ns - bucket.filled_ns) * rate / SECOND
        bucket.tokens = min(burst, filled)
        bucket.filled_ns = now_ns
        self._buckets.move_to_end(address)
        if bucket.tokens < 1.0:
            return False
        bucket.tokens -= 1.0
        return True


class LogGate:
    """Lets one line a second per address through; `skipped` tells how many it held back before."""

    def __init__(self, period_ms: int = 1_000) -> None:
        self._period_ns = period_ms * MS
        self._last: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def admit(self, host: str, now_ns: int) -> int | None:
        """Return how many lines were held back since the last one, or None to hold this one back."""
        address = address_key(host)
        last_ns, skipped = self._last.get(address, (now_ns - self._period_ns, 0))
        if now_ns - last_ns < self._period_ns:
            self._last[address] = (last_ns, skipped + 1)
            return None
        self._last[address] = (now_ns, 0)
        self._last.move_to_end(address)
        if len(self._last) > ADDRESSES_MAX:
            self._last.popitem(last=False)
        return skipped
