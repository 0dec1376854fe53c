"""Where a request really comes from, and how many connections one place may have (access.md, Listeners and browsers).

Only a trusted proxy's `X-Forwarded-For` is believed, from its right end to the first address that is no trusted proxy's: what stands
left of that was written by a stranger. IPv6 clients are counted by their /64, of which each has as many addresses as it likes.
Knows addresses and header values, no sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

from superfluid_core.link.addresses import KNOWN_MAX, is_loopback

Network = IPv4Network | IPv6Network
FORWARDED_MAX = 32
"""Addresses of a forwarding chain that are looked at."""
IPV6_PREFIX = 64


def parse_network(text: str) -> Network:
    """Parse `--trusted-proxy`: an address or a network. Raises ValueError."""
    try:
        return ip_network(text.strip(), strict=False)
    except ValueError:
        raise ValueError(f"not a network such as 10.0.0.0/8: {text[:60]!r}") from None


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        found = ip_address(text.strip().strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found


class Proxies:
    """The peers whose word about their clients counts."""

    def __init__(self, networks: Iterable[Network] = ()) -> None:
        self._networks = tuple(networks)

    def trust(self, address: str) -> bool:
        found = _address(address)
        return found is not None and any(
            found.version == network.version and found in network for network in self._networks
        )

    def client(self, peer: str, forwarded: Sequence[str]) -> str:
        """Return who asks: the peer, or the nearest stranger that trusted proxies name."""
        if not self._networks or not self.trust(peer):
            return peer
        named = [part.strip() for line in forwarded for part in line.split(",")]
        found = peer
        for text in reversed(named[-FORWARDED_MAX:]):
            address = _address(_without_port(text))
            if address is None:
                return found
            found = str(address)
            if not self.trust(found):
                return found
        return found


def _without_port(text: str) -> str:
    """Take off the port that some proxies write: 1.2.3.4:5678, [::1]:5678."""
    if text.startswith("["):
        return text.partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text


@lru_cache(KNOWN_MAX)
def counted_as(address: str) -> str:
    """Return the name under which a client address is counted."""
    found = _address(address)
    if isinstance(found, IPv6Address):
        return str(ip_network((found, IPV6_PREFIX), strict=False))
    return address if found is None else str(found)


class Connections:
    """How many connections each address has; loopback and trusted proxies stand for many clients and are not counted."""

    def __init__(self, per_address_max: int, proxies: Proxies) -> None:
        self._max = per_address_max
        self._proxies = proxies
        self._open: dict[str, int] = {}

    def enter(self, address: str) -> bool:
        """Count a connection; False when that is one too many, which is not counted."""
        if not self._max or is_loopback(address) or self._proxies.trust(address):
            return True
        name = counted_as(address)
        if self._open.get(name, 0) >= self._max:
            return False
        self._open[name] = self._open.get(name, 0) + 1
        return True

    def leave(self, address: str) -> None:
        """Forget a connection that was let in."""
        name = counted_as(address)
        if name in self._open:  # those that are not counted are not there
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]
